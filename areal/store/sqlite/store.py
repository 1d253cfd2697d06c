"""An open SQLite store: the parts of the Protocol over one Database."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Self

from areal.store.base import Reading, Registry, SessionStore, TrainingStore
from areal.store.sqlite.database import Database
from areal.store.sqlite.reading import SqliteReading
from areal.store.sqlite.registry import SqliteRegistry
from areal.store.sqlite.sessions import SqliteSessions
from areal.store.sqlite.training import SqliteTraining


class SqliteStore:
    """Store. Opening makes the file (mode 0600) and its tables if they are not there; `async with` closes it."""

    def __init__(
        self, path: Path, clock: Callable[[], float], *, busy_timeout_s: float = 10.0, read_only: bool = False
    ) -> None:
        self._database = Database(path, busy_timeout_s=busy_timeout_s, read_only=read_only)
        self.sessions: SessionStore = SqliteSessions(self._database, clock)
        self.training: TrainingStore = SqliteTraining(self._database, clock)
        self.registry: Registry = SqliteRegistry(self._database, clock)
        self.reading: Reading = SqliteReading(self._database)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._database.close()
