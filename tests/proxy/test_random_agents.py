"""Agents at random, in three protocols at once: whatever they do, every sampled token is trained once or masked for a reason.

They use tools and reasoning, branch, edit what was said, retry, chain by previous ids, ask for several choices, hang up in mid-answer;
the model writes anything. The store is then read as a trainer reads it.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from areal.base.types import Version
from areal.inference.scripted.script import read_script
from areal.proxy import export
from areal.web.sse import DONE, SseDecoder
from tests.proxy.random_backend import LINES, RandomBackend
from tests.proxy.record_checks import check_exports, check_interactions
from tests.proxy.speakers import Client, Turn, fold, read

PATHS = ("chat", "responses", "messages")


@dataclass(frozen=True)
class Step:
    """One call. place: which history it goes on from. hang_up: after so many pieces of the answer; None: never."""

    place: int
    protocol: str
    stream: bool
    seed: int
    n: int
    act: str
    chained: bool
    limit: int | None
    stop: bool
    greedy: bool
    other_model: bool
    hang_up: int | None


def mostly(usual: Any, *others: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from([usual] * 6 + list(others))


steps = st.builds(
    Step,
    place=st.integers(0, 5),
    protocol=st.sampled_from(PATHS),
    stream=st.booleans(),
    seed=st.integers(0, 2**20),
    n=mostly(1, 2, 3),
    act=st.sampled_from(["say"] * 5 + ["edit", "retry", "again", "restart"]),
    chained=st.booleans(),
    limit=mostly(None, 1, 3),
    stop=mostly(False, True),
    greedy=mostly(False, True),
    other_model=mostly(False, True),
    hang_up=mostly(None, 0, 1, 3),
)
# Each inner list is sent at once; what a step goes on from was answered before its list began.
plans = st.lists(st.lists(steps, min_size=1, max_size=3), min_size=2, max_size=7)


@dataclass
class History:
    """A conversation so far, the answer that it ends with, and the call that brought that."""

    turns: list[Turn]
    answer: str = ""
    sent: tuple[str, dict[str, Any]] | None = None


@dataclass
class Agent:
    """Plays steps against one session."""

    url: str
    key: str
    client: Client
    histories: list[History] = field(
        default_factory=lambda: [History([Turn("system", "Be terse."), Turn("user", "hi")])]
    )

    async def play(self, step: Step, http: aiohttp.ClientSession) -> History | None:
        """The history that came of it, if an answer did."""
        before = self.histories[-1 - step.place % len(self.histories)]
        turns, headers = list(before.turns), {"x-api-key": self.key}
        if step.act in ("retry", "again") and before.sent is not None:
            path, body = before.sent
            headers |= {"x-stainless-retry-count": "1"} if step.act == "retry" else {}
        else:
            turns += self._news(turns, step)
            path, body = getattr(self.client, step.protocol)(turns)
            if step.chained and before.answer and step.act == "say":
                body = self._chained(step.protocol, turns[len(before.turns) :], before.answer) or body
            body |= self._more(step)
        sent = (path, body)
        answer = await self._answer(path, {**body, "stream": step.stream}, headers, step.hang_up, http)
        return None if answer is None else History([*turns, read(answer)], answer["id"], sent)

    def _news(self, turns: list[Turn], step: Step) -> list[Turn]:
        if step.act == "restart":
            turns[1:] = []
            return [Turn("user", f"another start {step.seed % 3}")]
        if step.act == "edit" and len(turns) > 2:
            turns[2] = Turn("assistant", turns[2].text + " edited")
        calls = turns[-1].calls
        results = [Turn("tool", f"result {k}", call_id=call[0]) for k, call in enumerate(calls)]
        return results or ([Turn("user", f"more {step.seed % 3}")] if turns[-1].role == "assistant" else [])

    def _chained(self, protocol: str, news: list[Turn], answer: str) -> dict[str, Any] | None:
        if protocol == "chat" or not news:
            return None
        body: dict[str, Any] = getattr(self.client, protocol)(news)[1]
        if protocol == "responses":
            return {**body, "previous_response_id": answer}
        new = {key: value for key, value in body.items() if key not in ("system", "tools")}
        return {**new, "thread": {"type": "continue", "previous_message_id": answer}}

    def _more(self, step: Step) -> dict[str, Any]:
        more: dict[str, Any] = {"seed": step.seed, "model": "other" if step.other_model else "default"}
        more |= {"n": step.n} if step.protocol == "chat" else {}
        more |= {"stop_sequences" if step.protocol == "messages" else "stop": ["STOP", "b"]} if step.stop else {}
        more |= {"temperature": 0} if step.greedy else {}
        if step.limit is not None:
            more["max_output_tokens" if step.protocol == "responses" else "max_tokens"] = step.limit
        return more

    async def _answer(
        self, path: str, body: Any, headers: Any, hang_up: int | None, http: aiohttp.ClientSession
    ) -> Any:
        if hang_up is not None and not body["stream"]:
            try:
                async with asyncio.timeout(0.002 * hang_up):
                    return await self._answer(path, body, headers, None, http)
            except TimeoutError:
                return None
        decoder, events = SseDecoder(), []
        async with http.post(self.url + path, json=body, headers=headers) as response:
            if response.status != 200:
                assert response.status == 502, await response.text()  # the model broke before its first token
                return None
            if not body["stream"]:
                return await response.json()
            async for chunk in response.content.iter_any():
                events += [one for one in decoder.feed(chunk) if one.data != DONE and one.name != "ping"]
                if hang_up is not None and len(events) > hang_up:
                    response.close()
                    return None
        said = [json.loads(one.data) for one in events]
        broke = "error" in said[-1] or said[-1].get("type") == "response.failed"
        return None if broke else fold(path, said)


class Clock:
    """Seconds since the epoch, moved by the test."""

    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Place:
    """The running service, the model behind it and the clock of both."""

    service: Any
    backend: RandomBackend
    clock: Clock


@pytest.fixture
async def place(make_service: Any, tmp_path: Path) -> Place:
    script = tmp_path / "vocabulary.jsonl"
    script.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    backend, clock = RandomBackend(read_script(script).vocabulary), Clock()
    return Place(await make_service(LINES, parts={"backend": backend, "clock": clock}), backend, clock)


NUMBERS = count()
ENDINGS = ("end", "refresh", "expire")


@settings(
    max_examples=60,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # a failure is seldom the same twice here: concurrent calls take turns as they like
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    plan=plans,
    temper=st.integers(0, 2**16),
    reward=st.none() | st.sampled_from([-1.0, 0.5]),
    ending=st.sampled_from(ENDINGS),
)
async def test_every_sampled_token_is_trained_once_or_masked_for_a_reason(
    place: Place, eventually: Any, plan: list[list[Step]], temper: int, reward: float | None, ending: str
) -> None:
    service, task = place.service, f"task {next(NUMBERS)}"
    key = await service.start(task)
    agent = Agent(service.url, key, Client(random.Random(temper)))
    async with aiohttp.ClientSession() as http:
        for together in plan:
            found = await asyncio.gather(*(agent.play(step, http) for step in together))
            agent.histories += [one for one in found if one is not None]
    await eventually(lambda: place.backend.running == 0 and not service.proxy.sessions.counts()["calls"])
    if reward is not None and any(history.answer for history in agent.histories):
        status, _, _ = await service.reward(key, reward)
        assert status in (200, 400)  # nothing counts as finished where all was retried or asked of another model
    await _end(place, key, ending)
    session = await service.store.sessions.get(task)
    done = await service.store.sessions.interactions(task)
    check_interactions(session, done)
    for one in done:
        sent = place.backend.sent[one.id][: len(one.completion.token_ids)]
        recorded = zip(
            one.completion.token_ids.tolist(),
            one.completion.logprobs.tolist(),
            one.completion.versions.tolist(),
            strict=True,
        )
        assert list(recorded) == sent  # each token with its own log-prob and version, as it was sampled
    exports = [
        (await service.post("/rl/export_trajectories", {"session_id": task, "style": style, "discount": 0.5}))[1]
        for style in ("individual", "concat")
    ]
    check_exports(*exports)
    await _consume(service, session, done)


async def _end(place: Place, key: str, ending: str) -> None:
    service = place.service
    if ending == "expire":
        place.clock.now += 10_000
        assert len(await service.proxy.sessions.expire_idle()) == 1
        return
    if ending == "refresh":
        assert (await service.post("/rl/start_session", {"task_id": "spare", "api_key": key}))[0] == 200
    await service.end(key)


async def _consume(service: Any, session: Any, done: Any) -> None:
    """As the batcher does: what is ready is accounted for and trained; then the whole run adds up."""
    training, shares = service.store.training, export.shares(map(export.fate, done), {})
    for group in await training.ready():
        for one in group.sessions:
            if one.id == session.id:
                await training.account(one.id, shares)
        step = next(NUMBERS)
        await training.advance(Version(step, step, "run"), [group.id])
    counts = await training.counts()
    assert counts.running_sessions == 0
    assert counts.recorded_tokens == counts.trained_tokens + counts.masked_tokens + counts.dropped_tokens
