"""One model call of a session, from messages to stored interactions: every trained token passes here.

    recorder = Recorder(store, renderer, router, defaults=config.gconfig, sampling="client", seed=1, max_context=2048)
    async with sessions.calling(key, task) as live:
        answer = await recorder.answer(live, call, "chatcmpl-", emit)       # await emit(event) as tokens are sampled

1. the longest recorded conversation that the call continues keeps its own sampled ids (renderer.extend); where that cannot be,
   the call starts a new branch, and the reason is stored (plan.py). 2. n choices are sampled; stop texts abort the backend.
3. each choice is in the store before its closing event is emitted. A call that is cancelled (the client hung up, the session
   ends) or that fails in mid-stream closes its backend stream at once and leaves its tokens in the store, tagged aborted. Errors:
   BadRequest, ContextOverflow, Forbidden (an upstream model), NotFound (previous answer), BackendError, BackendTimeout, StoreError. Used by model_routes.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from areal.base.errors import ArealError, BackendError, ContextOverflow, Forbidden, NotFound, StoreError
from areal.base.types import (
    FinishReason,
    Fork,
    GenerateRequest,
    Interaction,
    ModelCall,
    Purpose,
    SamplingParams,
    Tag,
    TokenChunk,
)
from areal.chat.base import Renderer
from areal.chat.deltas import call_id
from areal.config.rollout import GenerationConfig, SamplingOwner
from areal.inference.upstream.names import nearly_upstream, no_such_model
from areal.proxy.conversation import Conversation
from areal.proxy.dialects.base import Answer, Choice, ChoiceEnded, Event, Started
from areal.proxy.divergence import Divergence
from areal.proxy.generation import Generation
from areal.proxy.live import LiveSession
from areal.proxy.plan import Plan, make_plan
from areal.store.base import Store

_log = logging.getLogger("areal.proxy")

LONG_PROMPT = 16_384  # characters; from here on rendering leaves the event loop to the other streams
LONG_REQUEST = 65_536  # bytes, of many short messages or of large tools; likewise

Emit = Callable[[Event], Awaitable[None]]


class Generates(Protocol):
    """A backend, or a router over several."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]: ...


@dataclass(slots=True)
class _Call:
    """One call while it runs."""

    id: str
    live: LiveSession
    call: ModelCall
    plan: Plan
    sampling: SamplingParams
    grammar: str
    first_index: int
    emit: Emit
    request_id: str
    started_at: float = field(default_factory=time.time)
    started: bool = False

    def answer(self, choices: tuple[Choice, ...] = ()) -> Answer:
        cached = self.plan.reused_tokens
        return Answer(self.id, self.call.model, int(self.started_at), len(self.plan.prompt.ids), choices, cached)

    def interaction_id(self, choice: int) -> str:
        return self.id if self.call.n == 1 else f"{self.id}#{choice}"

    def another_choice(self) -> Fork:
        """Of every choice but the first: they share the prompt, and one row goes on with one of them."""
        return Fork("choice", "another choice of one call", self.interaction_id(0), len(self.plan.prompt.ids))


