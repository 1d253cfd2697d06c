"""The seam between the store and a database: what its SQL may use, and the few things that databases do differently.

    engine = SqliteEngine(path)                  # store/sqlite.py; PostgresEngine(url) in store/postgres.py
    connection = engine.connect()                # tables up to date (schema.py)
    engine.begin_write(connection)               # from here to COMMIT nobody else writes
    connection.execute("SELECT ...", (value,))   # `?` or `:name`, whatever the driver's own way is

Every statement of this folder is written once, in the SQL that both understand (RETURNING, ON CONFLICT, FILTER and partial indices are in
it; JSON functions and two-argument max() are not). One writer at a time is what its reasoning rests on, so both engines promise just
that. A new database is one more file with an Engine, and a line in store/__init__.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from areal.base.errors import StoreError

Values = Sequence[Any] | Mapping[str, Any]


class Row(Protocol):
    """Columns by name and by place."""

    def __getitem__(self, key: Any, /) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...


class Cursor(Protocol):
    """What a statement gave."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    """One open connection, without transactions of its own: BEGIN and COMMIT are statements."""

    def execute(self, sql: str, values: Values = ..., /) -> Cursor: ...

    def executemany(self, sql: str, rows: Iterable[Any], /) -> Cursor: ...

    def close(self) -> None: ...


class Engine(Protocol):
    """One database that every process of a run opens."""

    name: str
    """For people: a file or an address, without secrets."""
    errors: type[Exception]
    """What its driver raises."""
    read_only: bool
    """Opened beside a run or after it, to change nothing: connect() makes nothing, begin_write is never called."""
    one_host: bool
    """Whether only processes of one host may open it."""

    def connect(self) -> Connection:
        """A new connection. Raises StoreError for a database that cannot be a store, else the driver's errors."""
        ...

    def begin_write(self, connection: Connection, before_waiting: Callable[[], None] = lambda: None) -> None:
        """Open the transaction that alone may write; waits for others. before_waiting: called where that may take a while. Raises the
        driver's error if it takes too long."""
        ...

    def begin_read(self, connection: Connection) -> None:
        """Open a transaction that sees one state of the database and cannot change it."""
        ...

    def end_read(self, connection: Connection) -> None:
        """Close what begin_read opened, whatever came between. Raises nothing for a connection that is lost."""
        ...

    def lost(self, connection: Connection) -> bool:
        """Whether the database has hung up, so that only a new connection is of use."""
        ...

    def layout(self, connection: Connection) -> int:
        """How many migrations this database has seen, 0 for a new one. Raises StoreError for another program's."""
        ...

    def migrate(self, connection: Connection, statements: Sequence[str], layout: int) -> None:
        """Inside a write transaction: apply statements of schema.py, and keep the number they lead to."""
        ...

    def own_fault(self, error: Exception) -> bool:
        """Whether an error of the driver is the statement's own, so that the transaction may go on without it."""
        ...

    def refused(self, error: Exception) -> StoreError:
        """The sentence for an error of the driver: what, and the remedy."""
        ...

    def check_room(self) -> None:
        """Raises StoreUnready where so little room is left that no session should begin."""
        ...

    def used_bytes(self, connection: Connection) -> int:
        """What the records take on the disk, deleted ones not counted."""
        ...

    def scrub(self) -> None:
        """After a deletion: its room goes back to the disk, and nobody can read it any more where the database keeps its rows. Best
        effort, may block."""
        ...
