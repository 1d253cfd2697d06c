"""What a comparison says: a table of both runs, then sentences; or the same as JSON.

    found = Comparison.of(one, other, work)          # the run with the lower lag comes first
    as_text(found); as_json(found)

Every number is that of side.py, over the steps that both runs have. Used by __main__.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Self

from areal.tools.compare.side import Measured, Rate, Side, shared_steps
from areal.tools.compare.tasks import SWITCH, Work

BEYOND = 1.1  # of the bound: what a measured one misses by
ALIKE = 0.9  # of the groups: below this, two runs are said to have trained different tasks


@dataclass(frozen=True, slots=True)
class Half:
    """One run over the compared steps. reached_seconds, reached_step: when its reward first was `Comparison.level`, NaN if never."""

    side: Side
    rate: Rate
    measured: Measured | None
    reward: float
    held_out: float
    reached_step: float
    reached_seconds: float
    lag_mean: float
    lag_max: float

    @property
    def way(self) -> str:
        lag = self.side.lag
        return "unknown" if lag is None else "takes turns" if lag == 0 else f"side by side, lag {lag}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """first, last: the compared steps, whose ends bound the time. level: the reward that both have reached, the lower last one."""

    first: int
    last: int
    base: Half
    other: Half
    level: float
    work: Work

    @classmethod
    def of(cls, one: Side, other: Side, work: Work) -> Self:
        """Raises ConfigError where nothing can be compared."""
        first, last = shared_steps(one, other)
        rewards = one.reward(last), other.reward(last)
        level = math.nan if any(map(math.isnan, rewards)) else min(rewards)
        return cls(first, last, _half(one, first, last, level), _half(other, first, last, level), level, work)

    @property
    def samples_ratio(self) -> float:
        return self.other.rate.samples_per_second / self.base.rate.samples_per_second

    @property
    def tokens_ratio(self) -> float:
        return self.other.rate.tokens_per_second / self.base.rate.tokens_per_second

    @property
    def bound(self) -> float | None:
        """As the first run measured it; else as the second did."""
        found = self.base.measured or self.other.measured
        return found.bound if found else None


_ROWS: tuple[tuple[str, Callable[[Half], Any]], ...] = (
    ("samples per second", lambda half: half.rate.samples_per_second),
    ("tokens per second", lambda half: half.rate.tokens_per_second),
    ("seconds per step", lambda half: half.rate.seconds_per_step),
    ("g: to generate a step [s]", lambda half: half.measured and half.measured.generate_seconds),
    ("t: to train it [s]", lambda half: half.measured and half.measured.train_seconds),
    ("h: idle tail of a batch [s]", lambda half: half.measured and half.measured.tail_seconds),
    ("CV of the durations", lambda half: half.measured and half.measured.cv),
    ("waves per step", lambda half: half.measured and half.measured.waves),
    ("bound (g + h + t) / (g + t)", lambda half: half.measured and half.measured.bound),
    ("lag of trained tokens, mean", lambda half: half.lag_mean),
    ("lag of trained tokens, most", lambda half: half.lag_max),
    ("reward, last tenth", lambda half: half.reward),
    ("held-out reward, last", lambda half: half.held_out),
)


def as_text(found: Comparison) -> str:
    """For a person."""
    halves = (found.base, found.other)
    rows = [("", *(half.way for half in halves))]
    rows += [(name, *(_number(value(half)) for half in halves)) for name, value in _ROWS]
    if not math.isnan(found.level):
        rows.append(
            (
                f"reward {found.level:.3g} after",
                *(f"{half.reached_seconds:.4g} s, step {half.reached_step:g}" for half in halves),
            )
        )
    name_width, width = max(len(row[0]) for row in rows), max(len(cell) for row in rows for cell in row[1:])
    table = [f"{name:<{name_width}}" + "".join(f"  {cell:>{width}}" for cell in cells) for name, *cells in rows]
    head = [f"{'first' if half is found.base else 'second'}: {half.side.folder}" for half in halves]
    return "\n".join([*head, *table, "", *_sentences(found)]) + "\n"


def as_json(found: Comparison) -> str:
    """The same as one object."""
    tree = {
        "steps": [found.first, found.last],
        "samples_ratio": found.samples_ratio,
        "tokens_ratio": found.tokens_ratio,
        "bound": found.bound,
        "level": found.level,
        "runs": [_half_as_tree(found.base), _half_as_tree(found.other)],
        "work": asdict(found.work),
    }
    return json.dumps(_finite(tree), indent=2) + "\n"


def _half(side: Side, first: int, last: int, level: float) -> Half:
    step, seconds = next(((s, at) for s, at, reward in side.rewards(last) if reward >= level), (math.nan, math.nan))
    return Half(
        side,
        side.rate(first, last),
        side.speed(last),
        side.reward(last),
        side.newest("eval/reward", last + 1),  # the evaluation after step n bears n + 1
        step,
        seconds,
        side.mean("train/lag_mean", last),
        side.most("train/lag_max", last),
    )


def _sentences(found: Comparison) -> list[str]:
    faster = (
        f"the second run is {found.samples_ratio:.2f} times as fast as the first in samples, {found.tokens_ratio:.2f} times in "
        f"tokens per second, over steps {found.first + 1} to {found.last} of both"
    )
    return [faster, *_of_bound(found), *_of_switch(found), *_of_work(found.work)]


def _of_bound(found: Comparison) -> list[str]:
    if found.bound is None:
        return ["neither run has measured g, t and h yet (it takes ten steps), so no bound is known"]
    if found.base.side.lag != 0 or not found.other.side.lag:
        return []
    had = found.samples_ratio / found.bound
    said = f"the bound for this workload is {found.bound:.2f} times, of which {had:.0%} was had"
    if had <= BEYOND:
        return [f"{said}; what limits it: docs/speed.md"]
    return [
        f"{said}: more than all is had only where the same work took other times in the two runs (g, t: something else used the "
        "machine, or the runs differ)"
    ]


def _of_switch(found: Comparison) -> list[str]:
    lags = [half.side.lag for half in (found.base, found.other)]
    if None in lags:
        return ["a folder without config.yaml does not tell its settings; give run folders to have them compared"]
    if lags[0] == lags[1]:
        return [
            f"both runs have {SWITCH}={lags[0]}: this compares no synchronous with an asynchronous run (async.enabled=false)"
        ]
    return []


def _of_work(work: Work) -> list[str]:
    said = [
        f"setting that differs: {key}={here} in the first, {there} in the second"
        for key, (here, there) in work.settings.items()
    ]
    if work.shared is None:
        return [*said, "whether both trained the same tasks is not known: a folder has no store and steps.jsonl"]
    counted = f"{work.groups[0]} groups in the first and {work.groups[1]} in the second"
    alone = [
        f"only the {name} trained {', '.join(map(repr, tasks))}, …"
        for name, tasks in zip(("first", "second"), work.alone, strict=True)
        if tasks
    ]
    same = f"the same tasks: {work.shared:.0%} of the trained groups are of tasks that the other trained as often ({counted})"
    if work.shared >= ALIKE:
        return [*said, same]
    return [*said, f"NOT {same}; a ratio of speeds means little where the work differs", *alone]


def _half_as_tree(half: Half) -> dict[str, Any]:
    own = {name: getattr(half, name) for name in half.__dataclass_fields__ if name not in ("side", "rate", "measured")}
    measured = asdict(half.measured) | {"bound": half.measured.bound} if half.measured else None
    return {"folder": str(half.side.folder), "lag": half.side.lag, **asdict(half.rate), "measured": measured, **own}


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.4g}"
