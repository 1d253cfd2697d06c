"""One run of a comparison: its speed over some steps, what the [speed] lines measured, its reward.

    side = Side.of(Path("runs/my-exp/sync"))
    first, last = shared_steps(side, other)
    side.rate(first, last).samples_per_second; side.speed(last).bound

A rate is counted by hand: the sessions of the steps after `first`, by the seconds from the end of `first` to the end of `last`.
Time in which the run was stopped is left out (base/metrics.py). The speed facts are means over the lines up to `last`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from areal.base.errors import ConfigError
from areal.base.metrics import MetricsTable
from areal.config.recorded import Recorded
from areal.tools.plot_metrics import read_run

SHARE = 10  # rewards are means over this part of the compared steps: a tenth


@dataclass(frozen=True, slots=True)
class Rate:
    """Of the compared steps. seconds_per_step: from the end of one to the end of the next."""

    samples_per_second: float
    tokens_per_second: float
    seconds_per_step: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What docs/speed.md calls g, t and h, in seconds of the whole machine per step; the spread of durations, and waves per step."""

    generate_seconds: float
    train_seconds: float
    tail_seconds: float
    cv: float
    waves: float

    @property
    def bound(self) -> float:
        """(g + h + t) / (g + t): how much faster than taking turns this workload can be."""
        both = self.generate_seconds + self.train_seconds
        return (both + self.tail_seconds) / both


@dataclass(frozen=True, slots=True)
class Side:
    """folder: as it was given. lag: the most that was allowed, None where no config.yaml tells. table: what was logged."""

    folder: Path
    lag: int | None
    config: Recorded
    table: MetricsTable

    @classmethod
    def of(cls, folder: Path) -> Side:
        """Raises ConfigError where the folder holds no run, or nothing that was trained yet."""
        if not folder.is_dir():
            raise ConfigError(
                f"there is no folder {folder}; give the folders of two runs (cluster.fileroot, --output-dir)"
            )
        config = Recorded.of(folder / "config.yaml")
        lag = config.number("rollout.max_head_offpolicyness")
        side = cls(folder, None if lag is None else int(lag), config, read_run(folder))
        if len(side.steps) < 2:
            raise ConfigError(
                f"{folder} has trained {len(side.steps)} steps; a speed is counted from the end of one step to the end of "
                "another, so wait until it has trained at least 2"
            )
        return side

    @property
    def steps(self) -> list[int]:
        return self.table.series("train/sessions").steps

    def rate(self, first: int, last: int) -> Rate:
        """Raises ConfigError where the rows tell no time."""
        ends = dict(zip(self.steps, self.table.seconds_of("train/sessions"), strict=True))
        seconds = ends[last] - ends[first]
        if not seconds > 0:
            raise ConfigError(
                f"{self.folder} was logged without times, so it has no speed; compare runs of this release"
            )
        samples, tokens = (self._sum(name, first, last) for name in ("train/sessions", "train/recorded_tokens"))
        return Rate(samples / seconds, tokens / seconds, seconds / sum(first < step <= last for step in self.steps))

    def speed(self, last: int) -> Measured | None:
        """None where it has not measured itself: that takes ten steps."""
        found = {name: self.mean(f"speed/{name}", last) for name in Measured.__dataclass_fields__}
        measured = not any(map(math.isnan, found.values())) and found["generate_seconds"] + found["train_seconds"] > 0
        return Measured(**found) if measured else None

    def reward(self, last: int) -> float:
        """Mean of the last tenth of the steps up to `last`; NaN where none was set."""
        rewards = self.rewards(last)
        return rewards[-1][2] if rewards else math.nan

    def rewards(self, last: int) -> list[tuple[int, float, float]]:
        """(step, seconds, mean over the tenth of the steps that ends there), from the first whole tenth on."""
        curve = self.table.series("train/reward")
        points = [
            point
            for point in zip(curve.steps, self.table.seconds_of("train/reward"), curve.values, strict=True)
            if point[0] <= last and math.isfinite(point[2])
        ]
        width = max(1, math.ceil(len(points) / SHARE))
        return [
            (*points[end - 1][:2], math.fsum(value for *_, value in points[end - width : end]) / width)
            for end in range(width, len(points) + 1)
        ]

    def newest(self, name: str, last: int) -> float:
        """The last value that was logged up to `last`; NaN where there is none."""
        curve = self.table.series(name)
        return next(
            (v for s, v in zip(reversed(curve.steps), reversed(curve.values), strict=True) if s <= last), math.nan
        )

    def most(self, name: str, last: int) -> float:
        return max(self._finite(name, -1, last), default=math.nan)

    def _sum(self, name: str, first: int, last: int) -> float:
        return math.fsum(self._finite(name, first, last))

    def mean(self, name: str, last: int) -> float:
        values = self._finite(name, -1, last)
        return math.fsum(values) / len(values) if values else math.nan

    def _finite(self, name: str, after: int, last: int) -> list[float]:
        curve = self.table.series(name)
        pairs = zip(curve.steps, curve.values, strict=True)
        return [value for step, value in pairs if after < step <= last and math.isfinite(value)]


def shared_steps(one: Side, other: Side) -> tuple[int, int]:
    """(first, last) of the steps that both have trained. Raises ConfigError where that is not two."""
    both = sorted(set(one.steps) & set(other.steps))
    if len(both) < 2:
        raise ConfigError(
            f"{one.folder} has steps {one.steps[0]} to {one.steps[-1]} and {other.folder} {other.steps[0]} to "
            f"{other.steps[-1]}; a comparison needs two steps that both have"
        )
    return both[0], both[-1]
