"""A few threads that look into the database for event loops, each on a connection of its own.

    readers = Readers(engine, connect)
    value = await readers.look(operation)      # one snapshot; raises StoreError
    await readers.call(engine.scrub)           # anything else that may block; raises what it raises
    readers.close(60.0)                        # False: one of them hangs, and is left behind

They are daemons: a disk or server that never answers holds nobody at the end of the process. Looks that queued up while one of them found
that there is no connecting to the server fail as it did, and not one after the other's time-out. Used by database.py.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from areal.store.sql.engine import Connection, Engine
from areal.store.sql.owed import Owed

T = TypeVar("T")

READERS = 2


class _Job(Owed[T]):
    """As a context manager it keeps the work's error for the caller."""

    def __init__(self, work: Callable[[], T], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.work = work

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        self.error = error
        return True

    def run(self) -> None:
        with self:
            self.result = self.work()
        if not self.loop.is_closed():  # else nobody is left to be told
            self.loop.call_soon_threadsafe(self.resolve)


class Readers:
    """See the module. connect: a new connection whose tables are up to date; raises as Engine.connect does."""

    def __init__(self, engine: Engine, connect: Callable[[], Connection]) -> None:
        self._engine, self._connect = engine, connect
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._own = threading.local()
        self._connections: list[Connection] = []
        self._unreached: tuple[float, Exception] | None = None  # when connecting failed last, and why

    async def look(self, operation: Callable[[Connection], T]) -> T:
        """Run `operation` on a read-only connection, all its SELECTs on one snapshot. Raises StoreError."""
        asked = time.monotonic()
        return await self.call(lambda: self._look(operation, asked))

    async def call(self, work: Callable[[], T]) -> T:
        """Run `work` on one of the threads."""
        job = _Job(work, asyncio.get_running_loop())
        self._start()
        self._jobs.put(job)
        return await job.future

    def close(self, within_s: float) -> bool:
        """Finish what is under way, then let go of the database. False if that takes longer: then nothing more is touched."""
        deadline = time.monotonic() + within_s
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        for connection in self._connections:
            connection.close()
        return True

    def _start(self) -> None:
        with self._starting:
            if len(self._threads) < READERS:
                name = f"store reader {len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.future.cancelled():
                job.run()

    def _look(self, operation: Callable[[Connection], T], asked: float) -> T:
        try:
            try:
                return self._once(operation, asked)
            except self._engine.errors:
                connection = getattr(self._own, "connection", None)
                if connection is None or not self._engine.lost(connection):
                    raise
                return self._once(operation, asked)
        except self._engine.errors as error:
            raise self._engine.refused(error) from error

    def _once(self, operation: Callable[[Connection], T], asked: float) -> T:
        connection: Connection | None = getattr(self._own, "connection", None)
        if connection is None or self._engine.lost(connection):
            connection = self._own.connection = self._reach(asked)
            self._connections.append(connection)
        self._engine.begin_read(connection)
        try:
            return operation(connection)
        finally:
            self._engine.end_read(connection)

    def _reach(self, asked: float) -> Connection:
        if self._unreached is not None and self._unreached[0] > asked:
            raise self._unreached[1]
        try:
            return self._connect()
        except self._engine.errors as error:
            self._unreached = time.monotonic(), error
            raise
