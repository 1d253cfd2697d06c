"""A slow task beside fast ones, under each policy: who is trained, who is waited for, what is lost. On a real store, in ticks.

`World` is the service in ticks: whoever asks gets a slot while the store has one, samples a token a tick under the weights that are
served then, and ends after its task's own number of ticks; a step takes what `Batcher.poll` hands out, and a tick.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import cycle
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.base.types import SessionRequest
from areal.rollout.account import settle
from areal.rollout.batcher import Batcher
from areal.rollout.patience import held_by
from areal.rollout.staleness import StalenessGate
from areal.store.base import Loss, Store
from tests.rollout.conftest import Played, interaction

Batching = Callable[..., Awaitable[tuple[StalenessGate, Batcher]]]


@dataclass
class Running:
    id: str
    task: str
    left: int
    versions: list[int] = field(default_factory=list)


@dataclass
class World:
    store: Store
    gate: StalenessGate
    batcher: Batcher
    ticks_of: dict[str, int]
    now: float = 0.0
    begun: int = 0
    running: list[Running] = field(default_factory=list)
    trained: Counter[str] = field(default_factory=Counter)
    lag_max: int = 0

    async def ticks(self, number: int) -> None:
        order = cycle(self.ticks_of)
        for _ in range(number):
            self.now += 1.0
            await self.start(order)
            for one in [one for one in self.running if one.left == 0]:
                await self.end(one)
            if (batch := await self.batcher.poll()) is not None:
                self.lag_max = max(self.lag_max, batch.lag_max)
                self.trained.update(group.task_id for group in batch.groups)
                await settle(self.store.training, batch)
                await self.gate.advance(self.gate.next_version(), batch.group_ids)

    async def start(self, order: Iterator[str]) -> None:
        for one in self.running:
            one.versions.append(self.gate.current.label)
            one.left -= 1
        for _ in range((await self.store.training.counts()).free_slots):
            self.begun += 1
            task = next(order)
            session = await self.store.sessions.begin(SessionRequest(task, f"k{self.begun}", "w0"))
            self.running.append(Running(session.id, task, self.ticks_of[task] - 1, [self.gate.current.label]))

    async def end(self, one: Running) -> None:
        self.running.remove(one)
        said = interaction(one.id, tokens=len(one.versions))
        versions = np.array(one.versions, np.int32)
        await self.store.sessions.add(replace(said, completion=replace(said.completion, versions=versions)))
        await self.store.sessions.reward(one.id, 1.0, None)
        await self.store.sessions.end(one.id, "ended")

    def share(self, task: str) -> float:
        return self.trained[task] / self.trained.total()


FAST = {f"fast-{k}": 1 for k in range(7)}


@pytest.fixture
def world(store: Store, batching: Batching) -> Callable[..., Awaitable[World]]:
    async def open_world(stale: str, *, slow: int = 10, batch: int = 4, max_lag: int = 2, **more: Any) -> World:
        gate, batcher = await batching(
            batch=batch, max_lag=max_lag, stale=stale, clock=lambda: made.now, wait_s=1000.0, **more
        )
        made = World(store, gate, batcher, {**FAST, "slow": slow})
        return made

    return open_world


async def test_T061_a_slow_task_is_trained_under_each_policy_and_its_losses_are_counted_by_task(
    world: Callable[..., Awaitable[World]], store: Store
) -> None:
    """8 tasks, 7 take 1 tick and 1 takes 10; 4 groups a step, lag 2. Dropping alone would train the slow one never."""
    said: list[str] = []
    drop = await world("drop", said=said)
    await drop.ticks(48)
    assert drop.trained["slow"] >= 1
    assert drop.lag_max <= 2
    [loss] = await store.reading.losses()
    assert loss == Loss("slow", "stale", groups=loss.groups, sessions=loss.groups, tokens=10 * loss.groups)
    assert drop.trained["slow"] >= loss.groups - 4, "one is waited for, for each that was lost"
    assert any("1 group dropped as stale since the step before (slow 1)" in line for line in said)


@pytest.mark.parametrize("stale", ["wait", "mask"])
async def test_T061_waiting_loses_nothing_and_gives_a_slow_task_its_share(
    world: Callable[..., Awaitable[World]], store: Store, stale: str
) -> None:
    made = await world(stale)
    await made.ticks(48)
    assert made.lag_max <= 2
    assert (await store.training.counts()).dropped == {}
    assert made.share("slow") > 1 / 16
    if stale == "wait":
        assert await store.reading.losses() == ()
        assert made.share("slow") == pytest.approx(1 / 8, abs=0.03), "each task as often as any other"
    else:
        assert {(loss.task_id, loss.reason, loss.groups) for loss in await store.reading.losses()} == {
            ("slow", "stale", 0)
        }


async def test_the_guard_ends_a_wait_says_so_and_what_was_given_up_is_dropped(
    played: Played, store: Store, batching: Batching
) -> None:
    said: list[str] = []
    now = 0.0
    gate, batcher = await batching(batch=2, max_lag=1, stale="wait", clock=lambda: now, wait_s=60.0, said=said)
    stuck = await store.sessions.begin(SessionRequest("stuck", "k-stuck", "w0"))
    for step in range(2):
        for k in range(2):
            await played.session(f"quick-{step}-{k}", version=step)
        if step == 1:  # step 1 is the last that could train what began under version 0
            assert await batcher.poll() is None
            now += 59.0
            assert await batcher.poll() is None
            await batcher._explain()
            now += 1.0
        batch = await batcher.poll()
        assert batch is not None
        assert batch.held_seconds == 60.0 * step
        await gate.advance(gate.next_version(), batch.group_ids)
    assert said == [
        "waiting for 1 running group that would be too old after this step (stuck); 2 finished; 59 of at most 60 s "
        "(rollout.stale_wait_seconds)",
        "a step goes on without 1 running group (stuck): it waited 60 s, rollout.stale_wait_seconds=60",
    ]
    for k in range(2):
        await played.session(f"later-{k}", version=2)
    batch = await batcher.poll()
    assert batch is not None, "what is beyond saving is not waited for again"
    assert batch.held_seconds == 0.0
    await gate.advance(gate.next_version(), batch.group_ids)
    now += 1.0
    await store.sessions.add(interaction(stuck.id, version=0))
    await store.sessions.end(stuck.id, "ended")
    assert await batcher.poll() is None
    assert (await store.training.counts()).dropped == {"stale": 1}


async def test_a_group_that_opens_while_a_step_trains_counts_as_opened_under_the_former_weights(
    played: Played, store: Store, batching: Batching
) -> None:
    gate, batcher = await batching(batch=1, max_lag=1, stale="wait")
    await played.session("first")
    batch = await batcher.next_batch()
    await store.sessions.begin(SessionRequest("meanwhile", "k-1", "w0"))
    await gate.advance(gate.next_version(), batch.group_ids)
    await store.sessions.begin(SessionRequest("after", "k-2", "w0"))
    assert [(group.task_id, group.opened_at) for group in await gate.running()] == [("meanwhile", 0), ("after", 1)]
    gate, _ = await batching(
        batch=1, max_lag=1
    )  # the next life knows only that they may be as old as can still be trained
    assert [group.opened_at for group in await gate.running()] == [-1, -1]


lasts = st.lists(st.integers(0, 4), max_size=8)


@settings(deadline=None)
@given(current=st.integers(0, 3), size=st.integers(1, 3), finished=lasts, running=lasts)
def test_a_step_waits_exactly_where_going_on_would_cost_a_group(
    current: int, size: int, finished: list[int], running: list[int]
) -> None:
    """Against trying it out, wherever all can be trained at all: going on costs a group if, with all that runs ending at once, fewer
    can be trained from the next step on than if this one had also had the running ones to choose from."""
    finished = sorted(last for last in finished if last >= current)
    running = [last for last in running if last >= current]
    taken, behind = finished[:size], finished[size:]

    def saved(pending: list[int], step: int) -> int:
        pending = sorted(last for last in pending if last >= step)
        return len(pending[:size]) + saved(pending[size:], step + 1) if pending else 0

    held = held_by(current=current, size=size, taken=taken, left=[*running, *behind])
    on = len(taken) + saved([*running, *behind], current + 1)
    best = saved([*finished, *running], current)
    if len(taken) == size and best == len(finished) + len(running):
        assert bool(held) == (on < best)
    assert all(index < len(running) for index in held)


@settings(deadline=None)
@given(size=st.integers(1, 3), lag=st.integers(0, 3), chance=st.randoms(use_true_random=False))
def test_under_the_capacity_law_a_run_that_waits_loses_nothing(size: int, lag: int, chance: Random) -> None:
    """Any order of openings and ends, in a store's place two lists: what is taken is never too old."""
    running: list[int] = []
    finished: list[int] = []
    current = 0
    for _ in range(60):
        free = (lag + 1) * size - len(running) - len(finished)
        running += [current + lag] * chance.randint(0, free)
        for _ in range(chance.randint(0, len(running))):
            finished.append(running.pop(chance.randrange(len(running))))
        finished.sort()
        if len(finished) >= size and not held_by(
            current=current, size=size, taken=finished[:size], left=[*running, *finished[size:]]
        ):
            del finished[:size]
            current += 1
        assert all(last >= current for last in [*running, *finished]), "something was left behind"
    finished = sorted([*finished, *running])  # all that run have ended: nothing is waited for
    assert held_by(current=current, size=size, taken=finished[:size], left=finished[size:]) == []
