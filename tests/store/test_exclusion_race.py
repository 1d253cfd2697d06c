"""Sessions are excluded by one process while another trains and is killed in its steps: nothing conflicts, nothing is counted twice."""

from __future__ import annotations

import asyncio
import signal
import sys
from dataclasses import replace
from pathlib import Path

from areal.base.types import Limits, Message, SessionRequest
from areal.store import open_store, store_url
from areal.store.base import Store
from tests.store.worker import interaction

WORKER = str(Path(__file__).with_name("worker.py"))
GROUPS, TOKENS = 60, 4


async def play(store: Store) -> list[str]:
    """GROUPS groups of two sessions that have ended; the sessions' ids."""
    names = []
    for number in range(2 * GROUPS):
        session = await store.sessions.begin(SessionRequest(f"t{number // 2}", f"key {number}", "w0"))
        await store.sessions.add(interaction(session.id, 0, TOKENS))
        names.append((await store.sessions.end(session.id, "ended")).id)
    return names


async def start(*words: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, WORKER, *words, stdin=pipe, stdout=pipe)


async def train_and_be_killed(url: str) -> int:
    """Several lives of a controller, each but the last killed while a step has its groups. Returns how many lives there were."""
    for life in range(5):
        trainer = await start("--train", url, f"life-{life}")
        assert trainer.stdout is not None
        took = 0
        while line := await trainer.stdout.readline():
            took += line.startswith(b"took")
            if took == 6 and life < 4:
                trainer.send_signal(signal.SIGKILL)
                break
        if await trainer.wait() == 0:
            return life + 1
        assert trainer.returncode == -signal.SIGKILL, "advance raised: see the trace above"
    raise AssertionError("the last life was not killed and has not ended")


async def exclude(url: str, names: list[str]) -> dict[str, str]:
    """Name -> excluded or refused."""
    output, _ = await (await start("--exclude", url)).communicate("\n".join(names).encode())
    return {name: what for what, name in (line.split() for line in output.decode().splitlines())}


async def test_exclusions_and_steps_of_several_processes_never_conflict(tmp_path: Path) -> None:
    url = store_url(tmp_path / "store.sqlite")
    async with await open_store(url) as store:
        await store.training.set_limits(Limits(2 * GROUPS, 0, 2 * GROUPS, n_samples=2))
        names = await play(store)
        asked = names[1::4]  # of every other group one session, in the order in which they are trained
        lives, answers = await asyncio.gather(train_and_be_killed(url), exclude(url, asked))
        assert lives > 1
        assert answers.keys() == set(asked)
        for number, name in enumerate(asked):
            session, summary = await store.sessions.get(name), await store.reading.session(name)
            assert session is not None
            assert summary is not None
            deleted = number % 2 == 1
            if answers[name] == "refused":
                assert not deleted, "deletion is never refused"
                assert summary.fate.startswith("trained at step")
            else:
                assert deleted or summary.fate == "dropped (excluded)"
                assert summary.fate.removesuffix(", content deleted") == "dropped (excluded)" or deleted
            assert bool(await store.sessions.interactions(name)) is not deleted
        counts = await store.training.counts()
        assert (counts.running, counts.accepted) == (0, 0)
        dropped = {one.session.group_id for one in await store.reading.recent(999) if "dropped" in one.fate}
        assert counts.dropped_tokens == len(dropped) * 2 * TOKENS
        assert counts.consumed == GROUPS - len(dropped)
        assert counts.recorded_tokens == 2 * GROUPS * TOKENS


async def test_deleted_text_is_in_no_file_of_the_store(tmp_path: Path) -> None:
    marker = "a-text-that-nobody-may-find-again"
    async with await open_store(store_url(tmp_path / "store.sqlite")) as store:
        await store.training.set_limits(Limits(9, 0, 9))
        for name in ("kept", "forgotten"):
            session = await store.sessions.begin(SessionRequest(name, f"key of {name}", "w0", tags={"user": marker}))
            said = interaction(session.id, 0)
            said = replace(said, reply=Message("assistant", marker * 500))
            await store.sessions.add(said)
        assert _found(tmp_path, marker) > 500
        for name in ("kept", "forgotten"):
            await store.sessions.exclude(name, delete=True)
        assert _found(tmp_path, marker) == 0


def _found(folder: Path, text: str) -> int:
    return sum(path.read_bytes().count(text.encode()) for path in folder.glob("store.sqlite*"))
