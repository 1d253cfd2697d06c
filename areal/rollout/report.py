"""The [rollout] line: every batch worth of finished groups, as it is completed, whatever training does meanwhile.

    async with RolloutReporter(store, gate, metrics, on_counts=progress.counts) as reporter:
        await reporter.catch_up()        # a batch was taken: the lines of what is in it stand before that of its step
        reporter.trained(step)           # its [train] line is written

A line tells of the groups that have finished since the line before: batch_groups of them, the fewest that begin a step. Line k is
there by the time that step k is trained, and never more than the lag before that, so the printed steps run ahead of [train] by at
most lag + 1. Where steps take more groups than that, or groups are dropped, more is generated than lines may be printed: the line that
had to wait tells of all of it. Its numbers are derived from store rows and stand in metrics.jsonl too. Used by train.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, Self

from areal.base.background import background
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
        trains: bool = True,
    ) -> None:
        """trains: False where no [train] line will ever come, so that no line waits for one."""
        self._store = store
        self._gate = gate
        self._metrics = metrics
        self._on_counts = on_counts
        self._log = Log("rollout")
        self._stack = AsyncExitStack()
        self._full_said = self._waits_said = False
        self._looking = asyncio.Lock()
        self._trains = trains
        self._next = gate.current.step  # the step whose [train] line comes next
        self._reported = 0  # groups whose line was written
        self._step = 0  # of the next line

    async def __aenter__(self) -> Self:
        self._warn_of_a_queue_that_never_fills()
        before = await self._store.training.counts()
        batches, begun = divmod(before.accepted, self._gate.limits.batch_groups)  # an earlier life told of whole ones
        self._reported = _completed(before) - begun
        self._step = self._gate.current.step + batches
        await self._stack.enter_async_context(background(self._watch(), name="rollout-report"))
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self._stack.__aexit__(*exc)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self.catch_up()

    def trained(self, step: int) -> None:
        """The [train] line of this step is written."""
        self._next = step + 1

    async def catch_up(self) -> None:
        """Write every line whose time has come. A store that cannot be read now is said once: the lines are made up for."""
        async with self._looking:
            try:
                await self._look(self._gate.limits.batch_groups)
                self._waits_said = False
            except StoreError as error:  # a server that is away, a lock held for long: it passes
                if not self._waits_said:
                    warn("Rollout", f"the [rollout] lines wait: {error}")
                self._waits_said = True

    async def _look(self, size: int) -> None:
        now = await self._store.training.counts()
        self._on_counts(now)
        self._warn_when_full(now)
        while (unsaid := _completed(now) - self._reported) >= size:
            room = (
                self._next + self._gate.limits.max_lag - self._step if self._trains else unsaid
            )  # lines after this one
            if room < 0:
                return
            groups = size if room else unsaid
            self._line(self._step, await self._store.reading.finished(self._reported, groups), now)
            self._reported, self._step = self._reported + groups, self._step + 1

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
        } | ({"awaiting_reward": now.awaiting_reward} if limits.scored else {})
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
