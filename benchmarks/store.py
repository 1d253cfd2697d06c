"""How fast the store makes records durable, and whether an old store slows a new session down. Prints ratios.

    python benchmarks/store.py [--seconds 3] [--old-sessions 100000]

Sessions that each store one interaction of 8 KB after the other, 1, 64 and 512 of them in one process, beside three things measured in
the same run: a bare loop of write and fdatasync, plain sqlite3 with one record per commit, and plain sqlite3 with AT rows per commit
(WAL and synchronous=FULL, as the store). The plain loop is the least that SQLite can do: one table of a key and 8 KB that are ready before
the clock runs, one statement per row, one thread, no caller. The store's rows have their arrays encoded, four indices, and an answer each;
of the 8 KB it keeps half, since versions and masses are one value each (store/packing.py).
Every figure is of durable records: an answer comes after the fsync. Rounds alternate and the median counts. The system calls are counted
by strace in a run of its own. Speeds depend on the disk; the ratios are the result. Exit code 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import re
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import uvloop

from areal.base.types import Completion, Interaction, Limits, Message, SessionRequest
from areal.store import open_store, store_url

SESSIONS = (1, 64, 512)
AT = 64  # sessions for which the targets are, and rows per commit of the plain loop beside them
ROUNDS = 3
MOST_SYNCS_PER_ROW = 1 / 8
LEAST_OF_BATCHED = 0.5
RECORD_BYTES = 8192
BATCHED = f"sqlite, {AT} per commit"
SYNCS = re.compile(
    r"^\s*[\d.]+\s+[\d.]+\s+\d+\s+(\d+)\s+(?:\d+\s+)?(?:fsync|fdatasync)$", re.M
)  # a line of strace's summary


def parts() -> Interaction:
    """About 8 KB: 500 output tokens (16 bytes each with log-prob, version and mass), as a policy samples them at temperature 1."""
    chance = np.random.default_rng(0)
    ids, logprobs = chance.integers(0, 150_000, 500, np.int32), -chance.exponential(0.5, 500).astype(np.float32)
    done = Completion(ids, logprobs, np.full(500, 7, np.int32), np.ones(500, np.float32), 1.0, "stop")
    asked = (Message("user", "what is two and two?"),)
    return Interaction("", "", 0, ids[:20], done, asked, Message("assistant", "four"))


PARTS = parts()


def record(session_id: str, number: int) -> Interaction:
    """Of parts that were there before the clock ran, as the plain loop's bytes are."""
    return Interaction(
        f"{session_id}/{number}",
        session_id,
        number,
        PARTS.prompt_ids,
        PARTS.completion,
        PARTS.messages,
        PARTS.reply,
    )


async def grouped(path: Path, sessions: int, seconds: float, name: str = "p") -> float:
    """Records per second that so many sessions of one process make durable through the store."""
    written = 0
    async with await open_store(store_url(path)) as store:
        requests = [SessionRequest(f"{name}-{n}", f"{name}-{n}", "w0") for n in range(sessions)]
        own = await asyncio.gather(*(store.sessions.begin(request) for request in requests))
        start = time.perf_counter()

        async def client(session_id: str) -> None:
            nonlocal written
            number = 0
            while time.perf_counter() < start + seconds:
                await store.sessions.add(record(session_id, number))
                number += 1
                written += 1

        await asyncio.gather(*(client(session.id) for session in own))
        return written / (time.perf_counter() - start)


