"""The embedded store: one SQLite file (WAL, synchronous=FULL) that every process of a host opens.

    store = SqlStore(SqliteEngine(path), clock)

The file belongs to its user alone (mode 0600, as do its -wal and -shm). Its write lock and shared memory do not travel over a
network: one file serves one host. Several hosts: postgres.py.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sqlite3
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

from areal.base.errors import StoreError, StoreUnready
from areal.store.sql.engine import Connection

APPLICATION_ID = 0x41524C53  # "ARLS": marks the file as a store of areal
RETRY_S = 0.001  # between two looks at the write lock
INCREMENTAL = 2  # what PRAGMA auto_vacuum answers for it
PAGE_BYTES = 8192  # of a new file; a recording takes half as many pages as with 4096, and a seventh less time
COMPACTED_PAGES = 1000  # 8 MB, in one transaction
RESERVE_BYTES = 64 * 2**20
WAL_BYTES = 64 * 2**20  # what the log file is cut back to after a checkpoint


class _Connection(sqlite3.Connection):
    """Remembers what was asked of it for good: `query_only` makes SQLite compile every statement anew each time it is set."""

    reads_only = False
    never_waits = False


class SqliteEngine:
    """Engine. Connecting makes the file. Raises StoreError where it cannot be made."""

    errors: type[Exception] = sqlite3.Error
    one_host = True

    def __init__(
        self, path: Path, *, busy_timeout_s: float = 10.0, read_only: bool = False, reserve_bytes: int = RESERVE_BYTES
    ) -> None:
        """reserve_bytes: what new sessions leave free on the disk, so that those that run can be recorded to their end."""
        self.path, self.name, self.read_only = path, str(path), read_only
        self._busy_timeout_s = busy_timeout_s
        self._reserve_bytes = reserve_bytes

    def connect(self) -> Connection:
        if not self.read_only:
            self._create_file()
        connection = sqlite3.connect(
            f"{self.path.absolute().as_uri()}?mode={'ro' if self.read_only else 'rw'}",
            uri=True,
            timeout=self._busy_timeout_s,
            isolation_level=None,
            check_same_thread=False,
            factory=_Connection,
        )
        try:
            connection.row_factory = sqlite3.Row
            self.layout(connection)  # another program's file is left as it is
            if self.read_only:
                return connection
            if not connection.execute("PRAGMA page_count").fetchone()[0]:
                # Of a new file. Asking for it anywhere else is a write, which waits for the lock; an old file reuses its room without shrinking.
                connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
                connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            self._once_free(connection, "PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA secure_delete = ON")  # what is deleted is overwritten, not only unlinked
            connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        except BaseException:
            connection.close()
            raise
        return connection

    def begin_write(self, connection: Connection, before_waiting: Callable[[], None] = lambda: None) -> None:
        """BEGIN IMMEDIATE, asking again every RETRY_S. SQLite's own waiting backs off to 100 ms between looks, so a process
        that lost a few times would starve beside busy ones (measured, 4 processes: p99 of a write 3 to 8 times as long)."""
        own = cast(_Connection, connection)
        if not own.never_waits:
            own.execute("PRAGMA busy_timeout = 0")
            own.never_waits = True
        self._once_free(connection, "BEGIN IMMEDIATE", before_waiting)

    def _once_free(
        self, connection: Connection, statement: str, before_waiting: Callable[[], None] = lambda: None
    ) -> None:
        """SQLite does not wait at all where it sees a deadlock coming, as when two make a new file a WAL one; asking again is what helps."""
        deadline = time.monotonic() + self._busy_timeout_s
        while True:
            try:
                connection.execute(statement)
            except sqlite3.OperationalError as error:
                if _primary_code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                before_waiting()
                time.sleep(RETRY_S)
            else:
                return

    def begin_read(self, connection: Connection) -> None:
        own = cast(_Connection, connection)
        if not own.reads_only:
            own.execute("PRAGMA query_only = ON")
            own.reads_only = True
        own.execute("BEGIN")

    def end_read(self, connection: Connection) -> None:
        if cast(sqlite3.Connection, connection).in_transaction:
            connection.execute("ROLLBACK")

    def lost(self, connection: Connection) -> bool:
        return False  # it is a file: there is nobody who could hang up

    def layout(self, connection: Connection) -> int:
        layout = int(connection.execute("PRAGMA user_version").fetchone()[0])
        application = int(connection.execute("PRAGMA application_id").fetchone()[0])
        tables = int(connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0])
        if application != APPLICATION_ID and (tables or layout or application):
            raise StoreError(f"{self.path} is a database of another program; name another file for the store")
        return layout

    def migrate(self, connection: Connection, statements: Sequence[str], layout: int) -> None:
        for statement in statements:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {layout}")

    def own_fault(self, error: Exception) -> bool:
        return isinstance(
            error, (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InterfaceError, sqlite3.DataError)
        )

    def refused(self, error: Exception) -> StoreError:
        passing = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
        kind = StoreUnready if _primary_code(error) in passing else StoreError
        return kind(f"the store {self.path} cannot be used: {error}; {self._remedy(error)}. Nothing was half written")

    def check_room(self) -> None:
        free = shutil.disk_usage(self.path.parent).free
        if free < self._reserve_bytes:
            raise StoreUnready(
                f"the disk of the store {self.path} is nearly full ({free // 2**20} MiB free): no session starts below "
                f"{self._reserve_bytes // 2**20} MiB, so that those that run can be recorded; free space, and it works again by itself"
            )

    def used_bytes(self, connection: Connection) -> int:
        pages, free, size = (
            int(connection.execute(f"PRAGMA {name}").fetchone()[0])
            for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size

    def scrub(self) -> None:
        """Take freed pages off the file's end, a short transaction for some of them; then move everything into the file and cut the
        log to nothing, so that what was deleted is in neither. Readers at work may keep it from happening now; it happens with a
        later call, or when the last process closes the store."""
        connection = self.connect()
        try:
            shrinks = connection.execute("PRAGMA auto_vacuum").fetchone()[0] == INCREMENTAL
            while shrinks and connection.execute("PRAGMA freelist_count").fetchone()[0]:
                connection.execute(f"PRAGMA incremental_vacuum({COMPACTED_PAGES})").fetchall()
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            connection.close()

    def _create_file(self) -> None:
        """The file exists with mode 0600 before SQLite sees it; its -wal and -shm files get the same mode.

        Once it is there it is never opened but by SQLite: closing any descriptor of a file gives up all POSIX locks that the process
        holds on it, also those of its open connections. Another process that closed the store would then take itself for the
        last one and delete the log that this one still writes to, and what was answered from there on would be lost."""
        try:
            if not self.path.exists():
                self._make_file()
            if stat.S_IMODE(self.path.stat().st_mode) & 0o077:
                self.path.chmod(0o600)
        except OSError as error:
            raise StoreError(
                f"cannot open the store {self.path}: {error.strerror}; the folder must exist and be writable "
                "(an absolute path has four slashes: sqlite:////folder/store.sqlite)"
            ) from error

    def _make_file(self) -> None:
        """Made under another name and then linked: whoever comes first, the file is closed before anybody can lock it."""
        aside = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}")
        os.close(os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            with suppress(FileExistsError):
                os.link(aside, self.path)
        finally:
            aside.unlink()

    def _remedy(self, error: Exception) -> str:
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


def _primary_code(error: Exception) -> int:
    """SQLite's result code without what extended codes add above the low byte; 0 for an error of the Python layer."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF
