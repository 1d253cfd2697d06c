"""One SQLite file, opened by any number of processes: durable group commit for writers, snapshots for readers.

    database = Database(path)
    value = await database.write(lambda connection: ...)    # committed with fsync when it returns
    value = await database.read(lambda connection: ...)     # one consistent snapshot, off the event loop
    await database.close()                                  # commits what is queued first

A durable commit costs one fsync whatever it holds, so all writes of this process pass through one thread: it takes the write lock,
then everything that queued up meanwhile (at most BATCH operations), runs each in a savepoint of its own, commits once, and
only then answers. Waiting for the lock and for the previous fsync is what fills a batch; nothing sleeps to fill it. An operation
that raises is undone alone. When the file itself fails (disk full, I/O error, locked for too long) the whole transaction is
rolled back, every caller in it gets StoreError, and the next batch starts on a new connection, so the store works again as soon
as the cause is gone. An operation must not touch anything but its connection: it may not run at all if its caller was cancelled.
"""

from __future__ import annotations

import asyncio
import os
import queue
import shutil
import sqlite3
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from areal.base.errors import StoreError
from areal.store.sqlite.schema import check_current, migrate

T = TypeVar("T")
Operation = Callable[[sqlite3.Connection], T]

BATCH = 64  # operations per commit: enough to hide the fsync, short enough that other processes get the lock
READERS = 2
RETRY_S = 0.001  # between two looks at the write lock
WAL_BYTES = 64 * 2**20  # what the log file is cut back to after a checkpoint

# An operation's own fault: its savepoint is undone and the others go on. Every other sqlite3.Error is the file's.
_OWN_FAULT = (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InterfaceError, sqlite3.DataError)


class _Write(Generic[T]):
    """A queued operation. As a context manager it is the operation's savepoint and keeps its error for the caller."""

    def __init__(self, operation: Operation[T], loop: asyncio.AbstractEventLoop) -> None:
        self.operation = operation
        self.loop = loop
        self.future: asyncio.Future[T] = loop.create_future()
        self.result: T | None = None
        self.error: BaseException | None = None
        self._connection: sqlite3.Connection | None = None

    def run(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        connection.execute("SAVEPOINT operation")
        with self:
            self.result = self.operation(connection)

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        assert self._connection is not None
        if isinstance(error, sqlite3.Error) and not isinstance(error, _OWN_FAULT):
            return False  # the file's fault: the whole transaction fails
        if error is not None:
            self._connection.execute("ROLLBACK TO operation")
            self.error = error
        self._connection.execute("RELEASE operation")
        return True

    def resolve(self) -> None:
        """In the caller's loop: hand over the result or the error."""
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)  # type: ignore[arg-type]


