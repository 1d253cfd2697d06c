"""One database, opened by any number of processes: durable group commit for writers, snapshots for readers.

    database = Database(engine)
    value = await database.write(lambda connection: ...)    # committed with fsync when it returns
    await database.write(lambda connection: ..., many=Many(insert_all, row))   # neighbours of one kind run as one
    value = await database.read(lambda connection: ...)     # one consistent snapshot, off the event loop
    await database.close()                                  # commits what is queued first

A durable commit costs one fsync whatever it holds, so all writes of this process pass through one thread: it takes the write lock,
then everything that queued up meanwhile (at most BATCH operations, half of them where a commit is fast), commits once, and only then
answers. If one of them raises, all are run again, each in a savepoint of its own. Waiting for the lock and for the previous fsync is
what fills a batch; nothing sleeps to fill it. Operations of a kind that can be run together (Many) are. An operation that raises is undone alone. When the database itself fails (disk full, I/O
error, locked for too long, server gone) the whole transaction is rolled back, every caller in it gets StoreError, and the next batch
starts on a new connection, so the store works again as soon as the cause is gone; a caller with patience hears of it only when that has
run out. An operation must not touch anything but its connection: it may not run at all if its caller was cancelled. What databases do differently is behind Engine (engine.py).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from areal.base.errors import ArealError, InternalError, StoreAway, StoreError, StoreUnready
from areal.store.sql.engine import Connection, Engine
from areal.store.sql.owed import Owed
from areal.store.sql.readers import Readers
from areal.store.sql.schema import check_current, migrate

T = TypeVar("T")
Operation = Callable[[Connection], T]

BATCH = 64  # operations per commit: enough to hide the fsync, short enough that other processes get the lock
# A commit that is faster takes half as many: so little is gained by sharing it that one half of the callers had better be at work while
# the other half is at the disk (64 callers in one commit all wait for each other). Copying 64 rows to the log takes 2 ms of it.
FAST_COMMIT_S = 0.004
AGAIN_S = 0.5  # between two tries of what has patience
SAY_S = 30.0  # between two log lines about them
CLOSE_S = (
    60.0  # the longest wait for the last commit: other processes of the run are stopped only after the store is closed
)

_log = logging.getLogger("areal.store")


class OneByOne(Exception):
    """Raised by Many.together: one of its items has to be run by itself, so all of them are."""


@dataclass(frozen=True, slots=True)
class Many:
    """Of an operation without a result. together(connection, items) does for all neighbours in a commit what each does by itself, or raises;
    then what it did is undone, and each runs by itself."""

    together: Callable[[Connection, Sequence[Any]], None]
    item: Any


class _Write(Owed[T]):
    """A queued operation. As a context manager it is the operation's savepoint and keeps its error for the caller."""

    def __init__(
        self, operation: Operation[T], many: Many | None, engine: Engine, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(loop)
        self.operation = operation
        self.many = many
        self.engine = engine
        self._connection: Connection | None = None

    def run(self, connection: Connection) -> None:
        self._connection, self.error = connection, None
        connection.execute("SAVEPOINT operation")
        with self:
            self.result = self.operation(connection)

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        assert self._connection is not None
        if isinstance(error, self.engine.errors) and not self.engine.own_fault(error):
            return False  # the database's fault: the whole transaction fails
        if error is not None:
            self._connection.execute("ROLLBACK TO operation")
            self.error = error
        self._connection.execute("RELEASE operation")
        return True


class _Attempt:
    """Holds what an operation raises, so that the batch can be run again; lets through what is the database's fault."""

    def __init__(self, engine: Engine) -> None:
        self.failed = False
        self._engine = engine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        self.failed = error is not None
        return not isinstance(error, self._engine.errors) or self._engine.own_fault(error)


class Database:
    """See the module. Safe to use from several event loops and threads of one process; not across fork."""

    def __init__(self, engine: Engine, *, patience_s: float = 0.0) -> None:
        """Open the database, or make it, and bring its tables up to date; a read-only one must be there and up to date, and every
        write raises StoreError. patience_s: how long reads and writes wait for a server that has gone away since (not this
        call). Raises StoreError."""
        self.engine = engine
        self._patience_s = patience_s
        try:
            self._writer_connection: Connection | None = self._connect()
        except engine.errors as error:
            raise engine.refused(error) from error
        self._queue: queue.SimpleQueue[_Write[Any] | None] = queue.SimpleQueue()
        self._gate = threading.Lock()  # closing and queueing exclude each other: nothing is queued behind the end mark
        self._closed = False
        self._ended = False
        self._broken: InternalError | None = None  # what ended the writer thread before it was closed
        self._batch: list[_Write[Any]] = []  # what the writer thread has at work
        self._committed: list[_Write[Any]] = []  # what it has still to answer
        self._limit = BATCH
        self._said_at = -SAY_S
        self._thread = threading.Thread(target=self._write_until_closed, name="store writer", daemon=True)
        self._thread.start()
        self._readers = Readers(engine, self._connect)

    # -- callers -----------------------------------------------------------------------------------

    async def write(
        self, operation: Operation[T], *, patience_s: float | None = None, once: bool = False, many: Many | None = None
    ) -> T:
        """Run `operation` inside the next transaction; returns its result once that is on disk. While the server is away, it is tried
        again for as long as this database has patience; with a patience_s of its own for so many seconds, and whatever the
        database cannot write for. StoreUnready is raised only then. An operation must bear being run again after a
        commit whose answer was lost; one that does not says `once`, and gets the error. many: how it runs together with
        others like it; its result is None then."""
        own = self._patience_s if patience_s is None else patience_s
        return await self._patiently(
            lambda: self._queued(operation, many), own, whatever=patience_s is not None, once=once
        )

    async def _patiently(
        self, call: Callable[[], Awaitable[T]], patience_s: float, *, whatever: bool = False, once: bool = False
    ) -> T:
        """Call again while the server is away, or whatever else passes by itself, for patience_s seconds."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return await call()
            except StoreUnready as error:
                passes = whatever or isinstance(error, StoreAway)
                done = once and isinstance(error, StoreAway) and error.uncertain
                if time.monotonic() >= deadline or done or not passes:
                    raise
                self._say(error)
                await asyncio.sleep(AGAIN_S)

    async def _queued(self, operation: Operation[T], many: Many | None) -> T:
        if self.engine.read_only:
            raise StoreError(f"the store {self.engine.name} was opened to be read; nothing writes to it from here")
        pending = _Write(operation, many, self.engine, asyncio.get_running_loop())
        with self._gate:
            if self._closed:
                raise self._not_open()
            self._queue.put(pending)
        return await pending.future

    async def scrub(self) -> None:
        """Overwrite what was deleted, as far as this database can (Engine.scrub)."""

        def scrub() -> None:
            try:
                self.engine.scrub()
            except self.engine.errors as error:
                raise self.engine.refused(error) from error

        await self._readers.call(scrub)

    async def read(self, operation: Operation[T], *, patience_s: float | None = None) -> T:
        """Run `operation` on a read-only connection, all its SELECTs on one snapshot. While the server is away, it is tried again for
        patience_s seconds, where nothing is said for as long as this database has patience. Raises StoreError."""
        return await self._patiently(
            lambda: self._looked(operation), self._patience_s if patience_s is None else patience_s
        )

    async def _looked(self, operation: Operation[T]) -> T:
        if self._closed:
            raise self._not_open()
        return await self._readers.look(operation)

    async def close(self) -> None:
        """Commit what is queued, then let go of the file. A disk that hangs holds nobody for more than CLOSE_S. Closing twice does
        nothing, or waits once more."""
        with self._gate:
            if not self._closed:
                self._queue.put(None)
            self._closed = True
        await asyncio.get_running_loop().run_in_executor(None, self._finish)

    def _not_open(self) -> ArealError:
        return self._broken or StoreError(f"the store {self.engine.name} is closed; open it again")

    def _say(self, error: StoreUnready) -> None:
        """To the log, at most every SAY_S seconds: callers wait for what it names."""
        if time.monotonic() - self._said_at >= SAY_S:
            self._said_at = time.monotonic()
            _log.warning("this process waits for its store: %s", error)

    # -- the writer thread -------------------------------------------------------------------------

    def _write_until_closed(self) -> None:
        try:
            while not self._ended:
                first = self._next()
                if first is None:
                    break
                self._batch = [first]
                self._commit(self._batch)
                self._batch = []
        except BaseException as bug:
            self._broken = InternalError(
                f"the store {self.engine.name} is written by this process no more: its writer failed ({type(bug).__name__}: {bug}), see "
                "this process's log; what was answered is on disk, start the run again"
            )
            raise
        finally:  # nobody waits for an answer that never comes
            with self._gate:
                self._closed = True
            self._tell()
            self._answer(self._fail(self._batch + self._drain(limit=None), self._not_open()))

    def _next(self) -> _Write[Any] | None:
        """The next operation. Whoever has to be answered is, before this thread goes to sleep."""
        if self._committed:
            try:
                return self._queue.get_nowait()
            except queue.Empty:
                self._tell()
        return self._queue.get()

    def _tell(self) -> None:
        """Answer what is on disk. Not right after its COMMIT: the callers would be at work while the next statements want the interpreter,
        one of the two at a time; beside the next COMMIT, which does without it, both go on."""
        told, self._committed = self._committed, []
        self._answer(told)

    def _commit(self, batch: list[_Write[Any]]) -> None:
        """One transaction with `batch` and what queues up until the lock is ours."""
        committing = False
        try:
            try:
                connection = self._run(batch)
            except self.engine.errors:
                if self._writer_connection is None or not self.engine.lost(self._writer_connection):
                    raise
                # A connection that idled may be gone, with all that this transaction did: once more on a new one.
                self._abandon_connection()
                connection = self._run(batch)
            self._tell()
            start, committing = time.perf_counter(), True
            connection.execute("COMMIT")
            self._limit = BATCH // 2 if time.perf_counter() - start < FAST_COMMIT_S else BATCH
        except (StoreError, self.engine.errors) as error:
            self._abandon_connection()
            refused = (
                error if isinstance(error, StoreError) else self.engine.refused(error)
            )  # connecting says it itself
            self._tell()
            uncertain = committing and isinstance(refused, StoreAway)
            self._fail(
                batch,
                StoreAway(f"{refused}; what was being committed may be kept", uncertain=True) if uncertain else refused,
            )
            # What waits behind would only wait for the same failure again.
            self._answer(batch + self._fail(self._drain(limit=None), refused))
        else:
            self._committed = batch

    def _run(self, batch: list[_Write[Any]]) -> Connection:
        """Run `batch` in a new transaction, with what has queued up behind it once the lock is ours."""
        connection = self._writer_connection = self._writer_connection or self._connect()
        self.engine.begin_write(connection, before_waiting=self._tell)
        batch += self._drain(limit=self._limit - len(batch))
        wanted = [write for write in batch if not write.future.cancelled()]
        with _Attempt(self.engine) as attempt:  # nearly always nobody raises, and savepoints are a third of the work
            for together, alike in itertools.groupby(wanted, lambda write: write.many and write.many.together):
                _run_alike(connection, together, list(alike))
        if attempt.failed:
            connection.execute("ROLLBACK")
            self.engine.begin_write(connection, before_waiting=self._tell)
            for write in wanted:
                write.run(connection)
        return connection

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
    def _fail(writes: list[_Write[Any]], error: ArealError) -> list[_Write[Any]]:
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

    def _finish(self) -> None:
        deadline = time.monotonic() + CLOSE_S
        self._thread.join(CLOSE_S)
        if self._thread.is_alive() or not self._readers.close(max(0.0, deadline - time.monotonic())):
            _log.error(
                "the store %s has not answered for %g s: this process ends without it. What it had not answered may not be kept; look at "
                "its disk or server",
                self.engine.name,
                CLOSE_S,
            )
            return
        self._abandon_connection()

    def _connect(self) -> Connection:
        connection = self.engine.connect()
        try:
            if self.engine.read_only:
                check_current(connection, self.engine)
            else:
                migrate(connection, self.engine)
        except BaseException:
            connection.close()
            raise
        return connection


def _run_alike(
    connection: Connection, together: Callable[[Connection, Sequence[Any]], None] | None, writes: list[_Write[Any]]
) -> None:
    for write in writes:
        write.error = None
    if together is not None:
        together(connection, [write.many.item for write in writes if write.many])
        return
    for write in writes:
        write.result = write.operation(connection)


def _resolve_all(writes: list[_Write[Any]]) -> None:
    for write in writes:
        write.resolve()
