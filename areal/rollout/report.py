"""The [rollout] line: every batch worth of finished groups, as it is completed, whatever training does meanwhile.

    async with RolloutReporter(store, gate, metrics, on_counts=progress.counts): ...

Step k is printed when the groups of batch k are complete, so the printed steps run ahead of [train] by at most lag + 1.
Its numbers are derived from store rows and stand in metrics.jsonl too. Used by train.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from areal.base.errors import StoreError
from areal.base.logs import Log, warn
from areal.base.metrics import MetricsFile
from areal.base.types import Counts
from areal.rollout.staleness import StalenessGate
from areal.store.admission import lag_bound, most_running, queue_bound
from areal.store.base import Finished, Store

POLL_S = 0.25


class RolloutReporter:
    """Watches the counts and hands each reading to on_counts, which the progress display draws."""

    def __init__(
        self,
        store: Store,
        gate: StalenessGate,
        metrics: MetricsFile,
        *,
        on_counts: Callable[[Counts], None],
    ) -> None:
        self._store = store
        self._gate = gate
        self._metrics = metrics
        self._on_counts = on_counts
        self._log = Log("rollout")
        self._task: asyncio.Task[None] | None = None
        self._full_said = False
        self._reported = 0  # groups whose line was written
        self._step = 0  # of the next line

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
        self._warn_of_a_queue_that_never_fills()
        before = await self._store.training.counts()
        self._reported = _completed(before)
        self._step = self._gate.current.step + before.accepted // size
        said = False
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self._look(size)
                said = False
            except (
                StoreError
            ) as error:  # a server that is away, a lock held for long: it passes, and the lines are made up for
                if not said:
                    warn("Rollout", f"the [rollout] lines wait: {error}")
                said = True

    async def _look(self, size: int) -> None:
        now = await self._store.training.counts()
        self._on_counts(now)
        self._warn_when_full(now)
        while _completed(now) - self._reported >= size:
            self._line(self._step, await self._store.reading.finished(self._reported, size), now)
            self._reported, self._step = self._reported + size, self._step + 1

    def _line(self, step: int, batch: Finished, now: Counts) -> None:
        limits = self._gate.limits
        numbers = {
            "generated": batch.sessions,
            "tokens": batch.tokens,
            "reward": batch.reward,
            "queue": now.accepted,
            "slots": now.free_slots,
            "running": now.running_sessions,
            "version": self._gate.current.label,
        }
        bounds = {"queue": queue_bound(limits), "slots": most_running(limits)}
        shown = {name: f"{value}/{bounds[name]}" if name in bounds else value for name, value in numbers.items()}
        self._log.line(step=step, **shown)
        self._metrics.write(step, {f"rollout/{name}": value for name, value in numbers.items()})

    def _warn_of_a_queue_that_never_fills(self) -> None:
        limits = self._gate.limits
        if limits.queue_size > lag_bound(limits):
            warn(
                "Rollout",
                f"rollout.queue_size={limits.queue_size} (async.queue_max_size) is never reached: max_head_offpolicyness="
                f"{limits.max_lag} lets {lag_bound(limits)} groups wait; lower the first, or raise the second",
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


def _completed(counts: Counts) -> int:
    """Groups that will change no more but to be consumed or dropped."""
    return counts.accepted + counts.consumed + sum(counts.dropped.values())
