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
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from areal.base.types import Group
from areal.proxy.export import Account, clipped
from areal.rollout.queue import GroupQueue
from areal.rollout.staleness import StalenessGate
from areal.store.base import TrainingStore

POLL_S = 0.05  # other processes write the store, and SQLite cannot call us: one short poll, here only
LOOK_S = 0.5  # groups that are too few for a batch are read this often, for those that are to be dropped; counting them is cheap
SAY_S = 10.0  # a wait longer than this is explained in the log, and again every so often


@dataclass(frozen=True, slots=True)
class Batch:
    """Groups for one training step. reward: mean over sessions of the raw sum. lags: version label -> steps behind.
    rewards_clipped: how many rewards are trained as less than was set (rollout.agent.reward_clip).

    accounts: session id -> (trained tokens, masked tokens by reason), for every session of these groups, so that
    recorded = trained + masked holds for each."""

    groups: tuple[Group, ...]
    lag_mean: float
    lag_max: int
    reward: float
    accounts: dict[str, tuple[int, dict[str, int]]]
    lags: dict[int, int] = field(default_factory=dict)
    rewards_clipped: int = 0

    @property
    def sessions(self) -> int:
        return sum(len(group.sessions()) for group in self.groups)

    @property
    def recorded_tokens(self) -> int:
        return sum(trained + sum(masked.values()) for trained, masked in self.accounts.values())

    @property
    def rewarded(self) -> bool:
        """Whether anybody rewarded anything in it; silence counts 0, so without a reward all sessions are equal."""
        rows = (row for group in self.groups for row in group.trajectories)
        return any(span.raw_reward is not None for row in rows for span in row.spans)

    @property
    def group_ids(self) -> list[str]:
        return [group.id for group in self.groups]


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
                batch = self._batch(fresh[: self._batch_groups])
                members = {group: self._queue.accounts[group].keys() for group in batch.group_ids}
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

    async def _fresh(self) -> list[tuple[Group, dict[str, int]]]:
        found = []
        for group in await self._queue.groups():
            await self._gate.learn(int(label) for row in group.trajectories for label in np.unique(row.versions))
            checked, stale = self._check(group)
            reason = "stale" if checked is None else "zero_variance" if self._says_nothing(checked) else None
            if checked is None or reason is not None:
                await self._training.drop([group.id], reason or "stale")
                self._gate.opened.set()
            else:
                found.append((checked, stale))
        return found

    def _says_nothing(self, group: Group) -> bool:
        return self._informative is not None and not self._informative(group)

    def _check(self, group: Group) -> tuple[Group | None, dict[str, int]]:
        """The group without what is too old, and how many tokens that is per session; None where too little is left."""
        old = [self._gate.too_old(row.versions, row.trained) for row in group.trajectories]
        accounts = self._queue.accounts[group.id]
        stale = dict.fromkeys(accounts, 0)
        for row, mask in zip(group.trajectories, old, strict=True):
            stale[row.session_id] += int(mask.sum())
        if not any(stale.values()):
            return group, stale
        if self._stale == "mask":
            kept = [
                replace(row, trained=row.trained & ~mask) for row, mask in zip(group.trajectories, old, strict=True)
            ]
            survives = any(row.trained.any() for row in kept)
        else:
            kept = [row for row in group.trajectories if not stale[row.session_id]]
            survives = len({row.session_id for row in kept}) >= min(2, self._gate.limits.n_samples)
            stale = {session: accounts[session].trained if n else 0 for session, n in stale.items()}
        return (replace(group, trajectories=tuple(kept)) if survives else None), stale

    def _batch(self, fresh: list[tuple[Group, dict[str, int]]]) -> Batch:
        groups = tuple(sorted((group for group, _ in fresh), key=lambda group: (group.task_id, group.id)))
        rows = [row for group in groups for row in group.trajectories]
        lags = np.concatenate([self._gate.lag(row.versions)[row.trained] for row in rows])
        labels = np.unique(np.concatenate([row.versions[row.trained] for row in rows]))
        spans = {span.interaction_id: span for row in rows for span in row.spans}  # branches share their history
        rewards = [span.raw_reward or 0.0 for span in spans.values()]
        return Batch(
            groups,
            lag_mean=float(lags.mean()),
            lag_max=int(lags.max()),
            reward=sum(rewards) / len({row.session_id for row in rows}),
            rewards_clipped=sum(clipped(reward, self._queue.reward_clip) != reward for reward in rewards),
            accounts={
                session: _account(self._queue.accounts[group.id][session], n)
                for group, stale in fresh
                for session, n in stale.items()
            },
            lags=dict(zip(labels.tolist(), self._gate.lag(labels).tolist(), strict=True)),
        )

    async def _explain(self, have: int) -> None:
        counts = await self._training.counts()
        missing = self._batch_groups - have
        lost = ", ".join(f"{reason} {number}" for reason, number in sorted(counts.dropped.items()))
        self._say(
            f"waiting for {missing} more group{'s' if missing > 1 else ''}; {counts.running_sessions} session{'s' if counts.running_sessions != 1 else ''} running,"
            f" slots {counts.free_slots}{f'; groups dropped so far: {lost}' if lost else ''}"
        )


def _account(account: Account, stale: int) -> tuple[int, dict[str, int]]:
    return account.trained - stale, dict(account.masked) | ({"stale": stale} if stale else {})
