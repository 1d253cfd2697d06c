"""SIGKILL of inference servers, which are processes of a real scheduler: out at once, started again, and used again once they are current."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from areal.base.errors import BackendError
from areal.base.types import Limits
from areal.cluster.kept import KeptProcess
from areal.cluster.local import LocalScheduler
from areal.cluster.scheduler import Job, unless_a_process_dies
from areal.inference.client import HttpBackend
from areal.inference.router import Router
from areal.launch import on_port_of
from areal.rollout.servers import InService
from areal.rollout.staleness import StalenessGate
from areal.rollout.weights import WeightPublisher
from areal.web.app import create_app
from areal.web.client import JsonClient
from tests.proxy.service import serving, until
from tests.rollout.asked import versions_of


class Labels:
    """Stands where the publisher has the policy's rank: a version is a label."""

    async def publish(self, version: int, *, retire: list[int]) -> dict[str, Any]:
        return {"version": version}


@dataclass
class Run:
    """A controller's end and one worker's, in this process."""

    folder: Path
    script: Path
    publisher: WeightPublisher
    router: Router
    scheduler: LocalScheduler
    asked: int = 0
    killed: list[int] = field(default_factory=list)

    async def answer(self) -> set[int]:
        """The versions that a new session's tokens have."""
        self.asked += 1
        return await versions_of(self.router, self.asked)

    async def kill(self, *servers: int) -> None:
        """Returns when the worker has heard of it."""
        for server in servers:
            ready = self.folder / "processes" / f"server-{server}.ready.json"
            self.killed.append(json.loads(ready.read_text())["pid"])
            os.kill(self.killed[-1], signal.SIGKILL)
        await until(lambda: not set(self.router._serving) & set(servers))

    async def back(self) -> None:
        await until(lambda: not self.publisher.out)
        await until(lambda: len(self.router._serving) == 2)

    async def labels(self) -> list[int]:
        return [(await backend.health()).version for backend in self.router.backends]


@pytest.fixture
async def run(tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    script, folder = tmp_path / "script.jsonl", tmp_path / "run"
    script.write_text('{"pieces": ["a", "b", "c"]}\n')
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(LocalScheduler(folder))
        jobs = [Job(f"server-{k}", "areal.inference.scripted.server", {"path": str(script)}) for k in range(2)]
        processes = await scheduler.start(*jobs)
        urls = [str((await process.ready(60))["url"]) for process in processes]
        kept = [
            KeptProcess(scheduler, on_port_of(url, job), process, startup_s=60)
            for url, job, process in zip(urls, jobs, processes, strict=True)
        ]
        backends = {url: HttpBackend("scripted", url, scheduler.run_token) for url in urls}
        for backend in backends.values():
            stack.push_async_callback(backend.close)
        router = Router(list(backends.values()), own=1)
        app = create_app("worker", max_body_bytes=1 << 20)
        InService(router, urls, scheduler.run_token).add_to(app)
        at = await stack.enter_async_context(serving(app))
        worker = await stack.enter_async_context(JsonClient(at, bearer=scheduler.run_token))
        gate = await StalenessGate.open(store.training, Limits(9, 0, 9), incarnation="test")
        labels: Any = Labels()
        publisher = await stack.enter_async_context(WeightPublisher(labels, backends, [worker], gate, kept=kept))
        yield Run(folder, script, publisher, router, scheduler)


async def test_a_server_that_is_killed_is_out_at_once_and_comes_back_current(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await run.kill(0)  # nothing is published yet: it has what the run began with
    assert await run.answer() == {0}
    await run.back()
    for _ in range(2):
        await run.publisher.publish([])
    assert await run.labels() == [2, 2]

    await run.kill(0, 1)  # whoever asks now waits
    assert await run.answer() == {2}
    await run.back()
    assert await run.labels() == [2, 2]

    await run.kill(0, 1)
    assert (await run.publisher.publish([])).label == 3  # waits for the quorum, and not for the other
    assert await run.answer() == {3}
    await run.back()
    assert await run.labels() == [3, 3]

    monkeypatch.setattr("areal.cluster.kept.TRIES", 1)  # both have had it
    run.script.unlink()
    await run.kill(0)
    await until(lambda: "is given up: server-0 was started again 1 times in a row and did not stay" in caplog.text)
    assert (await run.publisher.publish([])).label == 4  # without it
    assert await run.answer() == {4}
    failure = asyncio.create_task(
        unless_a_process_dies(run.publisher.failure(), run.scheduler, spared=run.publisher.kept)
    )
    await run.kill(1)
    with pytest.raises(BackendError, match=r"2 of 2 inference servers.*server-\d \(pid \d+\) was killed by signal 9"):
        await failure
    assert len(set(run.killed)) == len(run.killed)
