"""What is trained next: full groups, oldest first, with every trained token's age checked again.

    batcher = Batcher(queue, gate, training, batch_groups=8, most_groups=16, stale="drop")
    batch = await batcher.next_batch()     # waits; says in the log what it waits for
    batch.groups, batch.lag_max, batch.reward

Too old tokens: `drop` leaves out the whole session (its group goes on with two or more survivors), `mask` leaves out the
tokens (settled 19), `wait` lets no running group grow too old: the step waits for it, and drops only what `wait_s` did not save
(patience.py; docs/staleness.md). A session is judged by its oldest *trained* token. Every loss is counted with its reason, and
said with its task. The batch is sorted by task so that the same groups make the same step whatever order they came in (settled 17).
With `informative` (dynamic sampling) a group that it finds to say nothing is dropped as zero_variance and its slot opens (T060).
A step begins when `batch_groups` groups are there and takes what is finished, up to `most_groups`; a
surplus stays in the store for the next step (T062). From the moment a batch is returned its step owns its groups: until then a session
can still be excluded, and is not in it.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from areal.base.errors import StoreError
from areal.base.types import Group
from areal.rollout.batch import Batch, Checked, batch_of, checked_ages, last_step
from areal.rollout.patience import Debts, held_by
from areal.rollout.queue import GroupQueue
from areal.rollout.staleness import RunningGroup, StalenessGate
from areal.store.base import TrainingStore

POLL_S = 0.05  # other processes write the store, and SQLite cannot call us: one short poll, here only
LOOK_S = 0.5  # groups that are too few for a batch are read this often, for those that are to be dropped; counting them is cheap
SAY_S = 10.0  # a wait longer than this is explained in the log, and again every so often
NAMED = 5  # tasks in one line of the log
REFUSALS = (
    20  # of one batch in a row: what changed is read at the next look, so that one refusal says all there is to say
)


class Batcher:
    """Takes the oldest groups that are fresh enough."""

    def __init__(
        self,
        queue: GroupQueue,
        gate: StalenessGate,
        training: TrainingStore,
        *,
        batch_groups: int,
        most_groups: int | None = None,
        stale: Literal["drop", "mask", "wait"],
        wait_s: float = 600.0,
        informative: Callable[[Group], bool] | None = None,
        say: Callable[[str], None] = print,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """batch_groups: the fewest that begin a step. most_groups: the most that it takes; None = exactly batch_groups, and at lag 0 in
        any case: a sequential loop makes each step of what its weights sampled, also where a recovery hands several steps' worth back.
        clock: seconds; None = the event loop's."""
        self._queue = queue
        self._gate = gate
        self._training = training
        self._batch_groups = batch_groups
        self._most_groups = batch_groups if most_groups is None or gate.limits.max_lag == 0 else most_groups
        self._stale = stale
        self._wait_s = wait_s
        self._informative = informative
        self._say = say
        self._clock = clock or asyncio.get_running_loop().time
        self._debts = Debts(everyone=stale == "wait")
        self._dropped: Counter[str] = Counter()  # as stale since the last batch, by task
        self._looked = -math.inf
        self._finished = 0  # fresh groups at the last look
        self._held: list[RunningGroup] = []  # those without which the step must not begin
        self._held_since: float | None = None
        self._refused: Counter[tuple[tuple[str, tuple[str, ...]], ...]] = (
            Counter()
        )  # the members of the batch that was refused last

    async def next_batch(self) -> Batch:
        """Wait for batch_groups groups that are fresh enough, and for what must not be left behind; returns the most urgent, up to
        most_groups of them."""
        said = self._clock()
        while (batch := await self.poll()) is None:
            if self._clock() - said > SAY_S:
                said = self._clock()
                await self._explain()
            await asyncio.sleep(POLL_S)
        return batch

    async def poll(self) -> Batch | None:
        """One look at what has finished: the batch, or None if its time has not come."""
        _, accepted = await self._training.occupancy()
        if accepted < self._batch_groups and self._clock() - self._looked < LOOK_S:
            return None
        running = await self._gate.running() if self._debts else []  # before the finished: none slips through between
        last_steps = [(last_step(one.group, self._gate), one) for one in await self._fresh() if one.group is not None]
        owed = sorted((pair for pair in last_steps if pair[1].task_id in self._debts), key=lambda pair: pair[0])
        fresh = [*owed, *(pair for pair in last_steps if pair[1].task_id not in self._debts)]
        self._looked, self._finished = self._clock(), len(fresh)
        self._held = self._held_by(running, fresh, len(owed)) if len(fresh) >= self._batch_groups else []
        if self._held and self._held_since is None:
            self._held_since = self._clock()
        if len(fresh) < self._batch_groups or (self._held and self._waited() < self._wait_s):
            return None
        batch = await self._taken([one for _, one in fresh[: self._most_groups]])
        if batch is not None:
            self._tell(batch)
            self._dropped.clear()
            self._held_since = None
        return batch

    def _waited(self) -> float:
        return 0.0 if self._held_since is None else self._clock() - self._held_since

    def _held_by(
        self, running: Sequence[RunningGroup], fresh: Sequence[tuple[int, Checked]], owed: int
    ) -> list[RunningGroup]:
        """Those of the running groups without which the step must not begin. owed: how many of `fresh` are waited for; they come first."""
        finished = {
            one.group.id for _, one in fresh if one.group is not None
        }  # it may have ended between the two looks
        protected = [one for one in running if one.task_id in self._debts and one.id not in finished]
        last = [step for step, _ in fresh[:owed]]
        left = [one.opened_at + self._gate.limits.max_lag for one in protected] + last[self._most_groups :]
        held = held_by(
            current=self._gate.current.step, size=self._most_groups, taken=last[: self._most_groups], left=left
        )
        return [protected[index] for index in held if index < len(protected)]

    async def _taken(self, chosen: Sequence[Checked]) -> Batch | None:
        """The batch, once the store has given its groups to the step; None if one of them has changed meanwhile."""
        batch = batch_of(chosen, self._gate, reward_clip=self._queue.recipe.reward_clip)
        if not await self._training.take(self._gate.next_version(), batch.members):
            self._refuse(tuple(batch.members.items()))
            return None
        self._refused.clear()
        for one in chosen:
            if self._stale != "mask" and one.stale:
                self._debts.lost(one.task_id)
            else:
                self._debts.trained(one.task_id)
        return replace(batch, stale_groups=self._dropped.total(), held_seconds=self._waited())

    def _refuse(self, members: tuple[tuple[str, tuple[str, ...]], ...]) -> None:
        """A batch whose sessions changed while it was made is made anew; one that is refused again and again as it is never comes."""
        self._refused = Counter({members: self._refused[members] + 1})
        if self._refused[members] >= REFUSALS:
            raise StoreError(
                f"the store shows {len(members)} finished groups ({members[0][0]}, …) and refused them to the step {REFUSALS} times: what is "
                "read is not what is written. Start the run again, it goes on from its last checkpoint; was the store's file copied, "
                "replaced or opened by another program?"
            )

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
                if reason == "stale":
                    self._dropped[group.task_id] += 1
                    self._debts.lost(group.task_id)
            else:
                found.append(checked)
        return found

    def _says_nothing(self, group: Group) -> bool:
        return self._informative is not None and not self._informative(group)

    async def _explain(self) -> None:
        if self._held:
            self._say(
                f"waiting for {_number(len(self._held), 'running group')} that would be too old after this step "
                f"({_some(one.task_id for one in self._held)}); {self._finished} finished; {self._waited():.0f} of at most "
                f"{self._wait_s:g} s (rollout.stale_wait_seconds)"
            )
            return
        counts = await self._training.counts()
        lost = ", ".join(f"{reason} {number}" for reason, number in sorted(counts.dropped.items()))
        unscored = f", {counts.awaiting_reward} waiting for their reward" if counts.awaiting_reward else ""
        self._say(
            f"waiting for {_number(self._batch_groups - self._finished, 'more group')}; "
            f"{_number(counts.running_sessions, 'session')} running{unscored}, slots {counts.free_slots}"
            f"{f'; groups dropped so far: {lost}' if lost else ''}"
        )

    def _tell(self, batch: Batch) -> None:
        """What the policy did for this batch: whom it gave up, and what was lost since the batch before, by task."""
        if self._held:
            self._say(
                f"a step goes on without {_number(len(self._held), 'running group')} "
                f"({_some(one.task_id for one in self._held)}): it waited {batch.held_seconds:.0f} s, "
                f"rollout.stale_wait_seconds={self._wait_s:g}"
            )
        if self._dropped:
            by_task = (f"{task} {number}" for task, number in self._dropped.most_common())
            self._say(
                f"{_number(self._dropped.total(), 'group')} dropped as stale since the step before ({_some(by_task)}): older than "
                f"rollout.max_head_offpolicyness={self._gate.limits.max_lag}; their tasks are waited for next time"
            )


def _number(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:NAMED]) + (f" and {len(listed) - NAMED} more" if len(listed) > NAMED else "")
