"""What is trained next: full groups, oldest first, with every trained token's age checked again.

    batcher = Batcher(queue, gate, training, batch_groups=8, stale="drop")
    batch = await batcher.next_batch()     # waits; says in the log what it waits for
    batch.groups, batch.lag_max, batch.reward

Too old tokens: `drop` leaves out the whole session (its group goes on with two or more survivors), `mask` leaves out the
tokens (settled 19). Every loss is counted with its reason. The batch is sorted by task so that the same groups make the
same step whatever order they came in (settled 17). With `informative` (dynamic sampling) a group that it finds to say nothing is dropped as zero_variance and its slot opens (T060).
A surplus stays in the store for the next step (T062). From the moment a batch is returned its step owns its groups: until then a session
can still be excluded, and is not in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

import numpy as np

from areal.base.types import Group
from areal.rollout.batch import Batch, Checked, batch_of, checked_ages
from areal.rollout.queue import GroupQueue
from areal.rollout.staleness import StalenessGate
from areal.store.base import TrainingStore

POLL_S = 0.05  # other processes write the store, and SQLite cannot call us: one short poll, here only
LOOK_S = 0.5  # groups that are too few for a batch are read this often, for those that are to be dropped; counting them is cheap
SAY_S = 10.0  # a wait longer than this is explained in the log, and again every so often


class Batcher:
    """Takes the oldest groups that are fresh enough."""

    def __init__(
        self,
        queue: GroupQueue,
        gate: StalenessGate,
        training: TrainingStore,
        *,
        batch_groups: int,
        stale: Literal["drop", "mask"],
        informative: Callable[[Group], bool] | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self._queue = queue
        self._gate = gate
        self._training = training
        self._batch_groups = batch_groups
        self._stale = stale
        self._informative = informative
        self._say = say

    async def next_batch(self) -> Batch:
        """Wait for batch_groups groups that are fresh enough; returns the oldest of them."""
        clock = asyncio.get_running_loop().time
        said, looked, have = clock(), -LOOK_S, 0
        while True:
            _, accepted = await self._training.occupancy()
            fresh = []
            if accepted >= self._batch_groups or clock() - looked >= LOOK_S:
                fresh, looked = await self._fresh(), clock()
                have = len(fresh)
            if len(fresh) >= self._batch_groups:
                chosen = fresh[: self._batch_groups]
                batch = batch_of(chosen, self._gate, reward_clip=self._queue.recipe.reward_clip)
                members = {one.group.id: one.shares.keys() for one in chosen if one.group is not None}
                if await self._training.take(self._gate.next_version(), members):
                    return batch
            if clock() - said > SAY_S:
                said = clock()
                await self._explain(have)
            await asyncio.sleep(POLL_S)

    async def set_aside(self, reason: str) -> int:
        """Wait for finished groups and drop them, counted by reason: they stay in the store, their slots open."""
        while True:
            if groups := await self._training.ready():
                await self._training.drop([group.id for group in groups], reason)
                self._gate.opened.set()
                return len(groups)
            await asyncio.sleep(POLL_S)

    async def _fresh(self) -> list[Checked]:
        found = []
        for whole in await self._queue.groups():
            group = whole.group
            await self._gate.learn(int(label) for row in group.trajectories for label in np.unique(row.versions))
            checked = checked_ages(whole, self._gate, self._stale)
            reason = "stale" if checked.group is None else "zero_variance" if self._says_nothing(checked.group) else ""
            if reason:
                await self._training.drop([group.id], reason)
                self._gate.opened.set()
            else:
                found.append(checked)
        return found

    def _says_nothing(self, group: Group) -> bool:
        return self._informative is not None and not self._informative(group)

    async def _explain(self, have: int) -> None:
        counts = await self._training.counts()
        missing = self._batch_groups - have
        lost = ", ".join(f"{reason} {number}" for reason, number in sorted(counts.dropped.items()))
        self._say(
            f"waiting for {missing} more group{'s' if missing > 1 else ''}; {counts.running_sessions} session{'s' if counts.running_sessions != 1 else ''} running,"
            f" slots {counts.free_slots}{f'; groups dropped so far: {lost}' if lost else ''}"
        )
