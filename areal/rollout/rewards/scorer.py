"""Scores what waits for its reward: the store says which, the source what it is worth, and the store has it before anything else does.

    async with Scorer(store, gate, source, tasks, Terms.of(config), say=announce) as scorer:
        ...                                                     # sessions end, are scored and complete their groups meanwhile
        rewards = await scorer.rewards_of(session_ids)          # of evaluation sessions, once they are scored

Nothing is remembered but what runs: a controller that dies leaves its sessions waiting in the store, and the next one finds them. A
session that `attempts` tries gave no reward is dropped as reward_failed (settled 9), never rewarded with 0; a source that is away is waited for
(health.py). `async with` cancels what runs, and ends with what breaks it. Used by assemble.py; evaluation.py asks it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any, Self

from areal.base.background import background
from areal.base.errors import StoreError
from areal.base.logs import warn
from areal.config.run import RunConfig
from areal.rollout.rewards.case import Case, case_of
from areal.rollout.rewards.health import Health, sessions
from areal.rollout.rewards.source import Away, Crowded, Hopeless, Limited, Rewards, Source, Unreadable
from areal.rollout.rewards.tasks import KnownTasks
from areal.rollout.staleness import StalenessGate
from areal.store.base import Store, Unrewarded

POLL_S = 0.1  # other processes end sessions, and the store cannot call us
PATIENCE = 10  # refusals for a rate limit, while others are answered, that count as one of the attempts
SAY_S = 10.0  # between two lines of the log about failed rewards


@dataclass(frozen=True, slots=True)
class Terms:
    """Of one run, from `rollout.reward`. relative: a group's sessions are scored together."""

    relative: bool
    concurrency: int
    attempts: int
    down_after_s: float
    evaluation_s: float

    @classmethod
    def of(cls, config: RunConfig) -> Terms:
        reward = config.rollout.reward
        return cls(
            reward.relative,
            reward.concurrency,
            reward.attempts,
            reward.down_after_seconds,
            reward.evaluation_seconds,
        )


class Scorer:
    """See the module. One event loop."""

    def __init__(
        self,
        store: Store,
        gate: StalenessGate,
        source: Source,
        tasks: KnownTasks,
        terms: Terms,
        *,
        say: Callable[[str], None],
    ) -> None:
        self._store, self._gate, self._source, self._tasks, self._terms = store, gate, source, tasks, terms
        self._slots = asyncio.Semaphore(terms.concurrency)
        self._health = Health(
            source, gate.hold, down_after_s=terms.down_after_s, say=say, waiting=lambda: len(self._waiting)
        )
        self._waiting: tuple[Unrewarded, ...] = ()
        self._running: set[str] = set()  # units: a session's id, or its group's
        self._failed: Counter[str] = Counter()  # causes that are not said yet
        self._said = -SAY_S
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._stack.callback(self._tell)
        self._stack.push_async_callback(self._health.close)
        await self._stack.enter_async_context(background(self._run(), name="scorer"))
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self._stack.__aexit__(*exc)

    async def groups(self) -> int:
        """Groups whose sessions have all ended and which wait for nothing but rewards."""
        waiting = await self._store.rewards.waiting()
        return len({one.session.group_id for one in waiting if one.closed and one.session.group_id})

    async def rewards_of(self, session_ids: Iterable[str]) -> dict[str, float | None]:
        """Their rewards once they are scored; None for one that has none, and nothing for one that still waits after evaluation_seconds, or
        while the source is away."""
        wanted = set(session_ids)
        waiting: set[str] = set()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._terms.evaluation_s):
                while waiting := wanted & {one.session.id for one in await self._store.rewards.waiting()}:
                    if self._gate.limits.held:
                        break
                    await asyncio.sleep(POLL_S)
        found = {}
        for session_id in wanted - waiting:
            summary = await self._store.reading.session(session_id)
            found[session_id] = summary.reward if summary is not None else None
        return found

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._health.look(), name="first look at the reward source")
            said = False
            while True:
                begun = set(self._running)  # what is done by the time we have read may still stand in it
                try:
                    self._waiting = await self._store.rewards.waiting()
                    said = False
                except StoreError as error:  # away or busy: it passes, and what waits is still there then
                    if not said:
                        warn("Rewards", f"sessions wait for their rewards: {error}")
                    said = True
                for name, unit in self._units(self._waiting):
                    if name not in begun and name not in self._running:
                        self._running.add(name)
                        group.create_task(self._score(name, unit), name=f"score {name}")
                if self._failed and time.monotonic() - self._said >= SAY_S:
                    self._tell()
                await asyncio.sleep(POLL_S)

    def _units(self, waiting: Sequence[Unrewarded]) -> list[tuple[str, list[Unrewarded]]]:
        """What is scored by one call."""
        if not self._terms.relative:
            return [(one.session.id, [one]) for one in waiting]
        units: dict[str, list[Unrewarded]] = defaultdict(list)
        for one in waiting:
            if one.closed:
                units[one.session.group_id or one.session.id].append(one)
        return list(units.items())

    async def _score(self, name: str, unit: Sequence[Unrewarded]) -> None:
        try:
            try:
                cases = [await self._case(one) for one in unit]
            except StoreError:  # `_run` says so, and it waits still when the store is there again
                return
            answered = [case for case in cases if case.answers]
            verdicts: dict[str, Rewards | None] = {case.session_id: None for case in cases}
            if len(answered) < len(cases):
                self._failed["a session has no finished answer that could be rewarded"] += len(cases) - len(answered)
            if answered:
                rewards = await self._rewards(answered)
                verdicts |= {
                    case.session_id: rewards[number] if rewards is not None else None
                    for number, case in enumerate(answered)
                }
            await self._store.rewards.write(verdicts)
            self._gate.opened.set()
        finally:
            self._running.discard(name)

    async def _case(self, one: Unrewarded) -> Case:
        interactions = await self._store.sessions.interactions(one.session.id)
        return case_of(one.session, interactions, self._tasks.data(one.session.task_id))

    async def _rewards(self, cases: Sequence[Case]) -> list[Rewards] | None:
        """None where no reward is to be had."""
        tried = crowded = 0
        while True:
            async with self._slots:
                await self._health.open()  # in here, so that those that wait do not ask all at once when it is over
                started = time.monotonic()
                try:
                    rewards = await self._source.rewards(cases)
                    self._health.answered(started)
                    return rewards
                except (Away, Limited, Hopeless, Unreadable) as error:
                    failed = error
            if isinstance(failed, Limited):
                self._health.limited(failed)
                continue
            if isinstance(failed, Away):
                if not await self._health.away(failed, cases[0], started):
                    continue
                if isinstance(failed, Crowded):
                    await asyncio.sleep(failed.wait_s)
                    crowded += 1
                    if crowded % PATIENCE:
                        continue
            else:
                self._health.answered(started)
            tried += 1
            if isinstance(failed, Hopeless) or tried >= self._terms.attempts:
                self._failed[str(failed)] += len(cases)
                return None

    def _tell(self) -> None:
        """What could not be rewarded since the last line."""
        if not self._failed:
            return
        self._said = time.monotonic()
        [(reason, _)] = self._failed.most_common(1)
        others = len(self._failed) - 1
        warn(
            "Rewards",
            f"no reward from {self._source.name} for {sessions(self._failed.total())}, dropped (reward_failed): {reason}"
            f"{f' (and {others} other causes)' if others else ''}",
        )
        self._failed.clear()
