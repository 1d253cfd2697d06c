"""How fast the store makes records durable, and whether an old store slows a new session down. Prints ratios.

    python benchmarks/store.py [--seconds 3] [--old-sessions 100000]

Each writer process keeps 64 interactions of 8 KB in flight, as a busy proxy does. The baseline commits one record at a time
through plain sqlite3 with the same settings (WAL, synchronous=FULL). Every figure is of durable records: an answer comes
after the fsync. Speeds depend on the disk; the ratios are the result.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sqlite3
import tempfile
import time
from pathlib import Path

import numpy as np

from areal.base.types import Completion, Interaction, Limits, Message, SessionRequest
from areal.store import open_store, store_url

IN_FLIGHT = 64
RECORD_BYTES = 8192


def record(session_id: str, number: int) -> Interaction:
    """About 8 KB: 512 output tokens (16 bytes each with log-prob, version and mass)."""
    ids, floats = np.arange(500, dtype=np.int32), np.zeros(500, np.float32)
    done = Completion(ids, floats, ids, floats, 1.0, "stop")
    asked = (Message("user", "what is two and two?"),)
    return Interaction(
        f"{session_id}/{number}", session_id, number, ids[:20], done, asked, Message("assistant", "four")
    )


async def grouped(path: Path, name: str, seconds: float) -> int:
    """Records one process makes durable in that time through the store."""
    written = 0
    async with await open_store(store_url(path)) as store:
        session = await store.sessions.begin(SessionRequest(name, f"key of {name}", "w0"))
        end = time.perf_counter() + seconds

        async def client(number: int) -> None:
            nonlocal written
            while time.perf_counter() < end:
                await store.sessions.add(record(session.id, number))
                number += IN_FLIGHT
                written += 1

        await asyncio.gather(*(client(number) for number in range(IN_FLIGHT)))
    return written


def one_by_one(path: Path, name: str, seconds: float) -> int:
    """The same bytes, one commit per record."""
    connection = sqlite3.connect(path, timeout=30, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE IF NOT EXISTS records (id TEXT PRIMARY KEY, body BLOB)")
    written, body, end = 0, bytes(RECORD_BYTES), time.perf_counter() + seconds
    while time.perf_counter() < end:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO records VALUES (?, ?)", (f"{name}/{written}", body))
        connection.execute("COMMIT")
        written += 1
    connection.close()
    return written


def run_process(kind: str, path: Path, name: str, seconds: float) -> int:
    if kind == "one by one":
        return one_by_one(path, name, seconds)
    return asyncio.run(grouped(path, name, seconds))


def rate(kind: str, processes: int, seconds: float) -> float:
    """Durable records per second over all processes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.sqlite"
        if kind == "grouped":
            asyncio.run(prepare(path))
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            pool.starmap(run_process, [(kind, path, f"warm-{n}", 0.1) for n in range(processes)])  # imports, pages
            jobs = [(kind, path, f"p{n}", seconds) for n in range(processes)]
            return sum(pool.starmap(run_process, jobs)) / seconds


async def prepare(path: Path) -> None:
    async with await open_store(store_url(path)) as store:
        await store.training.set_limits(Limits(max_concurrent=10_000, max_lag=0, batch_groups=10_000))


async def begin_and_count(old_sessions: int) -> tuple[float, float]:
    """(seconds per begin() with nothing else going on, seconds per counts()) beside that many old sessions."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.sqlite"
        await prepare(path)
        grow(path, old_sessions)
        async with await open_store(store_url(path)) as store:
            start = time.perf_counter()
            for number in range(200):
                # "old" is the worst case: the task id of every old session, as a client without task ids sends it.
                await store.sessions.begin(SessionRequest("old", f"new {number}", "w0"))
            begun = (time.perf_counter() - start) / 200
            await store.training.counts()
            start = time.perf_counter()
            for _ in range(5):
                await store.training.counts()
            return begun, (time.perf_counter() - start) / 5


def grow(path: Path, sessions: int) -> None:
    """Rows of sessions long trained, two interactions each (without recordings, which no count reads)."""
    connection = sqlite3.connect(path)
    numbers = range(1, sessions + 1)
    connection.executemany(
        "INSERT INTO task_groups VALUES (?, 'old', 1, 0, 0, 0, NULL, NULL, 1, 'x')", ((n,) for n in numbers)
    )
    connection.executemany(
        "INSERT INTO sessions VALUES (?, ?, 'old', ?, ?, 0, ?, 'w0', 'train', '{}', NULL, 0, 0, 'ended', 0, NULL, 0)",
        ((n, f"old-{n}", n, n, f"key {n}") for n in numbers),
    )
    connection.executemany(
        "INSERT INTO interactions VALUES (NULL, ?, ?, 0, 100, 1.0, '[]', NULL, NULL, '', 'm', 'stop', 1.0, 0, 0, '')",
        ((n, f"old-{n}/{turn}") for n in numbers for turn in range(2)),
    )
    connection.executemany("INSERT INTO token_accounts VALUES (?, '', 200)", ((n,) for n in numbers))
    connection.commit()
    connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--old-sessions", type=int, default=100_000)
    options = parser.parse_args()
    for processes in (1, 4):
        plain = rate("one by one", processes, options.seconds)
        ours = rate("grouped", processes, options.seconds)
        print(
            f"{processes} process(es): grouped {ours:.0f}/s, one by one {plain:.0f}/s, ratio {ours / plain:.1f}",
            flush=True,
        )
    begin_new, counts_new = asyncio.run(begin_and_count(10))
    begin_old, counts_old = asyncio.run(begin_and_count(options.old_sessions))
    print(
        f"begin(): {begin_new * 1e3:.2f} ms in a new store, {begin_old * 1e3:.2f} ms beside {options.old_sessions} old "
        f"sessions, ratio {begin_old / begin_new:.2f}"
    )
    print(f"counts(): {counts_new * 1e3:.2f} ms in a new store, {counts_old * 1e3:.1f} ms beside the old sessions")


if __name__ == "__main__":
    main()
