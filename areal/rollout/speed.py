"""How much faster generating and training side by side is than one after the other, predicted from what a run measured.

    speed = predict(Workload(durations, per_step=32, slots=16, train_seconds=4.0, generating=0.5, training=0.5))
    speed.gain, speed.train_share, speed.longest_steps        # 2.4, 0.31, 3

Per step, on the whole machine: g = seconds to generate with every slot busy, t = seconds to train, h = idle tail while the last
trajectories of a batch finish. Taking turns costs g + h + t. Side by side, with the part t / (g + t) of the machine training,
both halves take g + t, if speed is proportional to the share:

    S = (g + h + t) / (g + t) = 1 + h / (g + t)          derived in docs/speed.md; the same form as ROLL Flash (arXiv:2510.11345)

h is not modelled: it is that of the measured durations, dealt to the slots in their order (list scheduling). Where more ran at once than
a step has, a batch alone would not fill the slots: each of its trajectories is taken to be as much faster. A trajectory that
lasts longer than max_lag steps of g + t is too old when it ends, so the gain is had only where `longest_steps` fits the lag.
Publishing weights counts as training. Pure: no clock, no I/O. Used by advisor.py and benchmarks/async.py.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from areal.base.errors import ShapeError

WORTH_IT = 1.1  # a gain below this is within what a measured split misses by


@dataclass(frozen=True, slots=True)
class Workload:
    """What a run measured. durations: seconds of whole trajectories, in the order in which they began, at least per_step of them.

    per_step: trajectories that a step trains. slots: trajectories at once. train_seconds: of a step, with publishing.
    generating, training: the part of the machine that each of the two had while it measured, 1 where they take turns."""

    durations: Sequence[float]
    per_step: int
    slots: float
    train_seconds: float
    generating: float = 1.0
    training: float = 1.0


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds per step of the whole machine: generate (all slots busy), tail (idle, at the end of a batch), train.

    cv: standard deviation / mean of the durations. waves: trajectories per step and slot, at least 1. longest_seconds: of a trajectory.
    split_seconds: of a step with the machine split as it was measured; None where the two take turns."""

    generate_seconds: float
    tail_seconds: float
    train_seconds: float
    cv: float
    waves: float
    longest_seconds: float
    split_seconds: float | None

    @property
    def turns_seconds(self) -> float:
        """A step that generates, then trains."""
        return self.generate_seconds + self.tail_seconds + self.train_seconds

    @property
    def best_seconds(self) -> float:
        """A step that does both at once, with the best split."""
        return self.generate_seconds + self.train_seconds

    @property
    def gain(self) -> float:
        return self.turns_seconds / self.best_seconds

    @property
    def train_share(self) -> float:
        """The part of the machine that trains in the best split."""
        return self.train_seconds / self.best_seconds

    @property
    def longest_steps(self) -> int:
        """Steps that pass while the longest trajectory runs: the lag it needs."""
        return math.ceil(self.longest_seconds / self.best_seconds)


def predict(work: Workload) -> Speed:
    """Raises ShapeError for fewer durations than one step has, or numbers that are no time or share."""
    count = len(work.durations)
    if not 0 < work.per_step <= count:
        raise ShapeError(f"{count} durations for {work.per_step} trajectories per step; measure at least one step")
    if not (min(work.durations) >= 0 < sum(work.durations) and work.train_seconds > 0 and work.slots > 0):
        raise ShapeError("durations, train_seconds and slots must be positive to predict a speed")
    if not (0 < work.generating <= 1 and 0 < work.training <= 1):
        raise ShapeError(f"shares of the machine are {work.generating:g} and {work.training:g}; they must be in (0, 1]")
    whole = max(1, round(work.slots / work.generating))
    slots = min(whole, work.per_step)
    durations = [seconds * slots / whole for seconds in work.durations]
    mean = math.fsum(durations) / count
    deviation = math.sqrt(math.fsum((seconds - mean) ** 2 for seconds in durations) / count)
    batches = [durations[k : k + work.per_step] for k in range(0, count - work.per_step + 1, work.per_step)]
    tails = [makespan(batch, slots) - math.fsum(batch) / slots for batch in batches]
    generate, train = work.per_step * mean / slots, work.train_seconds * work.training
    return Speed(
        generate_seconds=generate,
        tail_seconds=math.fsum(tails) / len(tails),
        train_seconds=train,
        cv=deviation / mean,
        waves=work.per_step / slots,
        longest_seconds=max(durations),
        split_seconds=max(generate / work.generating, work.train_seconds) if work.generating < 1 else None,
    )


def makespan(durations: Sequence[float], slots: int) -> float:
    """Seconds until all are done where each starts, in order, as soon as a slot is free."""
    busy_until = [0.0] * min(slots, len(durations))
    for seconds in durations:
        heapq.heapreplace(busy_until, busy_until[0] + seconds)
    return max(busy_until)
