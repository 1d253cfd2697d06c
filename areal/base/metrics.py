"""Metrics: declared once, written as one JSON object per step, read back as curves over one timeline.

    LOSS = declare("train/loss", "mean", "objective of the step, per trained token")
    with MetricsFile(log_dir / "metrics.jsonl", run_id) as metrics:
        metrics.write(118, {"train/loss": 0.421})
    read_metrics(log_dir / "metrics.jsonl").series("train/loss").values

A name is `part/what[_unit]`; an undeclared one raises. What is not finite is written as null, so every line is JSON.
After a resume the file holds some steps twice: the reader keeps, per step, what the later opening wrote, and forgets what the lost
timeline had reached from the opening's first row on (T096); a run begins with a row without values, of the step where it goes on. The part
AHEAD of the steps is forgotten from its own first row on: groups that a resume hands back to be trained have had theirs; the one BEHIND is
kept at that step itself.
One writer per file. Used by train.py, tools/plot_metrics.py.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from areal.base.lines import LineFile

Combine = Literal["mean", "sum", "max", "min", "last"]
AHEAD = "rollout"  # the part whose rows are of steps to come
BEHIND = "eval"  # the part whose step is how many were trained before: what a run goes on from was measured, and stays
_NAME = re.compile(r"[a-z][a-z0-9_]*/[a-z][a-z0-9_./]*")


@dataclass(frozen=True, slots=True)
class Metric:
    """combine: how values of several ranks or micro-batches become one."""

    name: str
    combine: Combine
    description: str


METRICS: dict[str, Metric] = {}


def declare(name: str, combine: Combine, description: str) -> str:
    """Make a metric known; returns its name. A second, different declaration of the same name raises ValueError."""
    metric = Metric(name, combine, description)
    if not _NAME.fullmatch(name):
        raise ValueError(f"metric name {name!r} must look like part/what_unit")
    if METRICS.setdefault(name, metric) != metric:
        raise ValueError(f"metric {name} is declared twice, as {METRICS[name]} and {metric}")
    return name


def combine(name: str, values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """One value of several, as declared; weights (for example tokens) matter to `mean` only. NaN of nothing."""
    how = _declared(name).combine
    if not values:
        return math.nan
    if how == "mean":
        weights = weights if weights is not None else [1.0] * len(values)
        total = math.fsum(weights)
        return math.fsum(v * w for v, w in zip(values, weights, strict=True)) / total if total else math.nan
    if how == "sum":
        return math.fsum(values)
    return max(values) if how == "max" else min(values) if how == "min" else values[-1]


class MetricsFile:
    """Appends rows `{"run_id", "opening", "step", "time", "<name>": number | null, …}`; one per call, flushed."""

    def __init__(self, path: Path, run_id: str, first_step: int | None = None) -> None:
        """first_step: where the run goes on; what a lost timeline has logged beyond is forgotten from here on."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = LineFile(path)
        self._run_id = run_id
        self._opening = secrets.token_hex(4)
        if first_step is not None:
            self.write(first_step, {})

    def write(self, step: int, values: Mapping[str, float | int | None]) -> None:
        """Append what is known of a step; later writes of the same step add to it or replace single values."""
        row: dict[str, Any] = {"run_id": self._run_id, "opening": self._opening, "step": int(step)}
        row["time"] = round(time.time(), 3)
        for name, value in values.items():
            _declared(name)
            row[name] = _number(value)
        self._file.append(json.dumps(row, allow_nan=False).encode())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Series:
    """One curve: steps strictly increasing, one value each; NaN where nothing finite was logged."""

    name: str
    steps: list[int]
    values: list[float]


@dataclass(frozen=True, slots=True)
class MetricsTable:
    """What a metrics.jsonl says about one timeline. rows: step -> name -> value. unreadable: lines that are no rows.

    seconds: step -> part of the name -> when its newest row was written, in seconds of running since the first row: the time between
    two openings, and what a lost timeline took, are left out. Empty where the rows tell no time."""

    rows: dict[int, dict[str, float]]
    unreadable: int = 0
    seconds: dict[int, dict[str, float]] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Metrics with at least one row, sorted."""
        return sorted({name for row in self.rows.values() for name in row})

    def series(self, name: str) -> Series:
        steps = [step for step in sorted(self.rows) if name in self.rows[step]]
        return Series(name, steps, [self.rows[step][name] for step in steps])

    def seconds_of(self, name: str) -> list[float]:
        """For each step of `series(name)`; NaN where no time was told."""
        return [self.seconds.get(step, {}).get(_part(name), math.nan) for step in self.series(name).steps]


def read_metrics(path: Path, run_id: str | None = None) -> MetricsTable:
    """Read a file, also while it is being written. run_id: what that run wrote alone, where several log into one folder; without it the
    latest one there. Raises OSError if there is no file."""
    rows: dict[int, dict[str, float]] = {}
    seconds: dict[int, dict[str, float]] = {}
    unreadable = 0
    opening: tuple[object, object] | None = None
    ahead = False  # whether the part AHEAD of the lost timeline still stands
    passed, last = 0.0, math.nan  # seconds that this timeline has run; when its last row was written
    for line in path.read_bytes().splitlines():
        if not line.strip():
            continue
        row = _row(line)
        if row is None:
            unreadable += 1
            continue
        if run_id is not None and row.get("run_id") != run_id:
            continue
        step, now = row["step"], finite(row.get("time"))
        values = {name: finite(value) for name, value in row.items() if name not in _NOT_METRICS}
        parts = set(map(_part, values))
        ours = (row.get("run_id"), row.get("opening"))
        if opening is not None and opening != ours:
            ahead = opening[0] == ours[0]
            for table in (rows, seconds):
                behind = {name: value for name, value in table.get(step, {}).items() if ahead and _part(name) == BEHIND}
                forget(table, step, but=AHEAD if ahead else "")
                if behind:
                    table.setdefault(step, {}).update(behind)
            passed, last = max((at for own in seconds.values() for at in own.values()), default=0.0), math.nan
        if ahead and AHEAD in parts:
            ahead = False
            for table in (rows, seconds):
                forget(table, step, only=AHEAD)
        opening = ours
        if not values:  # an opening: what the start of the processes takes is not running
            continue
        rows.setdefault(step, {}).update(values)
        if math.isfinite(now):
            passed += max(0.0, now - last) if math.isfinite(last) else 0.0  # a clock that was set back tells nothing
            last = now
            seconds.setdefault(step, {}).update(dict.fromkeys(parts, passed))
    return MetricsTable(rows, unreadable, seconds)


_NOT_METRICS = frozenset({"run_id", "opening", "step", "time"})


def _part(name: str) -> str:
    return name.partition("/")[0]


def forget(table: dict[int, dict[str, float]], start: int, *, only: str = "", but: str = "") -> None:
    """From step `start` on: everything, one part alone, or all but one."""
    for step in [step for step in table if step >= start]:
        table[step] = {
            name: value for name, value in table[step].items() if _part(name) == but or (only and _part(name) != only)
        }
        if not table[step]:
            del table[step]


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:  # a row cut by a crash
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _declared(name: str) -> Metric:
    if name not in METRICS:
        raise KeyError(f"metric {name!r} is not declared; add declare({name!r}, …) where it is computed")
    return METRICS[name]


def _number(value: Any) -> float | int | None:
    if value is None:
        return None
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, int):
        return int(number)
    return float(number) if math.isfinite(number) else None


def finite(value: Any) -> float:
    """The number, NaN where it is none or not finite."""
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # an integer of hundreds of digits
        return math.nan
    return number if math.isfinite(number) else math.nan
