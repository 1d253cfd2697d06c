"""Which tokens the next step computes: continuous batching with chunked prefill under a KV budget.

    scheduler.add(sequence)
    plan = scheduler.plan()                        # decode: one token each; chunks: parts of prompts
    ... compute, then for every sequence that sampled: scheduler.prefilled(s) | scheduler.finished(s)

First come, first served: admission stops at the first sequence that does not fit, so nobody starves. When decoding
sequences outgrow the budget, first kept prefixes go (least recently used), then the youngest sequence steps back to the queue
and is computed again later; the oldest always goes on. A sequence whose beginning is just being computed for another one
waits for that instead of computing it again (the shared prompt of a group). One owner, the engine's thread.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np

from areal.base.types import GenerateRequest, IntArray
from areal.inference.native.grammars import Matcher
from areal.inference.native.kv_cache import KvCache, SequenceKv
from areal.inference.native.prefix_cache import PrefixCache, common_prefix

_WORTH_WAITING = 16  # tokens: computing fewer twice is cheaper than a step of waiting
_HEADROOM = 16  # tokens per running sequence left free at admission, so that it is not sent back at once


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """See config/rollout.py: NativeConfig. max_context: already bounded by the model and by kv_tokens."""

    max_context: int
    max_batch: int = 64
    kv_tokens: int = 65536
    prefill_chunk: int = 512
    prefix_reuse: bool = True
    deterministic: bool = False


class Sequence:
    """One request on its way: prompt and sampled tokens, and how far its KV is."""

    __slots__ = ("ends", "kv", "length", "limit", "matcher", "number", "prompt_length", "request", "reserved", "tokens")

    def __init__(
        self,
        number: int,
        request: GenerateRequest,
        limit: int,
        ends: frozenset[int],
        matcher: Matcher | None = None,
    ) -> None:
        self.number = number  # order of arrival
        self.request = request
        self.prompt_length = len(request.prompt_ids)
        self.limit = limit  # longest prompt + output
        self.ends = ends  # token ids that end it
        self.matcher = matcher  # of its grammar; it has seen every sampled token, whatever becomes of the KV
        self.tokens: IntArray = np.empty(limit, np.int32)
        self.tokens[: self.prompt_length] = request.prompt_ids
        self.length = self.prompt_length
        self.kv: SequenceKv | None = None
        self.reserved = 0  # tokens of the KV budget it holds

    @property
    def known(self) -> IntArray:
        """Prompt and what was sampled so far."""
        return self.tokens[: self.length]

    @property
    def decoding(self) -> bool:
        """All but its last token have their KV, in a row of a bank."""
        return self.kv is not None and self.kv.bank is not None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start..end of a sequence to compute; `last` when its next token can then be sampled."""

    sequence: Sequence
    start: int
    end: int

    @property
    def last(self) -> bool:
        return self.end == self.sequence.length


@dataclass(frozen=True, slots=True)
class Plan:
    decode: list[Sequence]
    chunks: list[Chunk]


