"""The [rollout] line: what it says, that metrics.jsonl says the same, and the warnings about the queue."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from areal.base.errors import StoreUnready
from areal.base.logs import open_log, parse_line
from areal.base.metrics import MetricsFile, read_metrics
from areal.base.types import Limits
from areal.rollout import metrics as _declared  # noqa: F401
from areal.rollout.report import RolloutReporter
from areal.rollout.staleness import StalenessGate
from areal.store.base import Store


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
    await played.session("before", reward=9.0)
    with open_log(log.path, run_id="r", terminal=False), MetricsFile(log.metrics, "r") as metrics:
        reporter = RolloutReporter(store, gate, metrics, on_counts=lambda now: counts.append(now.recorded_tokens))
        async with reporter:
            while not counts:  # noqa: ASYNC110  what was there before the run's line begins
                await asyncio.sleep(0.01)
            for reward in (1.0, 0.5):
                await played.session(f"first-{reward}", reward=reward)
            await log.wait(1)
            for reward in (0.0, None):
                await played.session(f"second-{reward}", reward=reward, tokens=5)
            first, second = await log.wait(2)
            for number in range(6):  # three batches between two looks are three lines
                await played.session(f"later-{number}", reward=float(number // 2))
            later = (await log.wait(5))[2:]
    assert [first["step"], second["step"]] == [0, 1]
    assert (first["generated"], first["tokens"], first["reward"]) == (2, 6, 0.75)
    assert (second["generated"], second["tokens"], second["reward"]) == (2, 10, 0)
    assert (second["queue"], second["slots"], second["running"]) == ("5/12", "7/8", 0)
    assert [(line["step"], line["generated"], line["reward"]) for line in later] == [(2, 2, 0), (3, 2, 1), (4, 2, 2)]
    assert 3 + 6 + 10 in counts
    table = read_metrics(log.metrics)
    assert table.series("rollout/reward").values == [0.75, 0.0, 0.0, 1.0, 2.0]
    assert table.series("rollout/queue").values[:2] == [3, 5]


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
