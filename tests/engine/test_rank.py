"""The rank as a real process over TCP: commands, refusals, death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from areal.base.errors import CheckpointError, Forbidden, ProcessDied, ShapeError, TrainingError
from areal.engine import commands
from areal.engine.checkpoint_files import read_mark
from areal.engine.chorus import Leader
from areal.engine.client import EngineClient
from areal.engine.commands import Hello, Row
from areal.engine.engine import TrainEngine
from areal.engine.frames import read_frame, write_frame
from areal.engine.parallel.pipeline import wait_for
from areal.engine.performer import Performer, _waits
from areal.engine.place import Place
from areal.engine.settings import EngineSettings
from areal.engine.worker import RankServer
from areal.weights import sink
from areal.weights.shared_memory import FOLDER, run_prefix

TOKEN = "run-token-of-the-test"
MakeSettings = Callable[..., EngineSettings]
GroupRows = Callable[..., list[Row]]


@dataclass
class Rank:
    process: subprocess.Popen[bytes]
    url: str
    run_dir: Path
    log: Path


def _start(run_dir: Path, settings: EngineSettings) -> Rank:
    run_dir.mkdir()
    ready, spec, log = run_dir / "ready.json", run_dir / "spec.json", run_dir / "rank.log"
    reserved = {"name": "rank-0", "run_dir": str(run_dir), "run_token": TOKEN, "ready_file": str(ready)}
    spec.touch(mode=0o600)
    spec.write_text(json.dumps(reserved | {"parent_pid": os.getpid()} | settings.spec()))
    command = [sys.executable, "-m", "areal.engine.worker", "--spec", str(spec)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    while not ready.exists():
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    return Rank(process, json.loads(ready.read_text())["url"], run_dir, log)


def _end(rank: Rank) -> None:
    rank.process.kill()
    rank.process.wait()


@pytest.fixture
def start_rank(tmp_path: Path, make_settings: MakeSettings) -> Iterator[Callable[..., Rank]]:
    started: list[Rank] = []

    def start(**changes: Any) -> Rank:
        started.append(_start(tmp_path / f"run{len(started)}", make_settings(**{"transfer": "disk", **changes})))
        return started[-1]

    yield start
    for rank in started:
        _end(rank)


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> Iterator[Rank]:
    """One for the tests that leave it as it was."""
    settings = EngineSettings(model_dir=str(tiny_dir), algorithm="grpo", threads=1, total_steps=10, transfer="disk")
    rank = _start(tmp_path_factory.mktemp("shared") / "run", settings)
    yield rank
    _end(rank)


async def test_train_publish_save_restore_stop(
    start_rank: Callable[..., Rank], make_settings: MakeSettings, group_rows: GroupRows, tmp_path: Path
) -> None:
    rank = start_rank()
    local = TrainEngine.load(make_settings())
    rows = group_rows()
    async with EngineClient(rank.url, TOKEN) as client:
        scored = await client.score(rows)
        for theirs, ours in zip(scored, local.score(rows), strict=True):
            np.testing.assert_array_equal(theirs, ours)
        stats = await client.train_step(rows, 0, 0)
        expected = local.train_step(rows, 0, 0)
        assert {k: v for k, v in stats.items() if k != "seconds"} == {
            k: v for k, v in expected.items() if k != "seconds"
        }
        manifest = await client.publish(1)
        received = sink("disk", rank.run_dir).receive(manifest)
        mine = dict(local.named_tensors())
        assert received.keys() == mine.keys()
        assert all(torch.equal(received[name], mine[name]) for name in mine)
        await client.save(str(tmp_path / "step-000001"), 1, full=True)
        await client.train_step(rows, 1, 1)
        assert await client.restore(str(tmp_path / "step-000001")) == {
            "step": 1,
            "optimizer_steps": 1,
            "dtype": "float32",
        }
        again = await client.score(rows)
        for theirs, ours in zip(again, local.score(rows), strict=True):
            np.testing.assert_array_equal(theirs, ours)
        await client.stop()
    assert await asyncio.to_thread(rank.process.wait, 300) == 0


async def test_errors_come_back_as_what_they_were_and_the_rank_goes_on(
    rank: Rank, make_row: Callable[..., Row], group_rows: GroupRows
) -> None:
    async with EngineClient(rank.url, TOKEN) as client:
        with pytest.raises(TrainingError, match=r"session broken: logprobs of trained token 2 is nan"):
            await client.train_step([make_row([1, 2, 3], [2], session="broken", logprobs=float("nan"))], 0, 0)
        with pytest.raises(ShapeError, match="session first"):
            await client.score([make_row([1, 2], [0], session="first")])
        with pytest.raises(CheckpointError, match="is no complete checkpoint"):
            await client.restore(str(rank.run_dir))
        assert (await client.train_step(group_rows(), 0, 0))["updates"] == 1


async def test_a_wrong_token_is_refused(rank: Rank) -> None:
    with pytest.raises(Forbidden, match="wrong run token"):
        await EngineClient(rank.url, "guess").__aenter__()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rank.url.rsplit(":", 1)[1]))
    await write_frame(writer, commands.encode(commands.Stop(1)))  # a command without hello
    frame = await read_frame(reader)
    assert frame is not None
    assert isinstance(commands.decode_reply(frame), commands.Failed)
    assert await read_frame(reader) is None
    writer.close()
    await writer.wait_closed()
    async with EngineClient(rank.url, TOKEN) as client:
        assert await client.score([]) == []


async def test_another_protocol_is_refused(rank: Rank) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rank.url.rsplit(":", 1)[1]))
    await write_frame(writer, commands.encode(Hello(commands.PROTOCOL + 1, TOKEN)))
    frame = await read_frame(reader)
    assert frame is not None
    reply = commands.decode_reply(frame)
    assert isinstance(reply, commands.Failed)
    assert reply.kind == "ConfigError"
    writer.close()
    await writer.wait_closed()


async def test_garbage_does_not_stop_the_rank(rank: Rank) -> None:
    port = int(rank.url.rsplit(":", 1)[1])
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x03abc", b"\xff\xff\xff\xff", b"\x00\x00"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(garbage)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
    async with EngineClient(rank.url, TOKEN) as client:
        assert await client.score([]) == []


def test_who_waits_for_a_stage_to_take_what_was_sent_does_not_hang_itself() -> None:
    """Torch waits there outside of Python: no frame of its own says so."""
    taken = threading.Lock()
    with taken:
        thread = threading.Thread(target=wait_for, args=([SimpleNamespace(wait=taken.acquire)],))
        thread.start()
        innermost = None
        while innermost is not wait_for.__code__:
            frame = sys._current_frames()[thread.ident or 0]
            innermost = frame.f_code
        assert _waits(frame)
    thread.join()


async def test_a_killed_rank_fails_the_waiting_call_and_every_later_one(
    start_rank: Callable[..., Rank], group_rows: GroupRows
) -> None:
    rank = start_rank()
    async with EngineClient(rank.url, TOKEN) as client:
        rank.process.send_signal(signal.SIGSTOP)  # so that the call is surely waiting
        waiting = asyncio.create_task(client.train_step(group_rows(), 0, 0))
        await asyncio.sleep(0)
        rank.process.kill()
        with pytest.raises(ProcessDied, match=f"training rank at {rank.url} is gone"):
            await waiting
        with pytest.raises(ProcessDied, match="is gone"):
            await client.score([])
    rank.process.wait()
    with pytest.raises(ProcessDied, match="is not there"):
        await EngineClient(rank.url, TOKEN).__aenter__()


async def test_sigterm_ends_it_with_zero_also_in_mid_step(
    start_rank: Callable[..., Rank], group_rows: GroupRows
) -> None:
    idle = start_rank()
    idle.process.terminate()
    assert await asyncio.to_thread(idle.process.wait, 300) == 0
    rank = start_rank(max_tokens_per_mb=64, transfer="shared_memory")
    async with EngineClient(rank.url, TOKEN) as client:
        await client.publish(1)
        published = f"{run_prefix(rank.run_dir)}*"
        assert list(FOLDER.glob(published))
        step = asyncio.create_task(client.train_step(group_rows(groups=400), 0, 0))
        await asyncio.sleep(0.5)
        async with EngineClient(rank.url, TOKEN):  # said hello in mid-step: the loop keeps answering
            assert not step.done()
        rank.process.terminate()
        assert await asyncio.to_thread(rank.process.wait, 300) == 0
        assert not list(FOLDER.glob(published))
        with pytest.raises(ProcessDied, match="is gone"):
            await step


async def test_training_goes_on_while_a_checkpoint_is_written_and_changes_nothing_in_it(
    make_settings: Callable[..., EngineSettings], group_rows: GroupRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk answers nothing until three more steps are trained; one checkpoint is written at a time; the end waits for it."""
    disk, asked = threading.Event(), threading.Event()
    sync = os.fsync

    def slow(descriptor: int) -> None:
        asked.set()
        assert disk.wait(300)
        sync(descriptor)

    thread, performer = ThreadPoolExecutor(1), Performer(make_settings(transfer="disk"), Place(), tmp_path)
    rank = RankServer(performer, Leader(Place(), performer.standing), thread, TOKEN)
    await rank.load(within_s=120)
    server = await asyncio.start_server(rank.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, EngineClient(f"tcp://127.0.0.1:{port}", TOKEN) as client:
        await client.train_step(group_rows(), 0, 0)
        await client.save(str(tmp_path / "then"), 1, full=True)
        monkeypatch.setattr(os, "fsync", slow)
        written = await client.begin_save(str(tmp_path / "step-000001"), 1, full=True, about={"kept_for": ["recover"]})
        for step in range(1, 4):
            await client.train_step(group_rows(seed=step), step, step)
        await asyncio.to_thread(asked.wait, 300)
        assert not written.done()
        assert not (tmp_path / "step-000001").exists()
        second = await client.begin_save(str(tmp_path / "step-000004"), 4, full=True)
        ending = asyncio.create_task(rank.finish_writing())
        await asyncio.sleep(0)
        assert not ending.done()
        disk.set()
        facts = await written
        await asyncio.gather(second, ending)
    mark = read_mark(tmp_path / "step-000001")
    assert mark.files == read_mark(tmp_path / "then").files
    assert mark.about == {"kept_for": ["recover"]}
    assert facts.keys() == {"held_seconds", "write_seconds", "bytes"}
    assert read_mark(tmp_path / "step-000004").files != mark.files
    thread.shutdown()
    torch.use_deterministic_algorithms(False)


async def test_a_disk_that_refuses_is_an_answer_and_the_rank_trains_on(
    rank: Rank, group_rows: GroupRows, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    async with EngineClient(rank.url, TOKEN) as client:
        with pytest.raises(CheckpointError, match=r"step-000001 could not be written: File exists; free space there"):
            await client.save(str(tmp_path / "file" / "step-000001"), 1, full=True)
        assert (await client.train_step(group_rows(), 0, 0))["updates"] == 1
        await client.save(str(tmp_path / "step-000001"), 1, full=True)
    assert read_mark(tmp_path / "step-000001").step == 1