class Recorder:
    """Runs and records model calls. One event loop, any number of calls at once.

    max_context: most tokens of prompt + output the backend takes. eval_temperature: of eval sessions whose client names
    none (0 = greedy). policy_names: model names that mean the policy; upstream_names: those of the channel."""

    def __init__(
        self,
        store: Store,
        renderer: Renderer,
        backend: Generates,
        *,
        defaults: GenerationConfig,
        seed: int,
        max_context: int,
        sampling: SamplingOwner = "client",
        eval_temperature: float = 0.0,
        policy_names: frozenset[str] = frozenset(),
        upstream_names: frozenset[str] = frozenset(),
    ) -> None:
        self._store = store
        self._renderer = renderer
        self._backend = backend
        self._defaults = defaults
        self._seed = seed
        self._max_context = max_context
        self._owner = sampling
        self._eval_temperature = eval_temperature
        self._policy_names = policy_names | {"default"}
        self._upstream_names = upstream_names

    async def answer(
        self, live: LiveSession, call: ModelCall, id_prefix: str, emit: Emit, request_id: str = ""
    ) -> Answer:
        """Sample and store all choices of a call, under the id of its HTTP request. Emits Started, Pieces and ChoiceEnded; returns what they add up to."""
        self.check_model(call.model)
        call = live.conversation.resolved(call)
        first_index = live.conversation.reserve(call.n)
        found = live.conversation.continued_by(call)
        why = live.conversation.divergence(call, found, side_request=self._is_side_request(live, call))
        with live.conversation.going_on(found):
            plan = await self._plan(found, call, why)
            grammar = self._grammar(plan, call)
            await self._retag(live.conversation, live.conversation.superseded_by(call), "superseded")
            helper = None
            if not call.background:
                helper = live.conversation.policy.note(call.model, tools=bool(call.tools), always=self._policy_names)
            if helper is not None:
                await self._retag(
                    live.conversation, filter(lambda one: one.model == helper, live.conversation), "side_request"
                )
            running = _Call(
                id=id_prefix + call_id(29),
                live=live,
                call=call,
                plan=plan,
                sampling=self._complete(call.sampling, len(plan.prompt.ids), live.session.purpose),
                grammar=grammar,
                first_index=first_index,
                emit=emit,
                request_id=request_id,
            )
            try:
                return running.answer(await self._choices(running))
            except BaseException:  # the client gets no answer: choices that were finished were not delivered
                await _to_the_end(self.undelivered(live, live.conversation.choices(running.id)))
                raise

    async def undelivered(self, live: LiveSession, interaction_ids: Iterable[str]) -> None:
        """The client was gone before these answers could be sent: the same call again replaces them (settled 12), whichever
        worker it comes to."""
        named = set(interaction_ids)
        for one in [one for one in live.conversation if one.id in named and "aborted" not in one.tags]:
            try:
                await self._retag(live.conversation, [one], "undelivered")
            except StoreError as error:  # then this worker alone knows
                live.conversation.retag(one.id, "undelivered")
                _log.warning("that answer %s was not delivered could not be stored: %s", one.id, error)

    async def count(self, conversation: Conversation, call: ModelCall) -> int:
        """How many prompt tokens this call would have if it were made now; records nothing, and no prompt is too long."""
        self.check_model(call.model)
        try:
            call = conversation.resolved(call)
            plan = await self._plan(conversation.continued_by(call), call)
        except ContextOverflow as error:
            return error.tokens
        return len(plan.prompt.ids)

    async def _plan(self, found: list[Interaction], call: ModelCall, why: Divergence | None = None) -> Plan:
        work = partial(make_plan, self._renderer, found, call, self._max_context, why)
        if call.size < LONG_REQUEST and sum(len(message.content) for message in call.messages) < LONG_PROMPT:
            return work()
        return await asyncio.to_thread(work)

    def _grammar(self, plan: Plan, call: ModelCall) -> str:
        wanted = call.sampling.constraint
        return "" if wanted is None else self._renderer.grammar(plan.prompt.text, call.tools, wanted)

    async def _choices(self, running: _Call) -> tuple[Choice, ...]:
        """All choices at once; the first failure ends the others."""
        if running.call.n == 1:
            return (await self._choice(running, 0),)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._choice(running, index)) for index in range(running.call.n)]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return tuple(task.result() for task in tasks)

    async def _choice(self, running: _Call, index: int) -> Choice:
        """Sample one choice to its end and store it."""
        prompt, call = running.plan.prompt, running.call
        parser = self._renderer.parser(prompt.text, call.tools, stop=running.sampling.stop)
        generation = Generation(self._renderer.tokenizer, running.sampling, parser, index=index)
        try:
            async with aclosing(self._backend.generate(self._request(running, index))) as chunks:
                async for chunk in chunks:
                    if not chunk.token_ids and chunk.finish_reason is None:
                        continue  # nothing was sampled, so a failure may still have its own status
                    if not running.started:
                        running.started = True
                        await running.emit(Started(running.answer()))
                    await running.emit(generation.feed(chunk))
                    if generation.finished:
                        break
            await running.emit(generation.finish())
            if generation.finish_reason() in ("abort", "error"):
                raise BackendError("the inference server stopped this request before it was complete; try again")
        except (ArealError, asyncio.CancelledError) as failure:
            reason: FinishReason = "error" if isinstance(failure, ArealError) else "abort"
            if generation.tokens:
                await _to_the_end(self._record(running, index, generation, reason, "aborted"))
            raise
        # Stored even if the client hangs up at this very moment: what is finished is never lost.
        await _to_the_end(self._record(running, index, generation, generation.finish_reason()))
        choice = Choice(
            index=index,
            interaction_id=running.interaction_id(index),
            message=generation.message(),
            finish_reason=generation.finish_reason(),
            completion_tokens=generation.tokens,
            tokens=generation.shown,
            stop_text=generation.stop_text,
        )
        await running.emit(ChoiceEnded(choice))
        return choice

    async def _record(
        self, running: _Call, index: int, generation: Generation, reason: FinishReason, *tags: Tag
    ) -> None:
        plan, call = running.plan, running.call
        completion = generation.completion(reason)
        interaction = Interaction(
            id=running.interaction_id(index),
            session_id=running.live.id,
            index=running.first_index + index,
            prompt_ids=plan.prompt.ids,
            completion=completion,
            messages=plan.messages,
            reply=generation.message(),
            tools=call.tools,
            sampling=running.sampling,
            model=call.model,
            token_parent=plan.prompt.parent,
            credit_parent=plan.credit_parent or call.previous or None,  # named, even where its set-up was another
            fork=plan.fork if index == 0 else running.another_choice(),
            tags=(
                *tags,
                *generation.tags(completion),
                *(("side_request",) if self._is_side_request(running.live, call) else ()),
            ),
            started_at=running.started_at,
            finished_at=time.time(),
            request_id=running.request_id,
        )
        if "untrainable" in interaction.tags:
            _log.warning("interaction %s is not trainable: the backend gave a token no finite log-prob", interaction.id)
        await self._store.sessions.add(interaction)
        running.live.conversation.add(interaction)
        if self._is_side_request(running.live, call) and "side_request" not in interaction.tags:
            # A helper's, as came out while it was being stored.
            await self._retag(running.live.conversation, [interaction], "side_request")

    def _request(self, running: _Call, choice: int) -> GenerateRequest:
        session, asked = running.live.session, running.call.sampling.seed
        if asked is not None and self._owner == "client":
            seed = rng_seed(asked, "", 0, 0, choice)
        else:
            seed = rng_seed(self._seed, session.task_id, session.attempt, running.first_index, choice)
        return GenerateRequest(
            request_id=running.interaction_id(choice),
            session_id=session.id,
            prompt_ids=running.plan.prompt.ids,
            sampling=running.sampling,
            rng_seed=seed,
            grammar=running.grammar,
        )

    def _complete(self, asked: SamplingParams, prompt_tokens: int, purpose: Purpose) -> SamplingParams:
        """Nothing left open: the client's values, else the policy's (`gconfig`, in eval sessions the evaluator's
        temperature); never more than the context holds."""
        defaults, room = self._defaults, self._max_context - prompt_tokens
        wanted = asked.max_tokens or defaults.max_new_tokens or room
        temperature = defaults.temperature if purpose == "train" else self._eval_temperature
        own = asked if self._owner == "client" else SamplingParams()
        return SamplingParams(
            max_tokens=min(wanted, room),
            temperature=temperature if own.temperature is None else own.temperature,
            top_p=defaults.top_p if own.top_p is None else own.top_p,
            top_k=defaults.top_k if own.top_k is None else own.top_k,
            seed=own.seed,
            stop=asked.stop,
            stop_token_ids=(*self._renderer.tokenizer.eos_ids, *asked.stop_token_ids),
            top_logprobs=asked.top_logprobs,
            want_logprobs=asked.want_logprobs,
            constraint=asked.constraint,
        )

    def check_model(self, name: str) -> None:
        """A misspelt reward_model must not be answered by the policy it is meant to judge, nor the policy ask its judge (settled 16).
        Raises NotFound, Forbidden."""
        if name in self._upstream_names:
            raise Forbidden(
                f"this key may not ask {name[:80]}, which may be what scores it; ask with the internal token (rollout.agent.internal_token), "
                "or let the run ask it (rollout.agent.reward_source)"
            )
        meant = None if name in self._policy_names else nearly_upstream(name)
        if meant is not None:
            raise NotFound(no_such_model(name, meant))

    def _is_side_request(self, live: LiveSession, call: ModelCall) -> bool:
        policy = live.conversation.policy
        return call.background or policy.is_side_request(call.model, tools=bool(call.tools), always=self._policy_names)

    async def _retag(self, conversation: Conversation, found: Iterable[Interaction], tag: Tag) -> None:
        for one in found:
            if tag not in one.tags:
                await self._store.sessions.tag(one.id, tag)
                conversation.retag(one.id, tag)


def rng_seed(seed: int, task_id: str, attempt: int, index: int, choice: int) -> int:
    """The sampler's key of one choice (docs/architecture.md, "Determinism"): unsigned, 64 bits."""
    text = "\0".join((str(seed), task_id, str(attempt), str(index), str(choice)))
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Run to completion whatever cancels the caller meanwhile; the cancellation is delivered afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as again:
            cancelled = again
        except ArealError:
            break
    task.result()
    if cancelled is not None:
        raise cancelled
