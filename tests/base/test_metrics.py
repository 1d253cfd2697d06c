"""Metrics: declared once, valid JSON always, one timeline after a resume."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from areal.base.metrics import METRICS, MetricsFile, combine, declare, read_metrics
from areal.rollout import metrics as _declared  # noqa: F401

LOSS = declare("test_metrics/loss", "mean", "a loss")
TOKENS = declare("test_other_metrics/tokens", "sum", "tokens")
AHEAD, BEHIND = "rollout/reward", "eval/reward"


def test_an_undeclared_or_twice_declared_name_raises(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl", "r") as metrics, pytest.raises(KeyError, match="not declared"):
        metrics.write(0, {"test_metrics/nope": 1.0})
    assert declare("test_metrics/loss", "mean", "a loss") == LOSS
    with pytest.raises(ValueError, match="declared twice"):
        declare("test_metrics/loss", "sum", "a loss")
    with pytest.raises(ValueError, match="part/what"):
        declare("Loss", "sum", "no part")
    assert METRICS[LOSS].combine == "mean"


def test_combine_follows_the_declaration() -> None:
    assert combine(LOSS, [1.0, 4.0], weights=[3, 1]) == pytest.approx(1.75)
    assert combine(TOKENS, [1, 4]) == 5
    assert math.isnan(combine(LOSS, []))


def test_T097_rows_are_valid_json_and_nan_is_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, "r") as metrics:
        metrics.write(0, {LOSS: float("nan"), TOKENS: np.int64(3)})
        metrics.write(1, {LOSS: np.float32(0.5), TOKENS: float("inf")})
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(word))
    series = read_metrics(path).series(LOSS)
    assert series.steps == [0, 1]
    assert math.isnan(series.values[0])
    assert series.values[1] == 0.5
    assert math.isnan(read_metrics(path).series(TOKENS).values[1])


def test_T096_a_resumed_run_gives_one_value_per_step_and_the_later_run_wins(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, "r") as metrics:
        for step in range(16):
            metrics.write(step, {LOSS: float(step)})
    with MetricsFile(path, "r") as metrics:
        for step in range(10, 21):
            metrics.write(step, {LOSS: 100.0 + step})
    series = read_metrics(path).series(LOSS)
    assert series.steps == list(range(21))
    assert series.values == [float(step) for step in range(10)] + [100.0 + step for step in range(10, 21)]


def test_T096_steps_that_only_the_lost_timeline_reached_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, "r") as metrics:
        for step in range(16):
            metrics.write(step, {LOSS: 0.0, TOKENS: 1})
    with MetricsFile(path, "r") as metrics:
        metrics.write(10, {LOSS: 1.0})
        metrics.write(10, {TOKENS: 7})
    table = read_metrics(path)
    assert table.series(LOSS).steps == list(range(11))
    assert table.rows[10] == {LOSS: 1.0, TOKENS: 7.0}


def test_T096_a_resumed_run_forgets_what_is_lost_whatever_it_logs_first(tmp_path: Path) -> None:
    """It may be stopped before it has trained a step, and its first line may be of one that is ahead of its steps."""
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, "r") as metrics:
        for step in range(16):
            metrics.write(step, {LOSS: 0.0, BEHIND: float(step)})
            metrics.write(step + 2, {AHEAD: 0.0})
    with MetricsFile(path, "r", 10) as metrics:
        assert read_metrics(path).series(BEHIND).values == [float(step) for step in range(11)], "that of the checkpoint"
        assert read_metrics(path).series(LOSS).steps == list(range(10))
        assert read_metrics(path).series(AHEAD).steps == list(range(2, 18)), "of groups that are to be trained again"
        metrics.write(12, {AHEAD: 1.0})
        metrics.write(9, {TOKENS: 7})
        metrics.write(10, {LOSS: 1.0})
    table = read_metrics(path)
    assert table.series(LOSS).values == [0.0] * 10 + [1.0]
    assert table.series(AHEAD).values == [0.0] * 10 + [1.0], "steps 2 to 12"
    assert table.series(TOKENS).steps == [9]
    assert max(table.rows) == max(table.seconds) == 12


def test_T096_another_run_in_the_same_folder_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for run in "ab":
        with MetricsFile(path, run, 0) as metrics:
            for step in range(2) if run == "b" else range(5):
                metrics.write(step, {LOSS: 0.0})
                metrics.write(step + 2, {AHEAD: 0.0})
    assert read_metrics(path).series(LOSS).steps == [0, 1]
    assert read_metrics(path).series(AHEAD).steps == [2, 3]


def test_T096_rows_without_our_fields_merge_by_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": s, "loss": 0} for s in range(16)] + [{"step": s, "loss": 1} for s in range(10, 21)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_metrics(path).series("loss").values == [0.0] * 10 + [1.0] * 11


def test_seconds_are_those_of_running_on_the_timeline_that_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"opening": 1, "step": step, "time": 100.0 + 5 * step, "train/x": 1} for step in range(4)]
    rows += [{"opening": 2, "step": step, "time": 900.0 + 7 * step, "train/x": 2} for step in (2, 3)]
    rows += [{"opening": 2, "step": 3, "time": 930.0, "eval/x": 2}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = read_metrics(path)
    # 5 to the end of step 1; the first row of an opening has no row before it; then 7, and 9 more to the evaluation.
    assert table.seconds_of("train/x") == [0.0, 5.0, 5.0, 12.0]
    assert table.seconds_of("eval/x") == [21.0]


def test_rows_of_another_run_are_left_out_and_rows_without_a_time_have_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"run_id": run, "step": step, "train/x": value} for run, value in (("a", 1), ("b", 2)) for step in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[::2] + rows[1::2]))
    assert read_metrics(path, "a").series("train/x").values == [1, 1, 1]
    assert read_metrics(path, "b").series("train/x").values == [2, 2, 2]
    assert all(math.isnan(at) for at in read_metrics(path, "b").seconds_of("train/x"))


def test_a_row_cut_by_a_crash_is_counted_and_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, "r") as metrics:
        metrics.write(0, {LOSS: 1.0})
    path.write_bytes(path.read_bytes() + b'{"run_id": "r", "st')
    with MetricsFile(path, "r") as metrics:
        metrics.write(1, {LOSS: 2.0})
    table = read_metrics(path)
    assert table.series(LOSS).values == [1.0, 2.0]
    assert table.unreadable == 1
