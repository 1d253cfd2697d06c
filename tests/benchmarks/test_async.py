"""The async benchmark's machinery: the clock that jumps, the latency model, and a small cell on the product's own queue and gate."""

from __future__ import annotations

import asyncio
from importlib import import_module
from itertools import islice
from typing import Any

import numpy as np
import pytest

from benchmarks.async_rig import real
from benchmarks.async_rig.virtual import play
from benchmarks.async_rig.virtual_time import VirtualLoop
from benchmarks.async_rig.workload import CUT, Cell, draw, mean_length, quantiles

CLI: Any = import_module("benchmarks.async")  # its name is a word of the language


def test_the_clock_jumps_and_keeps_the_order() -> None:
    seen: list[tuple[str, float]] = []

    async def sleeper(name: str, *seconds: float) -> None:
        for each in seconds:
            await asyncio.sleep(each)
            seen.append((name, asyncio.get_running_loop().time()))

    async def main() -> None:
        await asyncio.gather(sleeper("slow", 7200.0), sleeper("fast", 3600.0, 3599.0, 2.0))

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())
    assert [name for name, _ in seen] == ["fast", "fast", "slow", "fast"]
    assert [at for _, at in seen] == pytest.approx([3600.0, 7199.0, 7200.0, 7201.0])


def test_a_loop_in_which_nothing_will_happen_says_so() -> None:
    with (
        asyncio.Runner(loop_factory=VirtualLoop) as runner,
        pytest.raises(RuntimeError, match="nothing will ever happen"),
    ):
        runner.run(asyncio.Event().wait())


@pytest.mark.parametrize("cv", [0.5, 1.0, 1.5])
def test_lengths_have_the_mean_that_is_stated(cv: float) -> None:
    lengths = draw(cv, np.random.default_rng(3), 200_000)
    assert lengths.mean() == pytest.approx(mean_length(cv), abs=0.01)
    assert lengths.max() <= CUT
    assert quantiles(cv, 2000).mean() == pytest.approx(mean_length(cv), abs=0.01)


def test_a_cell_reaches_its_bound_and_is_the_same_each_time() -> None:
    cell = Cell(1.0, 2, 1.0, per_step=16)
    found, again = (CLI.measure(cell, lag=8, stale="drop", steps=3) for _ in range(2))
    assert found == again
    assert found.fits
    assert 0.9 <= found.gain / found.bound <= 1.1
    assert found.dropped == 0
    assert found.lag_max <= 8


def test_what_the_lag_does_not_allow_is_dropped_and_counted() -> None:
    cell, lag = Cell(1.5, 1, 0.25, per_step=16), 1
    slots, share = cell.split
    drop = play(cell, max_lag=lag, slots=slots, train_seconds=cell.train / share, warm_up=2, steps=5, training=share)
    assert drop.dropped.keys() == {"stale"}
    assert drop.lag_max == lag
    mask = play(
        cell,
        max_lag=lag,
        slots=slots,
        train_seconds=cell.train / share,
        warm_up=2,
        steps=5,
        stale="mask",
        training=share,
    )
    assert mask.masked_tokens > 0
    assert sum(mask.dropped.values()) < sum(drop.dropped.values())


def test_a_synchronous_step_takes_its_makespan_and_its_training() -> None:
    cell = Cell(1.0, 2, 0.5, per_step=32)
    ran = play(cell, max_lag=0, slots=cell.slots, train_seconds=cell.train, warm_up=0, steps=3)
    lengths = list(islice(cell.lengths(seed=1), 96))
    batches = [lengths[:32], lengths[32:64], lengths[64:]]
    ideal = sum(CLI.makespan(batch, cell.slots) + cell.train for batch in batches)
    assert ideal <= ran.seconds <= ideal * 1.01  # looks for finished groups are 50 ms apart
    assert (ran.trained, ran.lag_max) == (96, 0)


@pytest.mark.heavy
def test_a_cell_on_the_wall_clock_trains_what_real_processes_generate() -> None:
    ran = real.play(Cell(0.5, 2, 0.5, per_step=4), max_lag=0, slots=2, train_seconds=0.0, warm_up=0, steps=2)
    assert (ran.trained, ran.lag_max, ran.dropped) == (8, 0, {})
