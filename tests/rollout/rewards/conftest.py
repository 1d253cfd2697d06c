"""A scorer over a real store, whose source a test scripts call by call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from areal.base.types import Limits
from areal.rollout.datasets import Task
from areal.rollout.rewards.case import Case
from areal.rollout.rewards.scorer import Scorer, Terms
from areal.rollout.rewards.source import Rewards
from areal.rollout.rewards.tasks import KnownTasks
from areal.rollout.staleness import StalenessGate
from areal.store.base import Store

TERMS = Terms(relative=False, concurrency=4, attempts=3, down_after_s=0.2, evaluation_s=60.0)
LIMITS = Limits(max_concurrent=64, max_lag=2, batch_groups=8, scored=True)
Answer = Callable[[Sequence[Case]], list[Rewards]]


@dataclass
class Scripted:
    """Source. answer: of each call, or raises. probed: likewise, of each probe."""

    answer: Answer
    probed: Callable[[], None] = lambda: None
    has_probe: bool = True
    name: str = "judge_model (stub)"
    gate: asyncio.Event = field(default_factory=asyncio.Event)  # a call waits for it
    calls: list[tuple[str, ...]] = field(default_factory=list)
    probes: int = 0
    at_once: int = 0
    most_at_once: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    async def rewards(self, cases: Sequence[Case]) -> list[Rewards]:
        self.calls.append(tuple(case.session_id for case in cases))
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            await self.gate.wait()
            return self.answer(cases)
        finally:
            self.at_once -= 1

    async def probe(self, case: Case | None) -> None:
        self.probes += 1
        if self.has_probe:
            self.probed()
        elif case is not None:
            self.answer([case])


def one(reward: float) -> Answer:
    return lambda cases: [{None: reward} for _ in cases]


async def until(holds: Callable[[], Awaitable[Any]], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not await holds():  # noqa: ASYNC110  a store calls nobody
            await asyncio.sleep(0.01)


@dataclass
class Rig:
    """A run's store and gate, its scorer, and what was said."""

    store: Store
    gate: StalenessGate
    scorer: Scorer
    said: list[str]

    async def waiting(self) -> list[str]:
        return [one.session.id for one in await self.store.rewards.waiting()]

    async def nothing_waits(self) -> None:
        async def done() -> bool:
            return not await self.store.rewards.waiting()

        await until(done)

    async def fate(self, session_id: str) -> str:
        summary = await self.store.reading.session(session_id)
        assert summary is not None
        return summary.fate


@pytest.fixture
def scoring(store: Store) -> Any:
    """Opens a scorer; as often as a run is taken up again."""

    @asynccontextmanager
    async def open_scorer(
        source: Any, *, tasks: Sequence[Task] = (), n_samples: int = 1, **terms: Any
    ) -> AsyncIterator[Rig]:
        gate = await StalenessGate.open(store.training, replace(LIMITS, n_samples=n_samples), incarnation="test")
        said: list[str] = []
        async with Scorer(store, gate, source, KnownTasks(tasks), replace(TERMS, **terms), say=said.append) as scorer:
            yield Rig(store, gate, scorer, said)

    return open_scorer