class Database:
    """See the module. Safe to use from several event loops and threads of one process; not across fork."""

    def __init__(self, path: Path, *, busy_timeout_s: float = 10.0, read_only: bool = False) -> None:
        """Open or make the file (mode 0600) and bring its tables up to date; read_only: it must be there and up to date, and every
        write raises StoreError. Raises StoreError."""
        self.path = path
        self._busy_timeout_s = busy_timeout_s
        self._read_only = read_only
        if not read_only:
            self._create_file()
        try:
            self._writer_connection: sqlite3.Connection | None = self._connect()
        except sqlite3.Error as error:
            raise self._failure(error) from error
        self._queue: queue.SimpleQueue[_Write[Any] | None] = queue.SimpleQueue()
        self._gate = threading.Lock()  # closing and queueing exclude each other: nothing is queued behind the end mark
        self._closed = False
        self._ended = False
        self._thread = threading.Thread(target=self._write_until_closed, name=f"store {path.name}", daemon=True)
        self._thread.start()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="store reader")
        self._local = threading.local()
        self._reader_connections: list[sqlite3.Connection] = []

    # -- callers -----------------------------------------------------------------------------------

    async def write(self, operation: Operation[T]) -> T:
        """Run `operation` inside the next transaction; returns its result once that is on disk."""
        if self._read_only:
            raise StoreError(f"the store {self.path} was opened to be read; nothing writes to it from here")
        pending = _Write(operation, asyncio.get_running_loop())
        with self._gate:
            if self._closed:
                raise StoreError(f"the store {self.path} is closed; open it again")
            self._queue.put(pending)
        return await pending.future

    async def empty_log(self) -> None:
        """Move everything into the file and cut the log to nothing, so that what was deleted is in neither. Readers at work may
        keep it from happening now; it happens with a later call, or when the last process closes the store."""

        def empty() -> None:
            try:
                connection = self._connect()
                try:
                    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                finally:
                    connection.close()
            except sqlite3.Error as error:
                raise self._failure(error) from error

        await asyncio.get_running_loop().run_in_executor(self._readers, empty)

    async def read(self, operation: Operation[T]) -> T:
        """Run `operation` on a read-only connection, all its SELECTs on one snapshot."""
        if self._closed:
            raise StoreError(f"the store {self.path} is closed; open it again")
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read, operation)

    async def close(self) -> None:
        """Commit what is queued, then let go of the file. Closing twice does nothing."""
        with self._gate:
            if self._closed:
                return
            self._closed = True
            self._queue.put(None)
        await asyncio.get_running_loop().run_in_executor(None, self._finish)

    # -- the writer thread -------------------------------------------------------------------------

    def _write_until_closed(self) -> None:
        try:
            while not self._ended:
                first = self._queue.get()
                if first is None:
                    break
                self._answer(self._commit(first))
        finally:  # also when this thread dies of a bug: nobody waits for an answer that never comes
            with self._gate:
                self._closed = True
            self._answer(self._fail(self._drain(limit=None), StoreError(f"the store {self.path} was closed")))

    def _commit(self, first: _Write[Any]) -> list[_Write[Any]]:
        """One transaction with `first` and what queues up until the lock is ours. Returns the writes to answer."""
        batch = [first]
        try:
            connection = self._writer_connection = self._writer_connection or self._connect()
            self._take_lock(connection)
            batch += self._drain(limit=BATCH - 1)
            for write in batch:
                if not write.future.cancelled():
                    write.run(connection)
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._abandon_connection()
            # What waits behind would only wait for the same failure again.
            return self._fail(batch + self._drain(limit=None), self._failure(error))
        return batch

    def _take_lock(self, connection: sqlite3.Connection) -> None:
        """BEGIN IMMEDIATE, asking again every RETRY_S. SQLite's own waiting backs off to 100 ms between looks, so a process
        that lost a few times would starve beside busy ones (measured, 4 processes: p99 of a write 3 to 8 times as long)."""
        connection.execute("PRAGMA busy_timeout = 0")
        deadline = time.monotonic() + self._busy_timeout_s
        while True:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                if _primary_code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_S)
            else:
                return

    def _drain(self, limit: int | None) -> list[_Write[Any]]:
        taken: list[_Write[Any]] = []
        while limit is None or len(taken) < limit:
            try:
                write = self._queue.get_nowait()
            except queue.Empty:
                break
            if write is None:
                self._ended = True
                break
            taken.append(write)
        return taken

    @staticmethod
    def _fail(writes: list[_Write[Any]], error: StoreError) -> list[_Write[Any]]:
        for write in writes:
            write.error = error
        return writes

    @staticmethod
    def _answer(writes: list[_Write[Any]]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[_Write[Any]]] = {}
        for write in writes:
            by_loop.setdefault(write.loop, []).append(write)
        for loop, group in by_loop.items():
            if not loop.is_closed():  # else nobody is left to be told; what was committed stands
                loop.call_soon_threadsafe(_resolve_all, group)

    def _abandon_connection(self) -> None:
        """Close without a word: after an I/O error a connection's idea of the file is not to be trusted."""
        if self._writer_connection is not None:
            self._writer_connection.close()  # rolls back
            self._writer_connection = None

    # -- readers and the file ----------------------------------------------------------------------

    def _read(self, operation: Operation[T]) -> T:
        try:
            connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
            if connection is None:
                connection = self._local.connection = self._connect()
                connection.execute("PRAGMA query_only = ON")
                self._reader_connections.append(connection)
            connection.execute("BEGIN")
            try:
                return operation(connection)
            finally:
                if connection.in_transaction:
                    connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._failure(error) from error

    def _finish(self) -> None:
        self._thread.join()
        self._readers.shutdown(wait=True)
        for connection in self._reader_connections:
            connection.close()
        self._abandon_connection()

    def _create_file(self) -> None:
        """The file exists with mode 0600 before SQLite sees it; its -wal and -shm files get the same mode."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StoreError(
                f"cannot open the store {self.path}: {error.strerror}; the folder must exist and be writable "
                "(an absolute path has four slashes: sqlite:////folder/store.sqlite)"
            ) from error
        try:
            if stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o077:
                os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"{self.path.absolute().as_uri()}?mode={'ro' if self._read_only else 'rw'}",
            uri=True,
            timeout=self._busy_timeout_s,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            connection.row_factory = sqlite3.Row
            if self._read_only:
                check_current(connection, self.path)
                return connection
            migrate(connection, self.path)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA secure_delete = ON")  # what is deleted is overwritten, not only unlinked
            connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _failure(self, error: sqlite3.Error) -> StoreError:
        return StoreError(
            f"the store {self.path} cannot be used: {error}; {self._remedy(error)}. Nothing was half written"
        )

    def _remedy(self, error: sqlite3.Error) -> str:
        primary = _primary_code(error)
        if primary == sqlite3.SQLITE_BUSY:
            return (
                f"another process holds its lock for more than {self._busy_timeout_s:g} s: "
                "look for a stopped process of this run"
            )
        if primary == sqlite3.SQLITE_NOTADB:
            return "it is not a store; name another file"
        if primary == sqlite3.SQLITE_CORRUPT:
            return "it is damaged; restore a copy or start a new run folder"
        if primary in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN):
            return "check that it and its folder belong to this user and are writable"
        if primary in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            free = shutil.disk_usage(self.path.parent).free // 2**20
            return f"free space or quota on its disk ({free} MiB free now), or check the disk; it works again by itself"
        return "see the message for what to mend"


def _primary_code(error: sqlite3.Error) -> int:
    """SQLite's result code without what extended codes add above the low byte; 0 for an error of the Python layer."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _resolve_all(writes: list[_Write[Any]]) -> None:
    for write in writes:
        write.resolve()