class Scheduler:
    """See the module's docstring."""

    def __init__(self, cache: KvCache, settings: EngineSettings) -> None:
        self._cache = cache
        self._settings = settings
        self._reuse = settings.prefix_reuse and not settings.deterministic  # a hit would change the shapes computed
        self._reserved = 0
        self.prefixes = PrefixCache()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.reused_tokens = 0  # prompt tokens taken from the prefix cache, ever

    @property
    def kv_tokens_free(self) -> int:
        """What new work could get: kept prefixes give way."""
        return self._settings.kv_tokens - self._reserved

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def plan(self) -> Plan:
        """What to compute now; empty when there is nothing."""
        self._let_decoding_grow()
        self._admit()
        return Plan(decode=[s for s in self.running if s.decoding], chunks=self._next_chunks())

    def prefilled(self, sequence: Sequence) -> None:
        """Its last chunk was computed and it goes on: keep the prefix for others, take a row to decode in."""
        assert sequence.kv is not None
        self._keep(sequence)
        self._cache.start_decoding(sequence.kv)

    def finished(self, sequence: Sequence) -> None:
        """It is complete: its KV serves the next turn of its session."""
        self._release(sequence, keep=True)

    def drop(self, sequence: Sequence, *, poisoned: bool = False) -> None:
        """Aborted or failed, wherever it is; everything it holds is free at once. poisoned: its KV holds NaN."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self._release(sequence, keep=False, poisoned=poisoned)

    def start_over(self) -> None:
        """The weights changed: no KV is valid any more; running sequences are computed again, in their order."""
        for sequence in self.running:
            sequence.kv, sequence.reserved = None, 0
            bisect.insort(self.waiting, sequence, key=_arrival)
        self.running.clear()
        self._reserved = 0
        self._cache.reset()
        self.prefixes.clear()

    def _let_decoding_grow(self) -> None:
        """One more token for each decoding sequence. A lone sequence always fits: max_context <= kv_tokens."""
        while True:
            needed = {s: s.kv.length + 1 for s in self.running if s.kv is not None and s.decoding}
            growth = sum(max(0, tokens - s.reserved) for s, tokens in needed.items())
            if self._make_free(growth):
                break
            self._step_back(self.running[-1])
        for sequence, tokens in needed.items():
            self._reserve(sequence, max(tokens, sequence.reserved))

    def _step_back(self, sequence: Sequence) -> None:
        self._release(sequence, keep=False)
        bisect.insort(self.waiting, sequence, key=_arrival)

    def _admit(self) -> None:
        for sequence in list(self.waiting):
            if len(self.running) >= self._settings.max_batch:
                break
            if self._reuse and self._beginning_is_underway(sequence):
                continue
            tokens = sequence.limit if self._settings.deterministic else sequence.length
            headroom = _HEADROOM * (len(self.running) + 1) if self.running else 0
            if not self._make_free(tokens + headroom):
                break
            self.waiting.remove(sequence)
            bisect.insort(self.running, sequence, key=_arrival)
            self._reserve(sequence, tokens)
            sequence.kv = self._cache.new(sequence.length)
            if self._reuse:  # the last token is computed in any case: its logits are wanted
                assert sequence.kv.own is not None
                sequence.kv.length = self.prefixes.copy_into(sequence.known[:-1], sequence.kv.own)
                self.reused_tokens += sequence.kv.length

    def _beginning_is_underway(self, sequence: Sequence) -> bool:
        prefilling = [s for s in self.running if not s.decoding]
        if not prefilling:
            return False
        tokens = sequence.known[:-1]
        shared = max(common_prefix(s.known, tokens) for s in prefilling)
        return shared >= _WORTH_WAITING and shared - self.prefixes.match(tokens) >= _WORTH_WAITING

    def _next_chunks(self) -> list[Chunk]:
        """In deterministic mode a chunk is never cut short by what others compute: whole chunks, or none."""
        budget = self._settings.prefill_chunk
        chunks = []
        for sequence in self.running:
            if sequence.decoding:
                continue
            assert sequence.kv is not None
            start = sequence.kv.length
            wanted = min(sequence.length - start, self._settings.prefill_chunk)
            size = min(wanted, budget)
            if size == 0 or (size < wanted and self._settings.deterministic):
                break
            chunks.append(Chunk(sequence, start, start + size))
            budget -= size
        return chunks

    def _keep(self, sequence: Sequence) -> None:
        """Copy its KV to the prefix cache, if there is room for it."""
        if not self._reuse:
            return
        assert sequence.kv is not None
        tokens = sequence.tokens[: sequence.kv.length]
        if self._make_free(len(tokens) - self.prefixes.match(tokens)):
            self.prefixes.insert(tokens, sequence.kv.view())

    def _release(self, sequence: Sequence, *, keep: bool, poisoned: bool = False) -> None:
        assert sequence.kv is not None
        self._reserve(sequence, 0)
        if keep:
            self._keep(sequence)
        self._cache.free(sequence.kv, poisoned=poisoned)
        sequence.kv = None
        self.running.remove(sequence)

    def _reserve(self, sequence: Sequence, tokens: int) -> None:
        self._reserved += tokens - sequence.reserved
        sequence.reserved = tokens

    def _make_free(self, tokens: int) -> bool:
        """Whether `tokens` more fit in the budget; kept prefixes go for it, but only if that is enough."""
        short = tokens - (self._settings.kv_tokens - self._reserved - self.prefixes.tokens)
        if short > self.prefixes.tokens:
            return False
        if short > 0:
            self.prefixes.evict(short)
        return True


def _arrival(sequence: Sequence) -> int:
    return sequence.number
