"""The file itself: modes, foreign and newer files, locks, a full disk, group commit."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from areal.base.errors import NotFound, StoreError
from areal.base.types import Limits, SessionRequest, WorkerInfo
from areal.store import open_store, store_url
from areal.store.sql.database import Database
from areal.store.sql.schema import VERSION
from areal.store.sqlite import APPLICATION_ID, PAGE_BYTES, SqliteEngine


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    database = Database(SqliteEngine(tmp_path / "d.sqlite", busy_timeout_s=0.2))
    yield database
    await database.close()


def put(name: str, value: str = "") -> object:
    return lambda c: c.execute("INSERT INTO settings VALUES (?, ?)", (name, value)).rowcount


def names(connection: sqlite3.Connection) -> set[str]:
    return {row[0] for row in connection.execute("SELECT name FROM settings")}


async def test_the_files_are_for_their_owner_alone(database: Database) -> None:
    await database.write(put("a"))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in database.engine.path.parent.iterdir()}
    assert modes == {"d.sqlite": 0o600, "d.sqlite-wal": 0o600, "d.sqlite-shm": 0o600}


async def test_a_file_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "d.sqlite"
    path.touch(0o644)
    await Database(SqliteEngine(path)).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_every_commit_is_synced(database: Database) -> None:
    async def pragma(name: str) -> object:
        return await database.write(lambda c: c.execute(f"PRAGMA {name}").fetchone()[0])

    assert (await pragma("journal_mode"), await pragma("synchronous"), await pragma("foreign_keys")) == ("wal", 2, 1)


async def test_one_failing_operation_does_not_spoil_the_others(database: Database) -> None:
    def fails(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO settings VALUES ('half', '')")
        raise NotFound("no such thing")

    def bug(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO settings VALUES ('half', '')")
        raise ZeroDivisionError

    writes = [put("a"), fails, put("b"), put("a"), bug, put("c")]
    results = await asyncio.gather(*(database.write(write) for write in writes), return_exceptions=True)
    assert [type(result).__name__ for result in results] == [
        "int",
        "NotFound",
        "int",
        "IntegrityError",
        "ZeroDivisionError",
        "int",
    ]
    assert await database.read(names) == {"a", "b", "c"}


async def test_many_writes_share_a_commit(database: Database) -> None:
    """While one transaction is at the disk the next ones queue up; they go together."""
    inside, go = threading.Event(), threading.Event()

    def slow(_: sqlite3.Connection) -> None:
        inside.set()
        go.wait(60)

    first = asyncio.ensure_future(database.write(slow))
    await asyncio.to_thread(inside.wait, 10)
    before = commits(database.engine.path)
    others = [asyncio.ensure_future(database.write(put(f"k{n}"))) for n in range(40)]
    await asyncio.sleep(0)
    assert await database.read(names) == set()  # a reader waits for nobody: it sees the last commit
    go.set()
    await asyncio.gather(first, *others)
    assert await database.read(names) == {f"k{n}" for n in range(40)}
    assert commits(database.engine.path) < before + 5, "40 inserts share commits"


def commits(path: Path) -> int:
    """Transactions in the log: the frames whose header says how long the file is afterwards (SQLite's WAL format)."""
    wal, frame = path.with_name(path.name + "-wal").read_bytes()[32:], 24 + PAGE_BYTES
    return sum(wal[start + 4 : start + 8] != b"\0\0\0\0" for start in range(0, len(wal), frame))


async def test_closing_commits_what_is_queued(tmp_path: Path) -> None:
    database = Database(SqliteEngine(tmp_path / "d.sqlite"))
    writes = [asyncio.ensure_future(database.write(put(f"k{n}"))) for n in range(200)]
    await asyncio.sleep(0)
    await database.close()
    await database.close()
    assert await asyncio.gather(*writes) == [1] * 200
    for call in (database.write, database.read):
        with pytest.raises(StoreError, match="is closed"):
            await call(names)
    again = Database(SqliteEngine(tmp_path / "d.sqlite"))
    assert len(await again.read(names)) == 200
    await again.close()


async def test_a_disk_that_hangs_does_not_hold_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("areal.store.sql.database.CLOSE_S", 0.1)
    database = Database(SqliteEngine(tmp_path / "d.sqlite"))
    inside, go = threading.Event(), threading.Event()

    def hangs(_: sqlite3.Connection) -> None:
        inside.set()
        go.wait(60)

    write = asyncio.ensure_future(database.write(hangs))
    await asyncio.to_thread(inside.wait, 60)
    await asyncio.wait_for(database.close(), 60)
    assert "d.sqlite has not answered for 0.1 s: this process ends without it" in caplog.text
    assert not write.done(), "nobody was told that it is kept"
    go.set()
    await write
    monkeypatch.undo()
    await database.close()


def test_a_read_that_never_returns_does_not_hold_the_end_of_the_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("worker.py")), "--hang", str(tmp_path / "d.sqlite")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
    assert "d.sqlite has not answered for 0.1 s: this process ends without it" in done.stderr


