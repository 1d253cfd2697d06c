"""The [rollout] line: every batch worth of finished groups, as it is completed, whatever training does meanwhile.

    async with RolloutReporter(store.training, gate, metrics): ...

Step k is printed when the groups of batch k are complete, so the printed steps run ahead of [train] by at most lag + 1.
Its numbers are derived from store rows. Used by train.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from areal.base.logs import Log, warn
from areal.base.types import Counts
from areal.rollout.staleness import StalenessGate
from areal.store.base import TrainingStore

POLL_S = 0.25


class RolloutReporter:
    """Watches the counts; remembers the latest for the progress display."""

    def __init__(self, training: TrainingStore, gate: StalenessGate, *, on_counts: Callable[[Counts], None]) -> None:
        self._training = training
        self._gate = gate
        self._on_counts = on_counts
        self._log = Log("rollout")
        self._task: asyncio.Task[None] | None = None
        self._full_said = False

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch(), name="rollout-report")
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _watch(self) -> None:
        size = self._gate.limits.batch_groups
        before = await self._training.counts()
        step = self._gate.current.step + before.accepted // size
        while True:
            await asyncio.sleep(POLL_S)
            now = await self._training.counts()
            self._on_counts(now)
            self._warn_when_full(now)
            while _generated(now) - _generated(before) >= size:
                self._line(step, before, now)
                step += 1
                before = now

    def _line(self, step: int, before: Counts, now: Counts) -> None:
        limits = self._gate.limits
        most = min(limits.max_concurrent, (limits.max_lag + 1) * limits.batch_groups)
        self._log.line(
            step=step,
            generated=(_generated(now) - _generated(before)) * limits.n_samples,
            tokens=now.recorded_tokens - before.recorded_tokens,
            queue=f"{now.accepted}/{limits.queue_size or (limits.max_lag + 1) * limits.batch_groups}",
            slots=f"{now.free_slots}/{most}",
            running=now.running_sessions,
            version=self._gate.current.label,
        )

    def _warn_when_full(self, now: Counts) -> None:
        limit = self._gate.limits.queue_size
        if limit and now.accepted >= limit and not self._full_said:
            self._full_said = True
            warn(
                "Rollout",
                f"the queue is full ({now.accepted} of {limit} groups): raise rollout.queue_size "
                "(async.queue_max_size) or train faster (async.train_workers)",
            )


def _generated(counts: Counts) -> int:
    return counts.accepted + counts.consumed + sum(counts.dropped.values())
