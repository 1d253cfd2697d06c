"""Which worker lives where (`Registry`). Heartbeats are stamped with this store's clock.

Some databases serve one host (SQLite: its write lock and shared memory do not travel over a network): there the first worker that
reports from a second host is refused.
"""

from __future__ import annotations

from collections.abc import Callable

from areal.base.errors import StoreError
from areal.base.types import WorkerInfo
from areal.store.sql.database import Database
from areal.store.sql.engine import Connection

ALIVE_S = 10.0  # five missed heartbeats
AT_ONCE_S = 0.0  # nobody waits for a server here: the next beat comes soon, and who asks keeps the former answer


class SqlRegistry:
    """Registry. `clock` returns seconds since the epoch."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    async def heartbeat(self, worker: WorkerInfo) -> None:
        await self._database.write(
            lambda connection: _heartbeat(connection, worker, self._clock(), one_host=self._database.engine.one_host),
            patience_s=AT_ONCE_S,
        )

    async def workers(self, alive_within_s: float = ALIVE_S) -> tuple[WorkerInfo, ...]:
        return await self._database.read(
            lambda connection: _workers(connection, self._clock() - alive_within_s), patience_s=AT_ONCE_S
        )

    async def leave(self, worker_id: str) -> None:
        def leave(connection: Connection) -> None:
            connection.execute("DELETE FROM workers WHERE id = ?", (worker_id,))

        await self._database.write(leave, patience_s=AT_ONCE_S)


def _heartbeat(connection: Connection, worker: WorkerInfo, now: float, *, one_host: bool) -> None:
    other = connection.execute(
        "SELECT host FROM workers WHERE host <> ? AND heartbeat_at >= ? LIMIT 1", (worker.host, now - ALIVE_S)
    ).fetchone()
    if one_host and other is not None:
        raise StoreError(
            f"worker {worker.id!r} reports from {worker.host!r}, but workers on {other['host']!r} use this SQLite store; "
            "it serves one host: put all workers there, or name a Postgres database in store.url"
        )
    connection.execute(
        "INSERT INTO workers (id, url, pid, host, heartbeat_at) VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET "
        "url = excluded.url, pid = excluded.pid, host = excluded.host, heartbeat_at = excluded.heartbeat_at",
        (worker.id, worker.url, worker.pid, worker.host, now),
    )


def _workers(connection: Connection, alive_since: float) -> tuple[WorkerInfo, ...]:
    rows = connection.execute(
        "SELECT w.*, (SELECT count(*) FROM sessions s WHERE s.worker = w.id AND s.ending IS NULL) AS running "
        "FROM workers w WHERE w.heartbeat_at >= ? ORDER BY w.id",
        (alive_since,),
    )
    return tuple(
        WorkerInfo(row["id"], row["url"], row["pid"], row["host"], row["heartbeat_at"], row["running"])
        for row in rows.fetchall()
    )
