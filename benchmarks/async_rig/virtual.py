"""A run on the virtual clock: the product's store, admission, gate, dispatcher, queue and batcher; agents and training only take their time.

    ran = play(cell, max_lag=8, slots=170, train_seconds=3.0, warm_up=10, steps=16)     # synchronous: max_lag=0, warm_up=0
    ran.per_second, ran.dropped, ran.longest

An agent's tokens are spread evenly over its length and carry the version that
is current when each is sampled, so what is too old is what the product finds too old.
"""

from __future__ import annotations

import asyncio
import tempfile
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from areal.base.background import background
from areal.base.errors import NoCapacity
from areal.base.types import Completion, Interaction, Limits, Message, SessionRequest, Version
from areal.rollout.advisor import SpeedAdvisor
from areal.rollout.batch import Recipe
from areal.rollout.batcher import Batcher
from areal.rollout.datasets import Task
from areal.rollout.dispatcher import Dispatcher
from areal.rollout.queue import GroupQueue
from areal.rollout.staleness import StalenessGate
from areal.store.base import Store
from areal.web.client import UnexpectedAnswer
from benchmarks.async_rig.loop import Driven, Ran, drive
from benchmarks.async_rig.virtual_time import VirtualLoop, open_inline
from benchmarks.async_rig.workload import Cell

Stale = Literal["drop", "mask", "wait"]

UNIT_S = (
    4.0  # a mean length in virtual seconds: what the product waits for between two looks (50 ms) is little beside it
)
TOKENS = 8  # recorded per trajectory
EPOCH = 1.7e9  # of the store's clock
ASKED, REPLY = (Message("user", "?"),), Message("assistant", "!")


class Agents:
    """Stands where the dispatcher has a rollout worker: `POST /agents/run` takes as long as its task says."""

    def __init__(self, store: Store, loop: VirtualLoop) -> None:
        self._store = store
        self._loop = loop
        self._since: list[float] = []  # when each version became current, and its label
        self._labels: list[int] = []

    def serve(self, label: int) -> None:
        """From now on tokens are sampled under this version."""
        self._since.append(self._loop.time())
        self._labels.append(label)

    async def post(self, path: str, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        seconds = float(body["task"]["seconds"])
        request = SessionRequest(body["task_id"], body["request_id"], "w0", request_id=body["request_id"])
        try:
            session = await self._store.sessions.begin(request)
        except NoCapacity as full:
            raise UnexpectedAnswer(path, full.status, {}) from full
        begun = self._loop.time()
        await asyncio.sleep(seconds)
        sampled = begun + seconds * np.arange(TOKENS) / TOKENS
        versions = [self._labels[bisect_right(self._since, at) - 1] for at in sampled]
        await self._store.sessions.add(interaction(session.id, np.array(versions, np.int32)))
        await self._store.sessions.reward(session.id, 1.0, None)
        await self._store.sessions.end(session.id, "ended")
        return {"session_id": session.id, "reward": 1.0, "error": ""}


def interaction(session_id: str, versions: np.ndarray) -> Interaction:
    ids, floats = np.arange(TOKENS, dtype=np.int32), np.zeros(TOKENS, np.float32)
    done = Completion(ids, floats, versions, floats, 1.0, "stop")
    return Interaction(f"{session_id}/0", session_id, 0, ids[:1], done, ASKED, REPLY)


def play(
    cell: Cell,
    *,
    max_lag: int,
    slots: int,
    train_seconds: float,
    warm_up: int,
    steps: int,
    stale: Stale = "drop",
    training: float | None = None,
    seed: int = 1,
) -> Ran:
    """Run so many steps beyond the warm-up. training: the part of the machine that trains, None where generating and training take
    turns on all of it. train_seconds: of a step on that part, in mean lengths."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="areal-async-", dir=shared if shared.is_dir() else None) as folder:
        loop = VirtualLoop()
        store, database = open_inline(Path(folder) / "store.sqlite", lambda: EPOCH + loop.time())
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            limits = Limits(max_concurrent=slots, max_lag=max_lag, batch_groups=cell.per_step, group_timeout_s=1e9)
            parts = Parts(store, loop, cell, limits, stale, seed, training)
            ran = runner.run(_play(parts, train_seconds, warm_up, steps))
        asyncio.run(database.close())
    return ran


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is made of."""

    store: Store
    loop: VirtualLoop
    cell: Cell
    limits: Limits
    stale: Stale
    seed: int
    training: float | None


async def _play(parts: Parts, train_seconds: float, warm_up: int, steps: int) -> Ran:
    store, loop, cell = parts.store, parts.loop, parts.cell
    gate = await StalenessGate.open(store.training, parts.limits, incarnation="virtual")
    agents, drawn = Agents(store, loop), [0.0]
    agents.serve(gate.current.label)
    queue = GroupQueue(store, Recipe("individual", turn_discount=1.0))
    batcher = Batcher(queue, gate, store.training, batch_groups=cell.per_step, stale=parts.stale, say=lambda _: None)
    workers: list[Any] = [agents]
    advisor = SpeedAdvisor(
        store.reading,
        gate,
        None,
        generating=1.0 if parts.training is None else 1.0 - parts.training,
        training=parts.training or 1.0,
        clock=lambda: EPOCH + loop.time(),
    )

    async def train() -> None:
        await asyncio.sleep(train_seconds * UNIT_S)

    async def publish(consumed: list[str]) -> Version:
        version = gate.next_version()
        agents.serve(version.label)
        await gate.advance(version, consumed)
        return version

    feed = tasks(cell, parts.seed, drawn)
    async with (
        Dispatcher(workers, gate, store.training, n_samples=1, tasks=feed) as dispatcher,
        background(dispatcher.failure(), name="what breaks the dispatcher"),
    ):
        ran = await drive(Driven(batcher, store, dispatcher, advisor, train, publish), warm_up, steps)
    return replace(ran, seconds=ran.seconds / UNIT_S, longest=max(drawn))


def tasks(cell: Cell, seed: int, drawn: list[float]) -> Iterator[Task]:
    """Endless; drawn: takes note of the lengths."""
    for number, length in enumerate(cell.lengths(seed)):
        drawn.append(length)
        yield Task(str(number), {"seconds": length * UNIT_S})
