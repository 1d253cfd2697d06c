"""Which worker lives where (`Registry`), on one SQLite file. Heartbeats are stamped with this store's clock.

One file serves one host: its write lock and shared memory do not travel over a network. The first worker that reports from a
second host is refused.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from areal.base.errors import StoreError
from areal.base.types import WorkerInfo
from areal.store.sqlite.database import Database

ALIVE_S = 10.0  # five missed heartbeats


class SqliteRegistry:
    """Registry. `clock` returns seconds since the epoch."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    async def heartbeat(self, worker: WorkerInfo) -> None:
        await self._database.write(lambda connection: _heartbeat(connection, worker, self._clock()))

    async def workers(self, alive_within_s: float = ALIVE_S) -> tuple[WorkerInfo, ...]:
        return await self._database.read(lambda connection: _workers(connection, self._clock() - alive_within_s))

    async def leave(self, worker_id: str) -> None:
        def leave(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM workers WHERE id = ?", (worker_id,))

        await self._database.write(leave)


def _heartbeat(connection: sqlite3.Connection, worker: WorkerInfo, now: float) -> None:
    other = connection.execute(
        "SELECT host FROM workers WHERE host <> ? AND heartbeat_at >= ?", (worker.host, now - ALIVE_S)
    ).fetchone()
    if other is not None:
        raise StoreError(
            f"worker {worker.id!r} reports from {worker.host!r}, but workers on {other['host']!r} use this SQLite store; "
            "it serves one host: put all workers there"
        )
    connection.execute(
        "INSERT INTO workers (id, url, pid, host, heartbeat_at) VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET "
        "url = excluded.url, pid = excluded.pid, host = excluded.host, heartbeat_at = excluded.heartbeat_at",
        (worker.id, worker.url, worker.pid, worker.host, now),
    )


def _workers(connection: sqlite3.Connection, alive_since: float) -> tuple[WorkerInfo, ...]:
    rows = connection.execute(
        "SELECT w.*, (SELECT count(*) FROM sessions s WHERE s.worker = w.id AND s.ending IS NULL) AS running "
        "FROM workers w WHERE w.heartbeat_at >= ? ORDER BY w.id",
        (alive_since,),
    )
    return tuple(
        WorkerInfo(row["id"], row["url"], row["pid"], row["host"], row["heartbeat_at"], row["running"])
        for row in rows.fetchall()
    )