def plain(path: Path, per_commit: int, seconds: float) -> float:
    """As many bytes per second through plain sqlite3, so many rows per commit."""
    connection = sqlite3.connect(path, timeout=30, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE IF NOT EXISTS records (id TEXT PRIMARY KEY, body BLOB)")
    written, body, start = 0, bytes(RECORD_BYTES), time.perf_counter()
    while time.perf_counter() < start + seconds:
        connection.execute("BEGIN IMMEDIATE")
        for _ in range(per_commit):
            connection.execute("INSERT INTO records VALUES (?, ?)", (f"r/{written}", body))
            written += 1
        connection.execute("COMMIT")
    rate = written / (time.perf_counter() - start)
    connection.close()
    return rate


def bare(path: Path, seconds: float) -> float:
    """As many bytes appended to a file, one fdatasync each."""
    written, body, start = 0, bytes(RECORD_BYTES), time.perf_counter()
    with path.open("ab", buffering=0) as file:
        while time.perf_counter() < start + seconds:
            file.write(body)
            os.fdatasync(file.fileno())
            written += 1
    return written / (time.perf_counter() - start)


def through_the_store(path: Path, sessions: int, seconds: float) -> float:
    """On the event loop that every process of a run has."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(prepare(path))
        return runner.run(grouped(path, sessions, seconds))


def rates(seconds: float) -> dict[str, float]:
    """Durable records per second: the median over rounds in which each contender has its turn."""
    contenders: dict[str, Callable[[Path], float]] = {
        "bare fdatasync": lambda path: bare(path, seconds),
        "sqlite, one per commit": lambda path: plain(path, 1, seconds),
        BATCHED: lambda path: plain(path, AT, seconds),
    }
    for sessions in SESSIONS:
        contenders[f"store, {sessions} sessions"] = lambda path, n=sessions: through_the_store(path, n, seconds)
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, run in contenders.items():
            with tempfile.TemporaryDirectory() as folder:
                found[name].append(run(Path(folder) / "store.sqlite"))
    return {name: statistics.median(each) for name, each in found.items()}


def syncs_per_row(seconds: float) -> float | None:
    """fsync and fdatasync calls per row with AT sessions, counted by the kernel's tracer; None where there is none."""
    if shutil.which("strace") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        summary = Path(folder) / "calls"
        command = ["strace", "-f", "-c", "--seccomp-bpf", "-e", "trace=fsync,fdatasync", "-o", str(summary)]
        worker = [sys.executable, __file__, "--count", folder, "--seconds", str(seconds)]
        done = subprocess.run([*command, *worker], capture_output=True, text=True)
        if done.returncode:
            return None
        return sum(int(calls) for calls in SYNCS.findall(summary.read_text())) / (float(done.stdout) * seconds)


def in_processes(processes: int, sessions: int, seconds: float) -> float:
    """Durable records per second over several processes with one store."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.sqlite"
        asyncio.run(prepare(path))
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            pool.starmap(one_process, [(path, 1, 0.1, f"warm-{n}") for n in range(processes)])  # imports, pages
            return sum(pool.starmap(one_process, [(path, sessions, seconds, f"p{n}") for n in range(processes)]))


def one_process(path: Path, sessions: int, seconds: float, name: str) -> float:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(grouped(path, sessions, seconds, name))


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
        "INSERT INTO task_groups (seq, task_id, n_samples, opened_at, deadline, accepted_at, consumed_step, consumed_incarnation) "
        "VALUES (?, 'old', 1, 0, 0, 0, 1, 'x')",
        ((n,) for n in numbers),
    )
    connection.executemany(
        "INSERT INTO sessions (seq, id, task_id, suffix, group_seq, sample, key_hash, worker, purpose, tags, started_at, last_active_at, "
        "ending, ended_at) VALUES (?, ?, 'old', ?, ?, 0, ?, 'w0', 'train', '{}', 0, 0, 'ended', 0)",
        ((n, f"old-{n}", n, n, f"key {n}") for n in numbers),
    )
    connection.executemany(
        "INSERT INTO interactions (session_seq, id, idx, output_tokens, reward, tags, branch_reason, model, finish_reason, temperature, "
        "started_at, finished_at) VALUES (?, ?, 0, 100, 1.0, '[]', '', 'm', 'stop', 1.0, 0, 0)",
        ((n, f"old-{n}/{turn}") for n in numbers for turn in range(2)),
    )
    connection.executemany("INSERT INTO token_accounts VALUES (?, '', 200, 2)", ((n,) for n in numbers))
    connection.commit()
    connection.close()


def compare(seconds: float) -> bool:
    """Print the table; whether the targets are met."""
    found = rates(seconds)
    batched = found[BATCHED]
    print(f"{'durable records of 8 KB':30s} {'per second':>10s} {'x bare fdatasync':>17s} {'of sqlite batched':>18s}")
    for name, rate in found.items():
        print(f"{name:30s} {rate:10.0f} {rate / found['bare fdatasync']:17.2f} {rate / batched:17.0%}", flush=True)
    share, syncs = found[f"store, {AT} sessions"] / batched, syncs_per_row(seconds)
    print(f"{AT} sessions: {share:.0%} of batched sqlite (target {LEAST_OF_BATCHED:.0%} or more)")
    if syncs is None:
        print(f"{AT} sessions: fdatasync calls not counted, there is no strace here")
    else:
        print(f"{AT} sessions: one fdatasync per {1 / syncs:.1f} rows (target {1 / MOST_SYNCS_PER_ROW:.0f} or more)")
    print(f"4 processes of {AT} sessions: {in_processes(4, AT, seconds):.0f}/s", flush=True)
    return share >= LEAST_OF_BATCHED and (syncs is None or syncs <= MOST_SYNCS_PER_ROW)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--old-sessions", type=int, default=100_000)
    parser.add_argument("--count", type=Path, help=argparse.SUPPRESS)  # this process is the one that strace looks at
    options = parser.parse_args()
    if options.count:
        print(through_the_store(options.count / "store.sqlite", AT, options.seconds))
        return 0
    met = compare(options.seconds)
    begin_new, counts_new = asyncio.run(begin_and_count(10))
    begin_old, counts_old = asyncio.run(begin_and_count(options.old_sessions))
    print(
        f"begin(): {begin_new * 1e3:.2f} ms in a new store, {begin_old * 1e3:.2f} ms beside {options.old_sessions} old "
        f"sessions, ratio {begin_old / begin_new:.2f}"
    )
    print(f"counts(): {counts_new * 1e3:.2f} ms in a new store, {counts_old * 1e3:.1f} ms beside the old sessions")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
