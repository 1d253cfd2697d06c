"""The engine: plan a step, compute it, sample, hand out tokens. Single-threaded; runner.py gives it a thread.

    engine = Engine(net, version=0, settings=EngineSettings(max_context=2048))
    engine.add(engine.sequence_of(request))
    while engine.busy:
        for sequence, event in engine.step():      # TokenChunk, or the ArealError that ended this sequence
            ...
    engine.swap(new_net, version=1)                # between two steps; running sequences go on under it

Every token carries the version whose weights sampled it (T065). A sequence whose logits are not finite fails alone.
"""

from __future__ import annotations

import itertools
import math

import torch

from areal.base.errors import ArealError, BackendError, BadRequest, ContextOverflow
from areal.base.types import FinishReason, GenerateRequest, TokenChunk
from areal.inference.native.batch import Batch
from areal.inference.native.grammars import Matcher, allowed_tokens
from areal.inference.native.kv_cache import KvCache
from areal.inference.native.sampler import Draw, Drawn, Mask, sample
from areal.inference.native.scheduler import Chunk, EngineSettings, Plan, Scheduler, Sequence
from areal.models.dense import DenseNet

Event = tuple[Sequence, TokenChunk | ArealError]

LEAST_TEMPERATURE = 1e-4  # below it, logits divided by it lose what float32 knows of their differences


class Engine:
    """See the module's docstring. eos_ids: end every request, beside its own stop_token_ids; None = the model's."""

    def __init__(
        self, net: DenseNet, *, version: int, settings: EngineSettings, eos_ids: frozenset[int] | None = None
    ) -> None:
        self.net = net
        self.version = version
        self.settings = settings
        self.computed_tokens = 0  # through the net, ever
        self._eos_ids = frozenset(net.config.eos_ids) if eos_ids is None else eos_ids
        self._cache = KvCache(net.config, max_context=settings.max_context, dtype=net.dtype, device=net.device)
        self.scheduler = Scheduler(self._cache, settings)
        self._numbers = itertools.count()

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def sequence_of(self, request: GenerateRequest, matcher: Matcher | None = None) -> Sequence:
        """To be added later; its output ends at max_tokens or at the end of the context. Reads nothing that changes, so
        it may be called from any one thread. matcher: of request.grammar. Raises BadRequest, ContextOverflow."""
        self._check(request)
        limit = self.settings.max_context
        if request.sampling.max_tokens is not None:
            limit = min(limit, len(request.prompt_ids) + max(1, request.sampling.max_tokens))
        ends = self._eos_ids | frozenset(request.sampling.stop_token_ids)
        return Sequence(next(self._numbers), request, limit, ends, matcher)

    def add(self, sequence: Sequence) -> None:
        """Queue it."""
        self.scheduler.add(sequence)

    @torch.inference_mode()
    def abort(self, sequence: Sequence) -> None:
        """Forget it; nothing more is said about it. One that has ended already is ignored."""
        self.scheduler.drop(sequence)

    def swap(self, net: DenseNet, version: int) -> None:
        """Go on under other weights of the same shape. KV of the old ones is never read again (settled 7)."""
        self.net, self.version = net, version
        self.scheduler.start_over()

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Compute what the scheduler planned; what it sampled, in no particular order."""
        events: list[Event] = []
        for plan in self._passes(self.scheduler.plan()):
            batch = Batch(plan, self._cache, self.net.config, self.net.dtype, self.net.device)
            hidden = self.net.forward(batch.ids, batch.positions, batch.attend)
            batch.advance()
            self.computed_tokens += batch.tokens
            if batch.sampling:
                mask = self._mask(batch.sampling)
                logits = self.net.logits(hidden[batch.sampling_rows])
                drawn = sample(logits, [_draw(s) for s in batch.sampling], mask)
                events += [self._emit(s, row, drawn) for row, s in enumerate(batch.sampling)]
        return events

    def _check(self, request: GenerateRequest) -> None:
        ids, sampling = request.prompt_ids, request.sampling
        if len(ids) >= self.settings.max_context:
            raise ContextOverflow(len(ids), self.settings.max_context - 1)
        if len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= self.net.config.vocab_size:
            raise BadRequest(
                f"token_ids must be 1 or more ids within 0..{self.net.config.vocab_size - 1}; "
                "is the tokenizer of another model in use?",
                param="token_ids",
            )
        temperature = 1.0 if sampling.temperature is None else sampling.temperature
        if not (math.isfinite(temperature) and (temperature == 0 or temperature >= LEAST_TEMPERATURE)):
            raise BadRequest(
                f"temperature is {temperature}; it must be 0 (greedy) or at least {LEAST_TEMPERATURE}",
                param="temperature",
            )
        if sampling.top_p is not None and not 0 < sampling.top_p <= 1:
            raise BadRequest(f"top_p is {sampling.top_p}; it must be above 0 and at most 1", param="top_p")
        if (sampling.top_k or 0) < 0:
            raise BadRequest(f"top_k is {sampling.top_k}; it must be 1 or more, or 0 for off", param="top_k")

    def _mask(self, sequences: list[Sequence]) -> Mask | None:
        """What the grammars of these sequences allow next; one that is stuck is allowed everything, for it ends here anyway."""
        matchers = {row: s.matcher for row, s in enumerate(sequences) if s.matcher is not None}
        if not matchers:
            return None
        return Mask(list(matchers), allowed_tokens(list(matchers.values()), self.net.config.vocab_size))

    def _passes(self, plan: Plan) -> list[Plan]:
        """One forward pass for all; in deterministic mode one each, so that shapes do not depend on the others."""
        if not self.settings.deterministic:
            return [plan] if plan.decode or plan.chunks else []
        alone: list[Plan] = [Plan([sequence], []) for sequence in plan.decode]
        return alone + [Plan([], [Chunk(c.sequence, c.start, c.end)]) for c in plan.chunks]

    def _emit(self, sequence: Sequence, row: int, drawn: Drawn) -> Event:
        """Append the sampled token, move the sequence on, and say what happened."""
        matcher = sequence.matcher
        if matcher is not None and matcher.failure:
            self.scheduler.drop(sequence)
            return sequence, BackendError(
                f"the format of this call could not be kept: {matcher.failure}; ask for a simpler one"
            )
        if not drawn.ok[row]:
            self.scheduler.drop(sequence, poisoned=True)
            return sequence, BackendError(
                f"the model's logits are NaN or infinite under weights version {self.version} at output token "
                f"{sequence.length - sequence.prompt_length}; look at the training step that published them"
            )
        token = int(drawn.token_ids[row])
        sequence.tokens[sequence.length] = token
        sequence.length += 1
        reason: FinishReason | None = None
        if token in sequence.ends or (matcher is not None and matcher.accept(token)):
            reason = "stop"
        elif sequence.length == sequence.limit:
            reason = "length"
        if reason is not None:
            self.scheduler.finished(sequence)
        elif not sequence.decoding:
            self.scheduler.prefilled(sequence)
        return sequence, TokenChunk(
            token_ids=(token,),
            logprobs=(float(drawn.logprobs[row]),),
            versions=(self.version,),
            kept_mass=(float(drawn.kept_mass[row]),),
            top=drawn.top[row : row + 1] if drawn.top[row] else (),
            constrained=None if matcher is None else (bool(drawn.constrained[row]),),
            finish_reason=reason,
        )


def _draw(sequence: Sequence) -> Draw:
    position = sequence.length - sequence.prompt_length
    return Draw(sequence.request.sampling, sequence.request.rng_seed, position)
