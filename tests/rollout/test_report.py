"""The [rollout] line: what it says, that metrics.jsonl says the same, and the warnings about the queue."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from areal.base.errors import StoreUnready
from areal.base.logs import Log as Lines
from areal.base.logs import open_log, parse_line
from areal.base.metrics import MetricsFile, read_metrics
from areal.base.types import Limits
from areal.rollout import metrics as _declared  # noqa: F401
from areal.rollout.account import settle
from areal.rollout.report import RolloutReporter
from areal.rollout.staleness import StalenessGate
from areal.store.base import Store
from tests.rollout.conftest import Played


class Log:
    """train.log and metrics.jsonl of a reporter that runs while the block does."""

    def __init__(self, folder: Path) -> None:
        self.path, self.metrics = folder / "train.log", folder / "metrics.jsonl"

    def lines(self) -> list[dict[str, Any]]:
        parsed = map(parse_line, self.path.read_text().splitlines())
        return [line.facts for line in parsed if line is not None and line.part == "rollout"]

    async def wait(self, count: int) -> list[dict[str, Any]]:
        async with asyncio.timeout(60):
            while len(self.lines()) < count:  # noqa: ASYNC110  a file cannot wake us
                await asyncio.sleep(0.05)
        return self.lines()


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Log:
    monkeypatch.setattr("areal.rollout.report.POLL_S", 0.02)
    return Log(tmp_path)


async def gate_of(store: Store, **limits: int) -> StalenessGate:
    return await StalenessGate.open(store.training, Limits(**{"max_concurrent": 8, **limits}), incarnation="test")


async def test_every_batch_of_groups_is_a_line_with_its_own_reward(store: Store, played: Any, log: Log) -> None:
    gate = await gate_of(store, max_lag=6, batch_groups=2, queue_size=12)
    counts: list[int] = []
    for number in range(2):  # a whole batch, which an earlier life of the run has told of
        await played.session(f"before-{number}", reward=9.0)
    with open_log(log.path, run_id="r", terminal=False), MetricsFile(log.metrics, "r") as metrics:
        reporter = RolloutReporter(store, gate, metrics, on_counts=lambda now: counts.append(now.recorded_tokens))
        async with reporter:
            for reward in (1.0, 0.5):
                await played.session(f"first-{reward}", reward=reward)
            await log.wait(1)
            for reward in (0.0, None):
                await played.session(f"second-{reward}", reward=reward, tokens=5)
            first, second = await log.wait(2)
            for number in range(6):  # three batches between two looks are three lines
                await played.session(f"later-{number}", reward=float(number // 2))
            later = (await log.wait(5))[2:]
    assert [first["step"], second["step"]] == [1, 2]
    assert (first["generated"], first["tokens"], first["reward"]) == (2, 6, 0.75)
    assert (second["generated"], second["tokens"], second["reward"]) == (2, 10, 0)
    assert (second["queue"], second["slots"], second["running"]) == ("6/12", "6/8", 0)
    assert [(line["step"], line["generated"], line["reward"]) for line in later] == [(3, 2, 0), (4, 2, 1), (5, 2, 2)]
    assert 6 + 6 + 10 in counts
    table = read_metrics(log.metrics)
    assert table.series("rollout/reward").values == [0.75, 0.0, 0.0, 1.0, 2.0]
    assert table.series("rollout/queue").values[:2] == [4, 6]


@pytest.mark.parametrize(("queue_size", "warned"), [(5, True), (4, False), (0, False)])
async def test_a_queue_that_the_lag_never_fills_is_one_warning(
    store: Store, log: Log, queue_size: int, warned: bool
) -> None:
    gate = await gate_of(store, max_lag=1, batch_groups=2, queue_size=queue_size)
    with open_log(log.path, run_id="r", terminal=False), MetricsFile(log.metrics, "r") as metrics:
        async with RolloutReporter(store, gate, metrics, on_counts=lambda _: None):
            await asyncio.sleep(0.1)
    text = log.path.read_text()
    assert text.count(f"rollout.queue_size={queue_size} (async.queue_max_size) is never reached") == int(warned)
    assert ("max_head_offpolicyness=1 lets 4 groups wait" in text) == warned


async def test_a_full_queue_is_one_warning_with_both_remedies(store: Store, played: Any, log: Log) -> None:
    gate = await gate_of(store, max_lag=1, batch_groups=1, queue_size=1)
    with open_log(log.path, run_id="r", terminal=False), MetricsFile(log.metrics, "r") as metrics:
        async with RolloutReporter(store, gate, metrics, on_counts=lambda _: None):
            await played.session("a")
            await log.wait(1)
            await asyncio.sleep(0.2)
    text = log.path.read_text()
    assert text.count("the queue is full (1 of 1 groups)") == 1
    assert "async.queue_max_size" in text
    assert "async.train_workers" in text


async def test_a_store_that_is_away_for_a_while_ends_no_report(
    store: Store, played: Any, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, counts, looks = await gate_of(store, max_lag=6, batch_groups=1), store.training.counts, 0

    async def away_at_first() -> Any:
        nonlocal looks
        looks += 1
        if looks in (2, 3):  # the first look is the one from which it counts
            raise StoreUnready("the store cannot be used: gone; see the message")
        return await counts()

    monkeypatch.setattr(store.training, "counts", away_at_first)
    with open_log(log.path, run_id="r", terminal=False), MetricsFile(log.metrics, "r") as metrics:
        async with RolloutReporter(store, gate, metrics, on_counts=lambda _: None):
            async with asyncio.timeout(60):
                while looks < 4:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await played.session("after", reward=1.0)
            assert (await log.wait(1))[0]["generated"] == 1
    assert log.path.read_text().count("the [rollout] lines wait: the store cannot be used") == 1


@pytest.mark.parametrize(
    ("max_lag", "most", "drops"), [(2, 4, 0.0), (2, 4, 0.4), (1, 9, 0.2), (0, 4, 0.3), (2, 2, 0.0)]
)
async def test_printed_steps_differ_by_at_most_the_lag_and_one_whatever_a_step_takes(
    store: Store, played: Played, batching: Any, log: Log, max_lag: int, most: int, drops: float
) -> None:
    """Steps take what is finished, some of it is dropped, and training is at times the slower and at times the faster half."""
    dice, steps, taken = random.Random(7), 24, []
    gate, batcher = await batching(batch=2, max_lag=max_lag, most_groups=most)
    with open_log(log.path, run_id="r", terminal=False), MetricsFile(log.metrics, "r") as metrics:
        async with RolloutReporter(store, gate, metrics, on_counts=lambda _: None) as reporter:
            for step in range(steps):
                eager = dice.random() < 0.5  # generation is far ahead when the step begins
                while (batch := None if eager else await batcher.poll()) is None:
                    if not (await store.training.counts()).free_slots:
                        batch = await batcher.next_batch()
                        break
                    tokens = 0 if dice.random() < drops else 3
                    await played.session(f"task-{played.number}", version=gate.current.label, tokens=tokens)
                    await asyncio.sleep(0.03 * (dice.random() < 0.1))  # time for a look of the reporter's own
                await reporter.catch_up()
                taken.append(len(batch.groups))
                assert batch.lag_max <= max_lag
                await settle(store.training, batch)
                await gate.advance(gate.next_version(), batch.group_ids)
                for _ in range(dice.randrange(3) if max_lag else 0):  # between the new weights and the line
                    await played.session(f"task-{played.number}", version=gate.current.label)
                await reporter.catch_up()
                Lines("train").line(step=step, updated=batch.sessions)
                reporter.trained(step)
            await reporter.catch_up()
            counts = await store.training.counts()
    parsed = [line for line in map(parse_line, log.path.read_text().splitlines()) if line is not None]
    printed = {"train": -1, "rollout": -1}
    for line in parsed:
        assert line.facts["step"] == printed[line.part] + 1, "a line for every step, in order"
        printed[line.part] = int(line.facts["step"])
        ahead = printed["rollout"] - printed["train"]
        assert 0 <= ahead <= max_lag + 1, line
    told = sum(int(line["generated"]) for line in log.lines())
    finished = counts.accepted + counts.consumed + sum(counts.dropped.values())
    assert finished - told < 2 + most * (max_lag + 1), "what no line tells of has yet to come"
    assert set(taken) == {2} if max_lag == 0 or most == 2 else max(taken) == min(most, 2 * (max_lag + 1)) > min(taken)
    assert all(int(line["generated"]) == 2 for line in log.lines()) or drops or most > 2


async def test_a_bug_in_it_ends_the_run_with_its_reason(store: Store, log: Log) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError("a bug")

    gate = await gate_of(store, max_lag=0, batch_groups=2)
    limit = asyncio.timeout(60)
    with MetricsFile(log.metrics, "r") as metrics, pytest.raises(ZeroDivisionError, match="a bug"):
        async with limit, RolloutReporter(store, gate, metrics, on_counts=broken):
            await asyncio.Event().wait()
    assert not limit.expired(), "at once"
