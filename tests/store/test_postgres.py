"""What only a server can do to a store: stop, hang up, sync nothing, hold other people's tables. The rest is tests/contracts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import psycopg
import pytest

from areal.base.errors import StoreAway, StoreError
from areal.base.types import Limits, SessionRequest, WorkerInfo
from areal.store import open_store
from areal.store.postgres import PostgresEngine
from areal.store.sql.database import Database
from areal.store.sql.engine import Connection
from areal.store.sql.groups import LAST_ATTEMPT
from areal.store.sql.schema import VERSION
from tests.proxy.service import until
from tests.store.postgres import PostgresServer
from tests.store.worker import interaction


def put(name: str) -> object:
    return lambda c: c.execute("INSERT INTO settings VALUES (?, ?)", (name, "")).rowcount


def names(connection: Connection) -> set[str]:
    return {row["name"] for row in connection.execute("SELECT name FROM settings")}


def direct(server: PostgresServer) -> psycopg.Connection[tuple[object, ...]]:
    return psycopg.connect(f"host={server.folder} dbname=postgres user={server.user}", autocommit=True)


@pytest.fixture
async def database(postgres: PostgresServer, request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    schema = request.node.name[:60].lower()
    database = Database(PostgresEngine(postgres.url(schema), busy_timeout_s=0.3))
    yield database
    await database.close()


async def test_a_server_that_stops_is_named_and_the_store_goes_on_when_it_is_back(
    database: Database, postgres: PostgresServer
) -> None:
    await database.write(put("before"))
    await database.read(names)
    postgres.stop()
    try:
        for call in (database.write(put("never")), database.read(names)):
            with pytest.raises(StoreError, match=r"check that the server runs.*works again by itself") as refusal:
                await call
            assert refusal.value.status == 503
    finally:
        postgres.start()
    await database.write(put("after"))
    assert await database.read(names) == {"before", "after"}


async def test_connections_that_the_server_closed_while_they_idled_are_opened_again(
    database: Database, postgres: PostgresServer
) -> None:
    await database.write(put("a"))
    await database.read(names)
    with direct(postgres) as other:
        other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'areal'")
    assert await asyncio.gather(*(database.write(put(f"b{n}")) for n in range(10))) == [1] * 10  # nobody notices
    assert await database.read(names) == {"a"} | {f"b{n}" for n in range(10)}


async def test_reads_and_writes_wait_for_a_server_that_restarts(
    postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    database = Database(PostgresEngine(postgres.url("restarted")), patience_s=120)
    await database.write(put("before"))
    await database.read(names)
    postgres.stop()
    try:
        writes = [asyncio.ensure_future(database.write(put(f"during{n}"))) for n in range(20)]
        reads = [asyncio.ensure_future(database.read(names)) for _ in range(20)]
        with pytest.raises(StoreAway, match="check that the server runs"):
            await database.read(names, patience_s=0)
        await until(lambda: "this process waits for its store" in caplog.text)
        assert not any(call.done() for call in (*writes, *reads))
    finally:
        postgres.start()
    assert await asyncio.gather(*writes) == [1] * 20
    assert all("before" in found for found in await asyncio.gather(*reads))
    assert await database.read(names) == {"before"} | {f"during{n}" for n in range(20)}
    assert "check that the server runs and can be reached" in caplog.text
    await database.close()


async def test_a_standby_is_waited_for_until_it_is_the_primary(
    postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    database = Database(PostgresEngine(postgres.url("standby")), patience_s=120)
    await database.write(put("before"))
    with direct(postgres) as other:
        try:
            other.execute("ALTER DATABASE postgres SET default_transaction_read_only = on")
            other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'areal'")
            write = asyncio.ensure_future(database.write(put("during")))
            await until(lambda: "this server is a standby" in caplog.text)
            assert not write.done()
        finally:
            other.execute("SET default_transaction_read_only = off")
            other.execute("ALTER DATABASE postgres RESET default_transaction_read_only")
    await write
    assert await database.read(names) == {"before", "during"}
    await database.close()


@pytest.mark.parametrize("once", [True, False])
async def test_what_a_lost_commit_may_have_kept_is_run_again_only_where_it_bears_that(
    postgres: PostgresServer, once: bool
) -> None:
    database = Database(PostgresEngine(postgres.url(f"lost_{once}".lower())), patience_s=120)
    runs = []

    def hung_up_on_at_its_commit(connection: Connection) -> None:
        if not runs:
            end = "BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END"
            connection.execute(f"CREATE FUNCTION hang_up() RETURNS trigger LANGUAGE plpgsql AS '{end}'")
            connection.execute(
                "CREATE CONSTRAINT TRIGGER t AFTER INSERT ON settings DEFERRABLE INITIALLY DEFERRED "
                "FOR EACH ROW EXECUTE FUNCTION hang_up()"
            )
        runs.append(connection)
        connection.execute("INSERT INTO settings VALUES ('a', '')")

    write = database.write(hung_up_on_at_its_commit, once=once)
    if once:
        with pytest.raises(StoreAway, match="what was being committed may be kept") as refusal:
            await write
        assert refusal.value.uncertain
    else:
        await write
    assert (len(runs), await database.read(names)) == ((1, set()) if once else (2, {"a"}))
    await database.close()


async def test_one_failing_operation_does_not_spoil_the_others(database: Database) -> None:
    writes = [database.write(put(name)) for name in ("a", "b", "a", "c")]
    results = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(result).__name__ for result in results] == ["int", "int", "UniqueViolation", "int"]
    assert await database.read(names) == {"a", "b", "c"}


async def test_readers_cannot_write(database: Database) -> None:
    with pytest.raises(StoreError, match="read-only"):
        await database.read(put("a"))
    assert await database.read(names) == set()


async def test_a_process_that_holds_the_lock_is_named_if_it_works_and_hung_up_on_if_it_stands_still(
    database: Database,
) -> None:
    other = database.engine.connect()
    other.execute("SET idle_in_transaction_session_timeout = 0")  # a busy machine may be slow to go on
    database.engine.begin_write(other)
    working = asyncio.ensure_future(asyncio.to_thread(other.execute, "SELECT pg_sleep(1)"))
    with pytest.raises(StoreError, match="another process holds its lock"):
        await database.write(put("a"))
    await working
    other.execute("SET idle_in_transaction_session_timeout = '300ms'")
    while True:  # it stands still from now on, until the server loses patience
        try:
            await database.write(put("b"))
            break
        except StoreError:
            continue
    with pytest.raises(psycopg.Error):
        other.execute("COMMIT")
    other.close()
    assert await database.read(names) == {"b"}


async def test_a_server_that_syncs_nothing_is_refused(postgres: PostgresServer) -> None:
    try:
        with direct(postgres) as other:
            other.execute("ALTER SYSTEM SET fsync = off")
        postgres.stop()
        postgres.start()
        with pytest.raises(StoreError, match="fsync off"):
            await open_store(postgres.url("unsynced"))
    finally:
        with direct(postgres) as other:
            other.execute("ALTER SYSTEM RESET fsync")
        postgres.stop()
        postgres.start()


async def test_commits_are_synced_where_the_servers_default_is_not(
    database: Database, postgres: PostgresServer
) -> None:
    lazy = PostgresEngine(postgres.url("lazy") + "&options=-csynchronous_commit%3Doff").connect()
    assert lazy.execute("SELECT current_setting('synchronous_commit')").fetchone()[0] == "on"
    lazy.close()


async def test_a_newer_store_and_another_programs_tables_are_refused(postgres: PostgresServer) -> None:
    async with await open_store(postgres.url("newer")):
        pass
    with direct(postgres) as other:
        other.execute(f"UPDATE newer.layout SET number = {VERSION + 1}".encode())
        other.execute("CREATE SCHEMA cookies")
        other.execute("CREATE TABLE cookies.cookies (x int)")
    with pytest.raises(StoreError, match=rf"schema version {VERSION + 1}.*upgrade areal"):
        await open_store(postgres.url("newer"))
    with pytest.raises(StoreError, match="tables of another program"):
        await open_store(postgres.url("cookies"))


async def test_the_next_try_of_a_task_is_found_in_an_index(database: Database) -> None:
    def plan(connection: Connection) -> list[str]:
        connection.execute(
            "INSERT INTO task_groups (task_id, n_samples, opened_at, deadline, last_attempt) "
            "SELECT 'old', 1, 0, 0, n FROM generate_series(1, 3000) n"
        )
        connection.execute("ANALYZE task_groups")
        return [str(row[0]) for row in connection.execute(f"EXPLAIN {LAST_ATTEMPT}", ("old",))]

    lines = await database.write(plan)
    assert any("Limit" in line for line in lines), lines
    assert any("Scan Backward using groups_tried" in line for line in lines), lines


async def test_a_server_that_is_not_there_is_named_without_the_password() -> None:
    with pytest.raises(StoreError, match=r"postgresql://127\.0\.0\.1/db\?schema=s") as refusal:
        await open_store("postgresql://user:geheim@127.0.0.1:1/db?schema=s&connect_timeout=2")
    assert "geheim" not in str(refusal.value)


async def test_workers_of_several_hosts_share_it_and_odd_text_is_kept(postgres: PostgresServer) -> None:
    async with await open_store(postgres.url("hosts")) as store:
        for host in ("a", "b"):
            await store.registry.heartbeat(WorkerInfo(f"w-{host}", "http://x", 1, host, 0.0, 0))
        assert [worker.host for worker in await store.registry.workers()] == ["a", "b"]
        await store.training.set_limits(Limits(4, 0, 4))
        session = await store.sessions.begin(SessionRequest("t", "k", "w-a", tags={"user": "a\0b"}))
        assert session.tags == {"user": "a\0b"}  # JSON escapes it
        await store.sessions.add(replace(interaction(session.id, 0), model="m\0"))
        [kept] = await store.sessions.interactions(session.id)
        assert kept.model == "m\ufffd"
