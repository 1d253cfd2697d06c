"""The speed-up that is predicted, against simulation by hand and cases whose answer is known; and what a run says of itself."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal.base.errors import ShapeError
from areal.base.logs import open_log, parse_line
from areal.base.metrics import MetricsFile, read_metrics
from areal.base.types import Limits, SessionRequest
from areal.rollout import metrics as _declared  # noqa: F401
from areal.rollout.advisor import EVERY, Measured, SpeedAdvisor, advice, most_at_once
from areal.rollout.speed import Speed, Workload, makespan, predict
from areal.rollout.staleness import StalenessGate
from areal.store import open_store, store_url
from areal.store.base import Store
from tests.rollout.conftest import interaction


@pytest.mark.parametrize("slots", [1, 2, 5, 40])
def test_makespan_is_that_of_dealing_each_to_the_slot_that_is_free_first(slots: int) -> None:
    durations = [random.Random(slots).expovariate(1.0) for _ in range(30)]
    free = [0.0] * slots
    for seconds in durations:
        free[free.index(min(free))] += seconds
    assert makespan(durations, slots) == pytest.approx(max(free))


def test_equal_trajectories_in_whole_waves_gain_nothing() -> None:
    speed = predict(Workload([2.0] * 24, per_step=12, slots=4, train_seconds=3.0))
    assert (speed.generate_seconds, speed.tail_seconds, speed.waves, speed.cv) == (6.0, pytest.approx(0.0), 3.0, 0.0)
    assert speed.gain == pytest.approx(1.0)
    assert speed.split_seconds is None


def test_with_a_slot_for_each_a_batch_takes_as_long_as_its_longest() -> None:
    durations, train = [1.0, 1.0, 2.0, 8.0], 3.0
    speed = predict(Workload(durations, per_step=4, slots=4, train_seconds=train))
    assert speed.gain == pytest.approx((max(durations) + train) / (sum(durations) / 4 + train))
    assert speed.longest_steps == math.ceil(8.0 / (3.0 + 3.0)) == 2
    assert speed.train_share == pytest.approx(0.5)


def test_a_paper_like_workload_gains_three_and_a_half_fold() -> None:
    """CV 1, two waves, t / g = 0.5, 512 trajectories cut off at 12 means: 4.7 -> 3.5 in a simulation that was made without this code."""
    sigma = math.sqrt(math.log(2.0))
    lengths = np.minimum(np.random.default_rng(7).lognormal(-sigma * sigma / 2, sigma, 512 * 20), 12.0)
    speed = predict(Workload(lengths.tolist(), per_step=512, slots=256, train_seconds=0.5 * 2 * float(lengths.mean())))
    assert (speed.generate_seconds + speed.tail_seconds) / speed.generate_seconds == pytest.approx(4.7, rel=0.07)
    assert speed.gain == pytest.approx(3.5, rel=0.07)
    assert speed.cv == pytest.approx(1.0, rel=0.1)


def test_the_same_machine_measured_split_and_whole_predicts_the_same() -> None:
    durations = [random.Random(1).expovariate(1.0) for _ in range(200)]
    whole = predict(Workload(durations, per_step=40, slots=20, train_seconds=1.0))
    split = predict(Workload(durations, 40, slots=15, train_seconds=4.0, generating=0.75, training=0.25))
    assert replace(split, split_seconds=None) == whole
    assert split.split_seconds == pytest.approx(max(whole.generate_seconds / 0.75, 4.0))


def test_more_slots_than_a_step_fills_are_no_gain() -> None:
    """Eight at once where a step has four: half as many at once are each twice as fast."""
    durations = [1.0, 2.0, 3.0, 2.0] * 4
    crowded = predict(Workload(durations, per_step=4, slots=8, train_seconds=1.0))
    alone = predict(Workload([seconds / 2 for seconds in durations], per_step=4, slots=4, train_seconds=1.0))
    assert crowded == alone
    assert crowded.gain == pytest.approx((3.0 / 2 + 1.0) / (1.0 + 1.0))


@pytest.mark.parametrize(
    ("durations", "own"),
    [([1.0] * 3, {}), ([0.0] * 4, {}), ([1.0] * 4, {"train_seconds": 0.0}), ([1.0] * 4, {"generating": 0.0})],
)
def test_what_predicts_nothing_is_refused(durations: list[float], own: dict[str, float]) -> None:
    with pytest.raises(ShapeError):
        predict(Workload(durations, **({"per_step": 4, "slots": 2, "train_seconds": 1.0} | own)))


def test_most_at_once_counts_what_overlaps() -> None:
    assert most_at_once([]) == 0
    assert most_at_once([(0, 2), (2, 3), (1, 4), (1, 1)]) == 2


@pytest.fixture
async def timed(tmp_path: Path) -> AsyncIterator[tuple[Store, list[float]]]:
    """A store whose clock is the last of a list."""
    now = [1000.0]
    async with await open_store(store_url(tmp_path / "store.sqlite"), clock=lambda: now[-1]) as store:
        yield store, now


async def lasting(store: Store, now: list[float], name: str, started: float, seconds: float) -> None:
    now[-1] = started
    session = await store.sessions.begin(SessionRequest(name, f"key {name}", "w0"))
    await store.sessions.add(interaction(session.id))
    now[-1] = started + seconds
    await store.sessions.end(session.id, "ended")


async def test_a_run_says_what_it_measured_and_what_to_change(timed: Any, tmp_path: Path) -> None:
    store, now = timed
    limits = Limits(max_concurrent=64, max_lag=2, batch_groups=4)
    gate = await StalenessGate.open(store.training, limits, incarnation="test")
    log, table = tmp_path / "train.log", tmp_path / "metrics.jsonl"
    with open_log(log, run_id="r", terminal=False), MetricsFile(table, "r") as metrics:
        advisor = SpeedAdvisor(store.reading, gate, metrics, generating=0.5, training=0.5, clock=lambda: now[-1])
        await advisor.report(0)  # nothing to say yet
        for number, seconds in enumerate((1.0, 1.0, 2.0, 8.0)):
            await lasting(store, now, f"task-{number}", 1000.0, seconds)
        await store.training.drop([(await store.training.ready())[-1].id], "stale")  # the longest counts all the same
        advisor.trained(6.0, groups=4)
        for step in range(EVERY):
            await advisor.report_if_due(step)
        await advisor.report(EVERY - 1)
    [line] = [one.facts for one in map(parse_line, log.read_text().splitlines()) if one and one.part == "speed"]
    measured = {"generate_seconds": 1.5, "train_seconds": 3.0, "tail_seconds": 2.5, "cv": 0.97, "waves": 1.0}
    follows = {"gain": 1.56, "train_share": 0.67, "longest_steps": 1}
    assert {name: value for name, value in line.items() if name not in ("step", "ts")} == measured | follows
    assert line["step"] == EVERY - 1
    assert read_metrics(table).rows[EVERY - 1] == {
        f"speed/{name}": value for name, value in (measured | follows).items()
    }
    assert "1.6 times as fast as taking turns, with 67% of the machine training (now 50%)" in log.read_text()


def speed_of(**own: Any) -> Speed:
    common: dict[str, Any] = {
        "generate_seconds": 4.0,
        "tail_seconds": 6.0,
        "train_seconds": 2.0,
        "cv": 1.0,
        "waves": 2.0,
    }
    return Speed(**(common | {"longest_seconds": 9.0, "split_seconds": 8.0} | own))


@pytest.mark.parametrize(
    ("speed", "limits", "slots", "says"),
    [
        (speed_of(tail_seconds=0.5), {"max_lag": 2}, 4, "not worth it here: take turns, rollout.max_head_offpolicyness=0 does"),
        (speed_of(tail_seconds=0.5), {"max_lag": 0}, 4, "not worth it here: take turns, which this run does"),
        (speed_of(), {"max_lag": 0}, 4, "2.0 times as fast as taking turns, with 33% of the machine training and rollout.max_head_offpolicyness=2"),
        (speed_of(longest_seconds=30.0), {"max_lag": 2}, 4, "the lag is the limit: the longest trajectory takes 5 steps"),
        (speed_of(), {"max_lag": 2, "max_concurrent": 4}, 4, "all 4 are taken; raise rollout.max_concurrent_rollouts"),
    ],
)  # fmt: skip
def test_advice_names_what_to_change(speed: Speed, limits: dict[str, int], slots: int, says: str) -> None:
    work = Workload([1.0] * 8, per_step=8, slots=slots, train_seconds=3.0, generating=0.5, training=0.5)
    assert says in advice(Measured(work, speed, slots), Limits(**({"max_concurrent": 64, "batch_groups": 4} | limits)))


async def test_a_clock_that_was_set_back_ends_no_run(timed: Any) -> None:
    store, now = timed
    limits = Limits(max_concurrent=64, max_lag=2, batch_groups=2)
    gate = await StalenessGate.open(store.training, limits, incarnation="test")
    advisor = SpeedAdvisor(store.reading, gate, None, generating=0.5, training=0.5, clock=lambda: now[-1])
    await lasting(store, now, "a", 1010.0, -5.0)
    await lasting(store, now, "b", 1010.0, 4.0)
    advisor.trained(6.0, groups=2)
    found = await advisor.measure()
    assert found is not None
    assert found.work.durations == [0.0, 4.0]
