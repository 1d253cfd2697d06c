"""Accepted groups, in the order they were completed, as training rows.

    queue = GroupQueue(store, export_style="individual", turn_discount=1.0)
    groups = await queue.groups()          # oldest first; nothing is taken out: consumption is a store row

The store is the queue (settled 1): this class reads it, turns each new group's interactions into rows once and keeps them
until they are consumed or dropped. Groups without a token to train are dropped here, counted by reason (T042, T058).
Used by batcher.py.
"""

from __future__ import annotations

from areal.base.types import ExportStyle, Group
from areal.proxy.export import Account, account, rows
from areal.store.base import EndedGroup, Store


class GroupQueue:
    """Reads accepted groups from the store; remembers the rows of those it has seen."""

    def __init__(
        self, store: Store, *, export_style: ExportStyle, turn_discount: float, reward_clip: float | None = None
    ) -> None:
        self._store = store
        self._style: ExportStyle = export_style
        self._discount = turn_discount
        self.reward_clip = reward_clip
        self._seen: dict[str, Group] = {}
        self.accounts: dict[str, dict[str, Account]] = {}  # group id -> session id -> where its recorded tokens go

    async def groups(self) -> list[Group]:
        """Every accepted group that has something to train, oldest first."""
        ready = await self._store.training.ready()
        waiting = {group.id for group in ready}
        for gone in self._seen.keys() - waiting:
            del self._seen[gone], self.accounts[gone]
        found: list[Group] = []
        for ended in ready:
            group = self._seen.get(ended.id)
            if group is None or self.accounts[ended.id].keys() != {session.id for session in ended.sessions}:
                group = await self._read(ended)  # anew where a session was excluded since
            if any(row.trained.any() for row in group.trajectories):
                self._seen[ended.id] = group
                found.append(group)
            else:
                await self._store.training.drop([ended.id], "nothing_to_train")
                self._seen.pop(ended.id, None)
                del self.accounts[ended.id]
        return found

    async def _read(self, ended: EndedGroup) -> Group:
        trajectories = []
        self.accounts[ended.id] = {}
        for session in ended.sessions:
            interactions = await self._store.sessions.interactions(session.id)
            self.accounts[ended.id][session.id] = account(interactions)
            trajectories.extend(rows(session, interactions, self._style, self._discount, self.reward_clip))
        return Group(ended.id, ended.task_id, tuple(trajectories))
