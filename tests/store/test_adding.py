"""Many interactions in one statement are what each by itself would be; and an answer never waits for another process's lock."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal.base.errors import Conflict, InvalidKey, NotFound
from areal.base.types import Completion, Interaction, Limits, Message, SessionRequest
from areal.store import open_store, store_url
from areal.store.base import Store
from areal.store.sql import adding
from areal.store.sql.database import Database, Many
from areal.store.sqlite import SqliteEngine


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with await open_store(store_url(tmp_path / "store.sqlite")) as store:
        await store.training.set_limits(Limits(max_concurrent=1000, max_lag=0, batch_groups=1000))
        for name in ("a", "b", "ended"):
            await store.sessions.begin(SessionRequest(name, f"key {name}", "w0"))
        yield store


def interaction(name: str, session: str = "a") -> Interaction:
    ids = np.arange(3, dtype=np.int32)
    done = Completion(ids, -np.ones(3, np.float32), ids, np.ones(3, np.float32), 1.0, "stop")
    return Interaction(name, session, 0, ids, done, (Message("user", name),), Message("assistant", "yes"))


async def together(store: Store, *additions: Interaction) -> list[Any]:
    """The outcome of each, all of them in one commit."""
    inside, go = threading.Event(), threading.Event()
    database: Database = store.sessions._database  # type: ignore[attr-defined]

    def holds(_: object) -> None:
        inside.set()
        assert go.wait(60)

    first = asyncio.ensure_future(database.write(holds))
    await asyncio.to_thread(inside.wait, 60)
    tasks = [asyncio.ensure_future(store.sessions.add(each)) for each in additions]
    await asyncio.sleep(0)
    go.set()
    await first
    return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("count", [1, 2, 3, 31, 32, 33, 63])
async def test_any_number_at_once_comes_back_as_it_was(store: Store, count: int) -> None:
    given = [interaction(f"i{n}", "ab"[n % 2]) for n in range(count)]
    assert await together(store, *given) == [None] * count
    kept = [*await store.sessions.interactions("a"), *await store.sessions.interactions("b")]
    assert {(each.id, each.session_id, each.messages) for each in kept} == {
        (each.id, each.session_id, each.messages) for each in given
    }
    for each in kept:
        assert each.completion.versions.tolist() == [0, 1, 2]


async def test_one_that_cannot_be_added_leaves_the_others_in(store: Store) -> None:
    await store.sessions.add(interaction("there"))
    await store.sessions.end("ended", "ended")
    outcomes = await together(
        store,
        interaction("first"),
        interaction("late", "ended"),
        interaction("nowhere", "unknown"),
        interaction("there"),
        interaction("there", "b"),
        interaction("twice"),
        interaction("twice"),
        interaction("last", "b"),
    )
    kinds = [None if outcome is None else type(outcome) for outcome in outcomes]
    assert kinds == [None, InvalidKey, NotFound, None, Conflict, None, None, None]
    assert {each.id for each in await store.sessions.interactions("a")} == {"there", "first", "twice"}
    assert {each.id for each in await store.sessions.interactions("b")} == {"last"}
    assert await store.sessions.interactions("ended") == ()


async def test_neighbours_are_few_statements(tmp_path: Path) -> None:
    database = Database(SqliteEngine(tmp_path / "d.sqlite"))
    seen: list[list[int]] = []

    def together(connection: sqlite3.Connection, items: list[int]) -> None:
        seen.append(list(items))
        connection.executemany("INSERT INTO settings VALUES (?, '')", [(f"k{item}",) for item in items])

    inside, go = threading.Event(), threading.Event()

    def holds(_: object) -> None:
        inside.set()
        assert go.wait(60)

    first = asyncio.ensure_future(database.write(holds))
    await asyncio.to_thread(inside.wait, 60)
    alone = pytest.fail  # nobody runs by itself where all go together
    writes = [database.write(lambda _: alone("by itself"), many=Many(together, n)) for n in range(5)]
    writes.insert(3, database.write(lambda c: c.execute("INSERT INTO settings VALUES ('x', '')").rowcount))
    pending = [asyncio.ensure_future(write) for write in writes]
    await asyncio.sleep(0)
    go.set()
    assert await asyncio.gather(first, *pending) == [None, None, None, None, 1, None, None]
    assert seen == [[0, 1, 2], [3, 4]]
    await database.close()


class Contended(SqliteEngine):
    """Another process takes the lock just before this one wants it."""

    other: sqlite3.Connection | None = None

    def begin_write(self, connection: Any, before_waiting: Callable[[], None] = lambda: None) -> None:
        if self.other is not None and not self.other.in_transaction:
            self.other.execute("BEGIN IMMEDIATE")
        super().begin_write(connection, before_waiting)


async def test_what_is_on_disk_is_answered_while_another_process_holds_the_lock(tmp_path: Path) -> None:
    engine = Contended(tmp_path / "d.sqlite", busy_timeout_s=60)
    database = Database(engine)
    inside, go = threading.Event(), threading.Event()

    def holds(_: object) -> str:
        inside.set()
        assert go.wait(60)
        return "first"

    first = asyncio.ensure_future(database.write(holds))
    await asyncio.to_thread(inside.wait, 60)
    second = asyncio.ensure_future(database.write(lambda _: "second"))
    await asyncio.sleep(0)  # now it is in the queue
    engine.other = sqlite3.connect(engine.path, isolation_level=None, check_same_thread=False)
    go.set()
    assert await asyncio.wait_for(first, 60) == "first"
    assert not second.done()
    other, engine.other = engine.other, None
    other.execute("ROLLBACK")
    assert await asyncio.wait_for(second, 60) == "second"
    other.close()
    await database.close()


async def test_a_session_is_not_written_again_while_it_was_just_active(store: Store) -> None:
    database: Database = store.sessions._database  # type: ignore[attr-defined]

    async def touched(now: float) -> float:
        def touch(connection: Any) -> float:
            seq = adding.running(connection, "a")["seq"]
            adding.touch(connection, [seq], now)
            return float(adding.running(connection, "a")["last_active_at"])

        return await database.write(touch)

    start = await touched(4e9)
    assert start == 4e9
    assert await touched(4e9 + adding.STILL_ACTIVE_S / 2) == 4e9
    later = 4e9 + 2 * adding.STILL_ACTIVE_S
    assert await touched(later) == later
    assert await touched(4e9) == later  # and never back
