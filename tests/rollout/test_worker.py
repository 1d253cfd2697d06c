"""A worker stays in the registry, whatever the store goes through meanwhile."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path

import pytest

from areal.base.errors import InternalError
from areal.rollout import worker
from areal.store.sql.store import SqlStore
from areal.store.sqlite import SqliteEngine


async def test_heartbeats_go_on_after_a_time_in_which_the_store_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker, "HEARTBEAT_S", 0.02)
    path = tmp_path / "store.sqlite"
    async with SqlStore(SqliteEngine(path, busy_timeout_s=0.05), time.time) as store:
        async with worker._heartbeats(store.registry, "w0", "http://127.0.0.1:1"):
            other = sqlite3.connect(path, isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            while "the heartbeat of w0 failed" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            other.execute("ROLLBACK")
            other.close()
            back = time.time()
            while (await store.registry.workers())[0].heartbeat_at < back:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await store.registry.workers() == ()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_worker_whose_store_will_never_write_again_ends_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "HEARTBEAT_S", 0.02)
    engine = SqliteEngine(tmp_path / "store.sqlite")

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    async def registered(store: SqlStore) -> None:
        async with asyncio.timeout(60), worker._heartbeats(store.registry, "w0", "http://127.0.0.1:1"):
            monkeypatch.setattr(engine, "begin_write", broken)
            await asyncio.Event().wait()

    async with SqlStore(engine, time.time) as store:
        with pytest.raises(InternalError, match=r"its writer failed \(ZeroDivisionError: a bug\)"):
            await registered(store)
        with pytest.raises(InternalError, match="start the run again"):
            await store.registry.workers()
