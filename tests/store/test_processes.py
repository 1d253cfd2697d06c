"""Several processes, one file: nothing acknowledged is ever lost, counts add up, limits hold."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from areal.base.types import Limits, SessionRequest, Version
from areal.store import open_store, store_url
from areal.store.sqlite import SqliteEngine

WORKER = Path(__file__).with_name("worker.py")
WIDE = Limits(max_concurrent=10_000, max_lag=0, batch_groups=10_000)


async def start(url: str, name: str, sessions: int, turns: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, str(WORKER), url, name, str(sessions), str(turns), stdout=asyncio.subprocess.PIPE
    )


async def test_four_processes_write_at_once_and_nothing_is_lost(tmp_path: Path) -> None:
    url = store_url(tmp_path / "store.sqlite")
    async with await open_store(url) as store:
        await store.training.set_limits(WIDE)
        writers = [await start(url, f"p{number}", sessions=48, turns=3) for number in range(4)]
        outputs = [await writer.communicate() for writer in writers]
        assert [writer.returncode for writer in writers] == [0] * 4
        assert sum(output.decode().count("added") for output, _ in outputs) == 4 * 48 * 3
        counts = await store.training.counts()
        assert (counts.accepted, counts.running, counts.recorded_tokens) == (192, 0, 192 * 3 * 4)
        ready = await store.training.ready()
        assert {group.task_id for group in ready} == {f"p{number}-{n}" for number in range(4) for n in range(48)}
        assert {group.sessions[0].interaction_count for group in ready} == {3}
        await store.training.advance(Version(1, 1, "x"), [group.id for group in ready])
        assert (await store.training.counts()).consumed == 192


async def test_limits_hold_across_processes(tmp_path: Path) -> None:
    """The law is applied under the write lock, so processes that start at once share the slots exactly."""
    url = store_url(tmp_path / "store.sqlite")
    async with await open_store(url) as store:
        await store.training.set_limits(Limits(max_concurrent=10, max_lag=0, batch_groups=10))
        # 4 x 16 sessions ask for 10 slots at once; a refused one ends its process with the 429.
        writers = [
            await asyncio.create_subprocess_exec(
                sys.executable, str(WORKER), url, f"p{number}", "16", "1",
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )
            for number in range(4)
        ]  # fmt: skip
        outputs = [await writer.communicate() for writer in writers]
        assert all(b"NoCapacity" in errors for _, errors in outputs)
        began = sum(output.decode().count("began") for output, _ in outputs)
        counts = await store.training.counts()
        assert counts.running + counts.accepted == 10
        assert began <= 10  # a process that dies of a refusal may not get to print its last admissions


async def test_what_a_killed_process_was_told_is_there(tmp_path: Path) -> None:
    url = store_url(tmp_path / "store.sqlite")
    async with await open_store(url) as store:
        await store.training.set_limits(WIDE)
        victim, witness = await start(url, "victim", 4000, 3), await start(url, "witness", 32, 3)
        assert victim.stdout is not None
        told = [await victim.stdout.readline() for _ in range(200)]
        victim.send_signal(signal.SIGKILL)
        told += [line async for line in victim.stdout if line.endswith(b"\n")]
        await victim.wait()
        await witness.communicate()
        assert witness.returncode == 0  # the others do not notice
        facts: dict[str, set[str]] = {"began": set(), "added": set(), "rewarded": set(), "ended": set()}
        for line in told:
            what, name = line.decode().split()
            facts[what].add(name)
        sessions = {one.session.id: one.session for one in await store.reading.recent(10_000)}
        kept = {one.id: one.reward for name in facts["began"] for one in await store.sessions.interactions(name)}
        assert facts["began"] <= set(sessions)
        assert facts["added"] <= set(kept)
        assert {kept[name] for name in facts["rewarded"]} <= {1.0}
        assert {sessions[name].ending for name in facts["ended"]} <= {"ended"}
        assert len(facts["added"]) > 30
        # Its unfinished sessions expire like any other's, and no slot stays taken.
        await store.sessions.expire(idle_since=2**40)
        assert (await store.training.counts()).running == 0
    with sqlite3.connect(tmp_path / "store.sqlite") as file:
        assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert file.execute("PRAGMA foreign_key_check").fetchall() == []
    file.close()


LOOK_AND_CLOSE = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); print(c.execute(sys.argv[2]).fetchone()[0])"


async def looked(path: Path, query: str) -> int:
    """What another process reads, which then closes the file: if it takes itself for the last one, it deletes the log."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LOOK_AND_CLOSE, str(path), query, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    return int(output)


async def test_what_is_written_after_another_process_closed_the_store_is_not_lost(tmp_path: Path) -> None:
    """Every connection of ours but SQLite's own leaves the file alone: a descriptor that is closed would give up its locks."""
    path, query = tmp_path / "store.sqlite", "SELECT count(*) FROM sessions"
    async with await open_store(store_url(path)) as store:
        await store.training.set_limits(WIDE)
        await store.sessions.begin(SessionRequest("first", "key-1", "w0"))
        assert (
            await store.sessions.get("first") is not None
        )  # through a reader's connection, opened beside the writer's
        log = (tmp_path / "store.sqlite-wal").stat().st_ino
        assert await looked(path, query) == 1
        assert (tmp_path / "store.sqlite-wal").stat().st_ino == log
        await store.sessions.begin(SessionRequest("second", "key-2", "w0"))
        assert await looked(path, query) == 2


def test_a_file_that_many_threads_make_at_once_is_one_file(tmp_path: Path) -> None:
    at_once = threading.Barrier(4)

    def connect(path: Path) -> None:
        at_once.wait()
        SqliteEngine(path).connect().close()

    with ThreadPoolExecutor(4) as threads:
        for number in range(25):
            list(threads.map(connect, [tmp_path / f"{number}.sqlite"] * 4))
    # Who closes while another closes may leave the log behind, empty; nothing else stays.
    names = {file.name.removesuffix("-wal").removesuffix("-shm") for file in tmp_path.iterdir()}
    assert names == {f"{number}.sqlite" for number in range(25)}
