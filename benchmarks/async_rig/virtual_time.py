"""An event loop whose clock jumps to the next thing that is due: asyncio programs run unchanged, in their order, at once.

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())            # asyncio.sleep(3600) takes no time; loop.time() is 3600 s later

Nothing may happen outside the loop: threads and sockets would be waited for forever, so a loop with nothing due raises. The store is
opened by `open_inline`: the product's own SQL, in the same transactions, on the loop's thread, so that every run is the same run.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from areal.store.base import Store
from areal.store.sql.database import Database, Many, Operation
from areal.store.sql.reading import SqlReading
from areal.store.sql.sessions import SqlSessions
from areal.store.sql.training import SqlTraining
from areal.store.sqlite import SqliteEngine

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """time() is virtual seconds since the loop was made."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self.now


class _Jump(selectors.SelectSelector):
    """Where the loop would wait, its clock moves on instead."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if not found and timeout is None:
            raise RuntimeError("nothing will ever happen: every task waits for another one")
        self._loop.now += timeout or 0.0
        return found


class InlineDatabase(Database):
    """Each operation at once, in a transaction of its own."""

    async def write(
        self,
        operation: Operation[T],
        *,
        patience_s: float | None = None,
        once: bool = False,
        many: Many | None = None,
    ) -> T:
        connection = self._writer_connection
        assert connection is not None
        connection.execute("BEGIN IMMEDIATE")
        try:
            result = operation(connection)
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
        return result

    async def read(self, operation: Operation[T], *, patience_s: float | None = None) -> T:
        connection = self._writer_connection
        assert connection is not None
        return operation(connection)


def open_inline(path: Path, clock: Callable[[], float]) -> tuple[Store, InlineDatabase]:
    """A store on that file, and what has to be closed when the loop is gone."""
    database = InlineDatabase(SqliteEngine(path))
    store: Any = SimpleNamespace(
        sessions=SqlSessions(database, clock),
        training=SqlTraining(database, clock),
        reading=SqlReading(database),
    )
    return store, database
