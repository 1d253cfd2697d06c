"""What every store promises about old content: only what nothing can train any more goes, and no sum changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from areal.base.types import Share, Version
from areal.store.base import Retention


@pytest.fixture
async def lived(house: Any) -> Any:
    """Three steps of one session each, ten seconds apart, with a dropped and an evaluation session in the second; one that waits
    and one that runs."""
    await house.training.set_limits(replace(house.limits, max_concurrent=9, max_lag=3))
    for step in (1, 2, 3):
        house.clock.now += 10
        session = await house.play(f"s{step}")
        if step == 2:
            await house.play("lost", "expired", reward=None)
            trial = await house.begin("trial", purpose="eval")
            await house.sessions.add(house.interaction(trial.id))
            await house.sessions.end(trial.id, "ended")
        [group] = await house.training.ready()
        await house.training.account(session.id, {"": Share(3, 1)})
        await house.training.advance(Version(step, step, "x"), [group.id])
    await house.play("waits")
    running = await house.begin("runs")
    await house.sessions.add(house.interaction(running.id))
    return house


ALL = {"s1", "s2", "s3", "lost", "trial", "waits", "runs"}


async def kept(house: Any) -> set[str]:
    return {name for name in ALL if await house.sessions.interactions(name)}


async def test_nothing_is_deleted_without_a_bound(lived: Any) -> None:
    assert await lived.store.upkeep.forget(Retention(), safe_step=3) == 0
    assert await kept(lived) == ALL


@pytest.mark.parametrize(
    ("keep", "safe", "gone"),
    [
        (Retention(steps=2), 3, {"s1"}),
        (Retention(steps=1), 3, {"s1", "s2", "lost", "trial"}),
        (Retention(steps=0), 3, {"s1", "s2", "s3", "lost", "trial"}),
        (Retention(steps=0), 1, {"s1"}),  # a resume to step 1 trains 2 and 3 again
        (Retention(steps=0), 0, set()),
        (Retention(seconds=15), 3, {"s1"}),
        (Retention(seconds=5), 3, {"s1", "s2", "lost", "trial"}),
        (Retention(seconds=5), 0, {"lost", "trial"}),
        (Retention(seconds=1e-9), 2, {"s1", "s2", "lost", "trial"}),
        (Retention(used_bytes=1), 2, {"s1", "s2", "lost", "trial"}),  # never what may still be trained
        (Retention(used_bytes=10**12), 3, set()),
    ],
)
async def test_only_what_nothing_can_train_any_more_goes(
    lived: Any, keep: Retention, safe: int, gone: set[str]
) -> None:
    before, books = await lived.training.counts(), await lived.store.reading.balance()
    assert await lived.store.upkeep.forget(keep, safe) == len(gone)
    assert await kept(lived) == ALL - gone
    assert await lived.store.upkeep.forget(keep, safe) == 0
    assert (await lived.training.counts(), await lived.store.reading.balance()) == (before, books)
    summaries = {one.session.id: one for one in await lived.store.reading.recent()}
    assert {name for name, one in summaries.items() if one.fate.endswith("content deleted")} == gone
    assert {one.recorded_tokens for one in summaries.values()} == {3}
    assert await lived.training.release_after(safe, "y") == 3 - safe  # all of these can be trained again
    again = {one.id for group in await lived.training.ready() for one in group.sessions}
    assert again == {f"s{step}" for step in range(safe + 1, 4)} | {"waits"}
    assert all([await lived.sessions.interactions(name) for name in again])


async def test_steps_are_counted_from_where_the_run_stands(lived: Any) -> None:
    """A resume went back to step 1; that a lost timeline had reached step 3 makes nothing older."""
    await lived.training.release_after(1, "y")
    await lived.training.advance(Version(4, 1, "y"), [])
    assert await lived.store.upkeep.forget(Retention(steps=1), safe_step=1) == 0
    assert await lived.store.upkeep.forget(Retention(steps=0), safe_step=1) == 1
