"""The [speed] line: what a run measures of itself, what generating and training side by side gains by that, and what to change.

    advisor = SpeedAdvisor(store.reading, gate, metrics, generating=0.5, training=0.5)
    advisor.trained(seconds, groups=4)        # once per step: training and publishing
    await advisor.report_if_due(step)         # every EVERY steps; report(step) at the end

Durations are those of the sessions that ended well in the last EVERY steps, stale ones included, from their start to their end: what
was trained alone would miss the longest. A step has as many as one of those had in the mean. slots is the most that ran at once. A sentence follows the line when what it says is
new. The formula, its source and its limits: speed.py, docs/speed.md. Used by train.py and benchmarks/async.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from areal.base.logs import Log, announce
from areal.base.metrics import MetricsFile
from areal.base.types import Limits
from areal.rollout.speed import WORTH_IT, Speed, Workload, predict
from areal.rollout.staleness import StalenessGate
from areal.store.base import Reading

EVERY = 10  # steps between two lines, and the steps that each looks back on


@dataclass(frozen=True, slots=True)
class Measured:
    """work: what was measured; speed: what follows. slots: the most trajectories at once."""

    work: Workload
    speed: Speed
    slots: int


class SpeedAdvisor:
    """generating, training: the part of the machine that each of the two has, 1 where they take turns. clock: the store's."""

    def __init__(
        self,
        reading: Reading,
        gate: StalenessGate,
        metrics: MetricsFile | None,
        *,
        generating: float,
        training: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._reading = reading
        self._gate = gate
        self._metrics = metrics
        self._generating = generating
        self._training = training
        self._clock = clock
        self._seconds: deque[float] = deque(maxlen=EVERY)
        self._groups: deque[int] = deque(maxlen=EVERY)
        self._ends: deque[float] = deque([clock()], maxlen=EVERY + 1)
        self._said = ""
        self._reported = -1

    def trained(self, seconds: float, *, groups: int) -> None:
        """A step of so many groups was trained and published, which took so long."""
        self._seconds.append(seconds)
        self._groups.append(groups)
        self._ends.append(self._clock())

    async def report_if_due(self, step: int) -> None:
        """After `step`, every EVERY steps."""
        if (step + 1) % EVERY == 0:
            await self.report(step)

    async def report(self, step: int) -> None:
        """The line, once for a step, and a sentence if it is another one than before. Nothing where too little was measured."""
        found = await self.measure() if step != self._reported else None
        if found is None:
            return
        self._reported = step
        numbers = facts(found.speed)
        Log("speed").line(step=step, **numbers)
        if self._metrics is not None:
            self._metrics.write(step, {f"speed/{name}": value for name, value in numbers.items()})
        said = advice(found, self._gate.limits)
        if said != self._said:
            announce("RLTrainer", said)
        self._said = said

    async def measure(self) -> Measured | None:
        """Of the last EVERY steps; None until as many sessions have ended as one step trains."""
        limits, since = self._gate.limits, self._ends[0]
        groups = round(sum(self._groups) / len(self._groups)) if self._groups else limits.batch_groups
        per_step = groups * limits.n_samples
        newest = await self._reading.recent((EVERY + limits.max_lag + 1) * per_step)
        now = self._clock()
        spans = [
            (one.session.started_at, one.session.ended_at, one.session.ending)
            for one in reversed(newest)
            if one.session.purpose == "train"
        ]
        durations = [
            max(0.0, ended - started)  # a clock that was set back in between must not end a run
            for started, ended, ending in spans
            if ended is not None and ended >= since and ending in ("ended", "refreshed")
        ]
        slots = most_at_once((max(started, since), ended or now) for started, ended, _ in spans)
        if not self._seconds or len(durations) < per_step or sum(durations) <= 0 or not slots:
            return None
        work = Workload(
            durations, per_step, slots, sum(self._seconds) / len(self._seconds), self._generating, self._training
        )
        return Measured(work, predict(work), slots)


def facts(speed: Speed) -> dict[str, float]:
    """What the line says, rounded for people."""
    return {
        "generate_seconds": round(speed.generate_seconds, 3),
        "train_seconds": round(speed.train_seconds, 3),
        "tail_seconds": round(speed.tail_seconds, 3),
        "cv": round(speed.cv, 2),
        "waves": round(speed.waves, 2),
        "gain": round(speed.gain, 2),
        "train_share": round(speed.train_share, 2),
        "longest_steps": speed.longest_steps,
    }


def advice(found: Measured, limits: Limits) -> str:
    """What to change, in a sentence or two; figures are rounded so that it stays the same while they hardly change."""
    speed, work = found.speed, found.work
    predicted = (
        f"generating and training side by side is predicted to be {speed.gain:.1f} times as fast as taking turns"
    )
    if speed.gain < WORTH_IT:
        end = "which this run does" if limits.max_lag == 0 else "rollout.max_head_offpolicyness=0 does, on policy"
        return f"{predicted}, so asynchronous training is not worth it here: take turns, {end}"
    best = f"with {speed.train_share:.0%} of the machine training"
    if limits.max_lag == 0:
        return f"{predicted}, {best} and rollout.max_head_offpolicyness={speed.longest_steps}"
    said = [f"{predicted}, {best} (now {work.training:.0%})"]
    if speed.longest_steps > limits.max_lag:
        said.append(
            f"the lag is the limit: the longest trajectory takes {speed.longest_steps} steps and "
            f"rollout.max_head_offpolicyness={limits.max_lag} loses what is older; raise it, or shorten the longest"
        )
    slower = speed.generate_seconds / work.generating > WORTH_IT * work.train_seconds
    if slower and limits.max_concurrent * limits.n_samples <= found.slots < work.per_step:
        said.append(
            f"the slots are the limit: training waits while all {found.slots} are taken; raise "
            "rollout.max_concurrent_rollouts, or give generation more of the machine"
        )
    return "; ".join(said)


def most_at_once(spans: Iterable[tuple[float, float]]) -> int:
    """The largest number of these (start, end) that have a moment in common; one that ends when another starts does not."""
    changes = sorted((at, change) for start, end in spans if start < end for at, change in ((start, 1), (end, -1)))
    most = running = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most
