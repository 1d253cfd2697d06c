"""An open store: the parts of the Protocol over one Database."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from areal.store.base import Reading, Registry, RewardStore, SessionStore, TrainingStore, Upkeep
from areal.store.sql.database import Database
from areal.store.sql.engine import Engine
from areal.store.sql.reading import SqlReading
from areal.store.sql.registry import SqlRegistry
from areal.store.sql.rewards import SqlRewards
from areal.store.sql.sessions import SqlSessions
from areal.store.sql.training import SqlTraining
from areal.store.sql.upkeep import SqlUpkeep


class SqlStore:
    """Store. Opening makes the tables if they are not there; `async with` closes it."""

    def __init__(self, engine: Engine, clock: Callable[[], float], *, patience_s: float = 0.0) -> None:
        self._database = Database(engine, patience_s=patience_s)
        self.sessions: SessionStore = SqlSessions(self._database, clock)
        self.training: TrainingStore = SqlTraining(self._database, clock)
        self.rewards: RewardStore = SqlRewards(self._database, clock)
        self.registry: Registry = SqlRegistry(self._database, clock)
        self.reading: Reading = SqlReading(self._database)
        self.upkeep: Upkeep = SqlUpkeep(self._database, clock)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._database.close()
