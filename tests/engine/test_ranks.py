"""Several ranks of one net as processes under the local scheduler: they answer as one, and one that is gone, fails alone or hangs is named."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from areal.base.errors import CheckpointError, ProcessDied, ShapeError, TrainingError
from areal.cluster.local import LocalScheduler
from areal.cluster.scheduler import Job, Process, Scheduler, unless_a_process_dies
from areal.engine.checkpoint_files import checkpoints, damage, read_mark
from areal.engine.client import EngineClient
from areal.engine.commands import Row
from areal.engine.engine import TrainEngine
from areal.engine.place import rank_jobs
from areal.engine.settings import EngineSettings
from areal.weights import sink

MakeSettings = Callable[..., EngineSettings]
GroupRows = Callable[..., list[Row]]
START_S = 240.0


@dataclass
class Net:
    scheduler: Scheduler
    ranks: Sequence[Process]
    client: EngineClient


def jobs_of(scheduler: Scheduler, run_dir: Path, settings: EngineSettings, within_s: float = START_S) -> list[Job]:
    (run_dir / "processes").mkdir(parents=True, exist_ok=True)
    return rank_jobs("rank", settings.spec(), scheduler, run_dir / "processes", within_s=within_s)


@asynccontextmanager
async def net_of(run_dir: Path, settings: EngineSettings, fault: str = "") -> AsyncIterator[Net]:
    """fault: of rank 1 (faulty_rank.py)."""
    async with LocalScheduler(run_dir, grace_s=1) as scheduler:
        jobs = jobs_of(scheduler, run_dir, settings)
        if fault:
            jobs[1] = replace(jobs[1], module="tests.engine.faulty_rank", env={"FAULT": fault})
        ranks = await scheduler.start(*jobs)
        leader, *_ = await asyncio.gather(*(rank.ready(START_S) for rank in ranks))
        url, within_s = leader["url"], settings.step_timeout_seconds
        async with EngineClient(url, scheduler.run_token, within_s=within_s) as client:
            yield Net(scheduler, ranks, client)


async def test_two_ranks_answer_as_one_and_refuse_as_one(
    make_settings: MakeSettings, make_row: Callable[..., Row], group_rows: GroupRows, tmp_path: Path
) -> None:
    """Scores, a step, a publication, a checkpoint and its resumption; what all refuse is an answer after which they go on."""
    settings = make_settings(backend="fsdp:d2", transfer="disk")
    rows, alone = group_rows(), TrainEngine.load(make_settings())
    leftover = tmp_path / "run" / "processes" / "rank.meeting-of-an-earlier-life"
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(b"\x00url/1 tcp://127.0.0.1:1")
    async with net_of(tmp_path / "run", settings) as net:
        assert not leftover.exists()
        [meeting] = leftover.parent.glob("*.meeting-*")
        assert meeting.stat().st_mode & 0o777 == 0o600
        client = net.client
        for theirs, ours in zip(await client.score(rows), alone.score(rows), strict=True):
            np.testing.assert_allclose(theirs, ours, atol=1e-5)
        with pytest.raises(TrainingError, match=r"session broken: logprobs of trained token 2 is nan"):
            await client.train_step([make_row([1, 2, 3], [2], session="broken", logprobs=float("nan"))], 0, 0)
        with pytest.raises(ShapeError, match="session first"):
            await client.score([make_row([1, 2], [0], session="first")])
        stats, expected = await client.train_step(rows, 0, 0), alone.train_step(rows, 0, 0)
        assert stats["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert stats["trained_tokens"] == expected["trained_tokens"]
        received = sink("disk", tmp_path / "run").receive(await client.publish(1))
        mine = dict(alone.named_tensors())
        assert received.keys() == mine.keys()
        assert all(torch.allclose(received[name], mine[name], atol=1e-5) for name in mine)
        before = resource.prlimit(net.ranks[1].pid, resource.RLIMIT_FSIZE, (1 << 15, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointError, match=r"step-000001 could not be written: File too large"):
            await client.save(str(tmp_path / "step-000001"), 1, full=True)  # rank 1's part does not fit
        resource.prlimit(net.ranks[1].pid, resource.RLIMIT_FSIZE, before)
        assert not list(tmp_path.glob("*step-000001*"))
        await client.save(str(tmp_path / "step-000001"), 1, full=True)
        assert {f"recovery/pieces-{rank}.safetensors" for rank in range(2)} < read_mark(
            tmp_path / "step-000001"
        ).files.keys()
        await client.train_step(rows, 1, 1)
        assert (await client.restore(str(tmp_path / "step-000001")))["optimizer_steps"] == 1
        again = [await client.score(rows) for _ in range(2)]
        np.testing.assert_array_equal(np.concatenate(again[0]), np.concatenate(again[1]))
        for theirs, ours in zip(again[0], alone.score(rows), strict=True):
            np.testing.assert_allclose(theirs, ours, atol=1e-4)
        await client.stop()
        assert await asyncio.gather(*(rank.wait() for rank in net.ranks)) == [0, 0]
    torch.use_deterministic_algorithms(False)


async def broken_step(net: Net, rows: list[Row]) -> str:
    """What the run says of a step that cannot be done."""
    with pytest.raises(ProcessDied) as caught:
        await unless_a_process_dies(net.client.train_step(rows, 0, 0), net.scheduler)
    return str(caught.value)


@pytest.mark.heavy
@pytest.mark.parametrize("victim", [0, 1])
async def test_a_rank_that_is_killed_in_the_middle_of_a_step_is_the_reason(
    make_settings: MakeSettings, group_rows: GroupRows, tmp_path: Path, victim: int
) -> None:
    """And not the broken connections of the others."""
    async with net_of(tmp_path / "run", make_settings(backend="fsdp:d2", max_tokens_per_mb=64)) as net:
        step = asyncio.create_task(broken_step(net, group_rows(groups=400)))
        await asyncio.sleep(0.5)
        os.kill(net.ranks[victim].pid, signal.SIGKILL)
        said = await step
    assert said.startswith(f"rank-{victim} (pid {net.ranks[victim].pid}) was killed by signal 9")


@pytest.mark.heavy
async def test_T081_a_rank_that_is_killed_while_it_writes_its_part_leaves_the_checkpoint_before(
    make_settings: MakeSettings, group_rows: GroupRows, tmp_path: Path
) -> None:
    """And what starts again goes on from that, as if nothing had been written."""
    settings, rows = make_settings(backend="fsdp:d2"), group_rows()
    first, second = (str(tmp_path / f"step-00000{step}") for step in (1, 2))
    async with net_of(tmp_path / "run", settings, fault="writing") as net:
        await net.client.train_step(rows, 0, 0)
        await net.client.save(first, 1, full=True)
        before = await net.client.score(rows)
        await net.client.train_step(rows, 1, 1)
        saving = asyncio.create_task(unless_a_process_dies(net.client.save(second, 2, full=True), net.scheduler))
        async with asyncio.timeout(START_S):
            while not (tmp_path / "reached").exists():  # noqa: ASYNC110  (another process makes it)
                await asyncio.sleep(0.02)
        os.kill(net.ranks[1].pid, signal.SIGKILL)
        with pytest.raises(ProcessDied, match=rf"rank-1 \(pid {net.ranks[1].pid}\) was killed by signal 9"):
            await saving
    assert [each.path for each in checkpoints(tmp_path)] == [Path(first)]
    assert damage(Path(first), recovery=True) is None
    async with net_of(tmp_path / "run", settings) as net:
        assert (await net.client.restore(first))["step"] == 1
        np.testing.assert_array_equal(np.concatenate(await net.client.score(rows)), np.concatenate(before))
        await net.client.save(second, 2, full=True)
    assert damage(Path(second), recovery=True) is None


@pytest.mark.heavy
async def test_what_one_rank_alone_cannot_do_ends_the_step_with_its_reason(
    make_settings: MakeSettings, group_rows: GroupRows, tmp_path: Path
) -> None:
    settings = make_settings(backend="fsdp:d2", step_timeout_seconds=60)
    async with net_of(tmp_path / "run", settings, fault="alone") as net:
        said = await broken_step(net, group_rows())
    assert "rank-1 could not do TrainStep, which the other ranks could" in said
    assert "MemoryError: no room for the moments, on this rank alone" in said


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("stuck", r"TrainStep was not done within 8 s.*rank-1 hangs, here:.*in _fault"),
        # Nothing but the last resort can speak: it ends itself, unless its leader, who asks in vain, is first.
        ("native", r"rank-1 \(pid .*in train_step|rank-1 hangs: it does not even say where it stands"),
    ],
)
async def test_a_rank_that_hangs_is_named_with_its_stack(
    make_settings: MakeSettings, group_rows: GroupRows, tmp_path: Path, fault: str, words: str
) -> None:
    settings = make_settings(backend="fsdp:d2", step_timeout_seconds=8)
    async with net_of(tmp_path / "run", settings, fault=fault) as net:
        said = await broken_step(net, group_rows())
        async with asyncio.timeout(START_S):
            while "in _fault" not in (tmp_path / "run" / "logs" / "rank-1.log").read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    assert re.search(words, said, re.DOTALL), said


@pytest.mark.heavy
@pytest.mark.parametrize("victim", [0, 1])
async def test_a_rank_that_is_stopped_is_named(
    make_settings: MakeSettings, group_rows: GroupRows, tmp_path: Path, victim: int
) -> None:
    async with net_of(tmp_path / "run", make_settings(backend="fsdp:d2", step_timeout_seconds=4)) as net:
        os.kill(net.ranks[victim].pid, signal.SIGSTOP)
        said = await broken_step(net, group_rows())
    assert f"rank-{victim} hangs" in said or (victim == 0 and "which leads its net, hangs" in said)


@pytest.mark.heavy
async def test_a_rank_that_does_not_come_is_named(make_settings: MakeSettings, tmp_path: Path) -> None:
    async with LocalScheduler(tmp_path / "run", grace_s=1) as scheduler:
        jobs = jobs_of(scheduler, tmp_path / "run", make_settings(backend="fsdp:d3"), within_s=3)
        ranks = await scheduler.start(*jobs[:2])
        where = re.escape(socket.gethostname())
        with pytest.raises(
            ProcessDied, match=rf"(?s)rank-2 did not come on {where} within 3 s.*rank-2 has said nothing"
        ):
            await asyncio.gather(*(rank.ready(START_S) for rank in ranks))
