"""Accepted groups, in the order they were completed, as training rows.

    queue = GroupQueue(store, Recipe("individual", turn_discount=1.0))
    groups = await queue.groups()          # oldest first; nothing is taken out: consumption is a store row

The store is the queue (settled 1): this class reads it, turns each new group's interactions into rows once (batch.py) and keeps them
until they are consumed or dropped. Groups without a token to train are dropped here, counted by reason (T042, T058).
Used by batcher.py.
"""

from __future__ import annotations

from areal.rollout.batch import Collected, Recipe, collected
from areal.store.base import EndedGroup, Store


class GroupQueue:
    """Reads accepted groups from the store; remembers the rows of those it has seen."""

    def __init__(self, store: Store, recipe: Recipe) -> None:
        self._store = store
        self.recipe = recipe
        self._seen: dict[str, Collected] = {}

    async def groups(self) -> list[Collected]:
        """Every accepted group that has something to train, oldest first."""
        ready = await self._store.training.ready()
        waiting = {group.id for group in ready}
        for gone in self._seen.keys() - waiting:
            del self._seen[gone]
        found: list[Collected] = []
        for ended in ready:
            group = self._seen.get(ended.id)
            if group is None or group.fates.keys() != {session.id for session in ended.sessions}:
                group = await read_group(self._store, ended, self.recipe)  # anew where a session was excluded since
            if any(row.trained.any() for row in group.group.trajectories):
                self._seen[ended.id] = group
                found.append(group)
            else:
                await self._store.training.drop([ended.id], "nothing_to_train")
                self._seen.pop(ended.id, None)
        return found


async def read_group(store: Store, ended: EndedGroup, recipe: Recipe) -> Collected:
    """What the sessions of a complete group recorded, as rows."""
    interactions = {session.id: await store.sessions.interactions(session.id) for session in ended.sessions}
    return collected(ended, interactions, recipe)