async def test_readers_cannot_write_and_see_one_snapshot(database: Database) -> None:
    for _ in range(5):  # whichever reader, and however often it has read
        with pytest.raises(StoreError, match="readonly"):
            await database.read(put("a"))
        assert await database.read(names) == set()


async def test_a_lock_held_too_long_is_named_and_passes(database: Database) -> None:
    other = sqlite3.connect(database.engine.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    results = await asyncio.gather(database.write(put("a")), database.write(put("b")), return_exceptions=True)
    assert all(isinstance(result, StoreError) and result.status == 503 for result in results)
    assert "d.sqlite" in str(results[0])
    assert "another process holds its lock" in str(results[0])
    assert await database.read(names) == set()  # reads go on meanwhile
    other.execute("ROLLBACK")
    other.close()
    await database.write(put("c"))
    assert await database.read(names) == {"c"}


async def test_a_store_that_cannot_be_opened_again_says_so_and_passes(tmp_path: Path) -> None:
    """A connection that failed is given up; whoever writes next must hear why there is no new one, and not wait for ever."""
    folder, away = tmp_path / "run", tmp_path / "away"
    folder.mkdir()
    database = Database(SqliteEngine(folder / "d.sqlite", busy_timeout_s=0.2))
    other = sqlite3.connect(folder / "d.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="holds its lock"):
        await database.write(put("a"))
    other.close()
    folder.rename(away)
    with pytest.raises(StoreError, match="the folder must exist"):
        await asyncio.wait_for(database.write(put("b")), 60)
    away.rename(folder)
    await database.write(put("c"))
    assert await database.read(names) == {"c"}
    await database.close()


def test_a_full_disk_loses_nothing_and_passes(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("worker.py")), "--full", str(path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "refused 503" in done.stdout
    assert str(path) in done.stdout
    assert "free space or quota" in done.stdout


async def test_a_newer_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "d.sqlite"
    await Database(SqliteEngine(path)).close()
    with sqlite3.connect(path) as file:
        file.execute(f"PRAGMA user_version = {VERSION + 1}")
    file.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match=rf"schema version {VERSION + 1}.*upgrade areal"):
        await open_store(store_url(path))
    assert path.read_bytes() == before


async def test_a_database_of_another_program_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "cookies.sqlite"
    with sqlite3.connect(path) as file:
        file.execute("CREATE TABLE cookies (x)")
    file.close()
    with pytest.raises(StoreError, match="another program"):
        await open_store(store_url(path))
    with sqlite3.connect(path) as file:
        assert file.execute("SELECT name FROM sqlite_schema").fetchall() == [("cookies",)]
    file.close()


async def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database, only a text that is long enough to be read as a header " * 20)
    with pytest.raises(StoreError, match="not a store; name another file"):
        await open_store(store_url(path))


async def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="the folder must exist"):
        await open_store(store_url(tmp_path / "nowhere" / "d.sqlite"))


async def test_processes_that_open_a_new_file_at_once_agree(tmp_path: Path) -> None:
    path = tmp_path / "d.sqlite"
    opened = await asyncio.gather(*(asyncio.to_thread(Database, SqliteEngine(path)) for _ in range(8)))
    await asyncio.gather(*(one.write(put(f"k{n}")) for n, one in enumerate(opened)))
    assert len(await opened[0].read(names)) == 8
    await asyncio.gather(*(one.close() for one in opened))
    with sqlite3.connect(path) as file:
        assert file.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    file.close()


async def test_a_second_host_is_refused(tmp_path: Path) -> None:
    async with await open_store(store_url(tmp_path / "d.sqlite")) as store:
        await store.registry.heartbeat(WorkerInfo("w0", "http://a", 1, "host-a", 0.0))
        with pytest.raises(StoreError, match=r"host-b.*host-a.*serves one host"):
            await store.registry.heartbeat(WorkerInfo("w1", "http://b", 1, "host-b", 0.0))


async def test_the_keys_of_sessions_are_never_stored(tmp_path: Path) -> None:
    """Only what the caller hands over as key_hash is on disk; there is no column for a key."""
    async with await open_store(store_url(tmp_path / "d.sqlite")) as store:
        await store.training.set_limits(Limits(max_concurrent=1, max_lag=0, batch_groups=1))
        await store.sessions.begin(SessionRequest("t", "hash-of-a-key", "w0"))
    with sqlite3.connect(tmp_path / "d.sqlite") as file:
        columns = {row[1] for row in file.execute("PRAGMA table_info(sessions)")}
    file.close()
    assert {name for name in columns if "key" in name} == {"key_hash"}
