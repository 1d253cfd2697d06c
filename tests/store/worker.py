"""A process of its own that writes sessions into a store, for test_processes.py and test_database.py.

python worker.py URL NAME SESSIONS [TURNS]    prints the id of each write once it is acknowledged
python worker.py --full PATH                  the disk fills up and empties again (RLIMIT_FSIZE stands for the disk)
python worker.py --hang PATH                  a read hangs, and the store is closed
python worker.py --train URL INCARNATION      takes and trains one group after the other until none waits
python worker.py --exclude URL                excludes the sessions named on its standard input, every other one with its content
"""

from __future__ import annotations

import asyncio
import resource
import sys
import threading
from pathlib import Path

import numpy as np

from areal.base.errors import Conflict, StoreError
from areal.base.types import Completion, Interaction, Limits, Message, Session, SessionRequest, Share, Version
from areal.store import open_store, store_url
from areal.store.base import Store
from areal.store.sql import database
from areal.store.sql import sessions as rows
from areal.store.sqlite import SqliteEngine


def interaction(session_id: str, turn: int, tokens: int = 4) -> Interaction:
    ids, floats = np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.float32)
    completion = Completion(ids, floats, ids, floats, 1.0, "stop")
    return Interaction(
        f"{session_id}/{turn}", session_id, turn, ids, completion, (Message("user", "?"),), Message("assistant", "!")
    )


async def play(store: Store, task: str, turns: int) -> None:
    session: Session = await store.sessions.begin(SessionRequest(task, f"key of {task}", "w0", request_id=task))
    print("began", session.id, flush=True)
    for turn in range(turns):
        await store.sessions.add(interaction(session.id, turn))
        print("added", f"{session.id}/{turn}", flush=True)
    rewarded = await store.sessions.reward(session.id, 1.0, None)
    print("rewarded", rewarded, flush=True)
    await store.sessions.end(session.id, "ended")
    print("ended", session.id, flush=True)


async def write(url: str, name: str, sessions: int, turns: int) -> None:
    async with await open_store(url) as store:
        for start in range(0, sessions, 16):
            await asyncio.gather(*(play(store, f"{name}-{n}", turns) for n in range(start, min(start + 16, sessions))))


async def hang(path: Path) -> None:
    """A reader that waits for ever, as for a disk that hangs."""
    database.CLOSE_S = 0.1
    store, inside = database.Database(SqliteEngine(path)), threading.Event()

    def stuck(_: object) -> None:
        inside.set()
        threading.Event().wait()

    read = asyncio.ensure_future(store.read(stuck))
    await asyncio.to_thread(inside.wait, 60)
    await store.close()
    print("closed", flush=True)
    read.cancel()


async def fill(path: Path) -> None:
    """Exit 0 if the store refuses in time, keeps what it acknowledged, and works again."""
    async with await open_store(store_url(path)) as store:
        await store.training.set_limits(Limits(max_concurrent=10, max_lag=0, batch_groups=10))
        session = await store.sessions.begin(SessionRequest("t", "k", "w0"))
        await store.sessions.add(interaction(session.id, 0))
        limit = path.with_name(path.name + "-wal").stat().st_size + 300_000
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        rows.ANSWER_PATIENCE_S = 0.2
        acknowledged, refused = 1, None
        while refused is None:
            try:
                await store.sessions.add(interaction(session.id, acknowledged, tokens=2000))
            except StoreError as error:
                refused = error
            else:
                acknowledged += 1
        print("refused", refused.status, refused)
        assert len(await store.sessions.interactions(session.id)) == acknowledged, "reads go on, nothing half written"
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        await store.sessions.add(interaction(session.id, acknowledged, tokens=2000))
        await store.sessions.reward(session.id, 1.0, None)
        await store.sessions.end(session.id, "ended")
    async with await open_store(store_url(path)) as store:
        kept = await store.sessions.interactions(session.id)
        assert [one.index for one in kept] == list(range(acknowledged + 1))
        assert len(await store.training.ready()) == 1
    print("kept", len(kept))


async def train(url: str, incarnation: str) -> None:
    """A controller: whatever it prints as trained was published in one transaction with its consumption."""
    async with await open_store(url) as store:
        newest = await store.training.version() or Version(0, 0, "")
        await store.training.release_after(newest.step, incarnation)
        while ready := await store.training.ready():
            version = Version(newest.label + 1, newest.step + 1, incarnation)
            members = {group.id: [one.id for one in group.sessions] for group in ready[:1]}
            if not await store.training.take(version, members):
                continue
            print("took", *members, flush=True)
            sums = [(name, await store.reading.session(name)) for names in members.values() for name in names]
            await asyncio.sleep(0.005)  # the step: exclusions come meanwhile
            await store.training.advance(version, list(members))
            for name, summary in sums:
                assert summary is not None
                await store.training.account(
                    name, {"": Share(summary.recorded_tokens, summary.session.interaction_count)}
                )
            newest = version
            print("advanced", *members, flush=True)


async def exclude(url: str) -> None:
    async with await open_store(url) as store:
        for number, name in enumerate(line.strip() for line in sys.stdin):
            try:
                await store.sessions.exclude(name, delete=bool(number % 2))
            except Conflict:
                print("refused", name, flush=True)
            else:
                print("excluded", name, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--train":
        asyncio.run(train(sys.argv[2], sys.argv[3]))
    elif sys.argv[1] == "--exclude":
        asyncio.run(exclude(sys.argv[2]))
    elif sys.argv[1] == "--full":
        asyncio.run(fill(Path(sys.argv[2])))
    elif sys.argv[1] == "--hang":
        asyncio.run(hang(Path(sys.argv[2])))
    else:
        asyncio.run(write(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
