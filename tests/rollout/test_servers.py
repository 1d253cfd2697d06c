"""A version moves on a quorum of real inference servers; one that cannot follow gets no traffic until it can (settled 8)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from areal.base.errors import BackendError, TrainingError
from areal.base.types import Limits
from areal.engine.client import EngineClient
from areal.engine.settings import EngineSettings
from areal.inference.client import HttpBackend
from areal.inference.router import Router
from areal.models.tiny import write_tiny
from areal.rollout.servers import InService
from areal.rollout.staleness import StalenessGate
from areal.rollout.weights import WeightPublisher
from areal.web.app import create_app
from areal.web.client import JsonClient, UnexpectedAnswer
from tests.proxy.service import serving, until
from tests.rollout.asked import versions_of

TOKEN = "run-token"


@dataclass
class Child:
    process: subprocess.Popen[bytes]
    url: str
    run_dir: Path


def start(name: str, module: str, run_dir: Path, job: dict[str, Any]) -> Child:
    ready, spec = run_dir / f"{name}.ready.json", run_dir / f"{name}.spec.json"
    facts = {"name": name, "run_dir": str(run_dir), "run_token": TOKEN, "ready_file": str(ready)}
    spec.touch(mode=0o600)
    spec.write_text(json.dumps(facts | {"parent_pid": os.getpid()} | job))
    return Child(subprocess.Popen([sys.executable, "-m", module, "--spec", str(spec)]), str(ready), run_dir)


async def url_of(child: Child) -> Child:
    while not Path(child.url).exists():
        assert child.process.poll() is None
        await asyncio.sleep(0.05)
    return Child(child.process, json.loads(Path(child.url).read_text())["url"], child.run_dir)


@pytest.fixture
def children(tmp_path: Path) -> Iterator[list[Child]]:
    """A rank, a server of the same run, and one that looks for weights in a run folder of its own."""
    model = tmp_path / "model"
    write_tiny(model)
    folders = [tmp_path / "run", tmp_path / "elsewhere"]
    for folder in folders:
        folder.mkdir()
    settings = EngineSettings.model_validate(
        {
            "model_dir": str(model),
            "algorithm": "ppo",
            "threads": 1,
            "total_steps": 9,
            "optimizer": {},
            "transfer": "disk",
        }
    )
    server = {"model_dir": str(model), "threads": 1, "max_context": 64, "kv_tokens": 1024}
    native = "areal.inference.native.server"
    started = [
        start("rank-0", "areal.engine.worker", folders[0], settings.spec()),
        start("server-0", native, folders[0], server),
        start("server-1", native, folders[1], server),
    ]
    yield started
    for child in started:
        child.process.kill()
        child.process.wait()


@dataclass
class Run:
    """A controller's end and one worker's, in this process; `own` is the worker's own server and refuses at first."""

    strict: WeightPublisher  # with a quorum of two
    publisher: WeightPublisher
    impatient: WeightPublisher  # with the rank
    gate: StalenessGate
    router: Router
    other: Child
    own: Child
    rank: Child
    asked: int = 0

    async def answer(self) -> set[int]:
        """The versions that a new session's tokens have."""
        self.asked += 1
        return await versions_of(self.router, self.asked)

    def place(self) -> int:
        """Where a new session goes: 0 is the worker's own server."""
        self.asked += 1
        return self.router.place(f"s{self.asked}")

    async def labels(self) -> list[int]:
        return [(await backend.health()).version for backend in self.router.backends]

    def patience(self, seconds: float, *servers: int) -> None:
        """How long these may take to load; those that work have long, however busy the machine is."""
        for server in servers:
            self.router.backends[server]._load_s = seconds

    async def back(self) -> None:
        await until(lambda: not self.publisher.out, 60)


@pytest.fixture
async def run(children: list[Child], store: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    monkeypatch.setattr("areal.rollout.weights.ASK_AGAIN_S", 0.1)
    monkeypatch.setattr("areal.rollout.weights.LONGEST_PAUSE_S", 0.2)
    rank, other, own = [await url_of(child) for child in children]
    async with AsyncExitStack() as stack:
        backends = {one.url: HttpBackend("native", one.url, TOKEN, load_s=60.0) for one in (own, other)}
        for backend in backends.values():
            stack.push_async_callback(backend.close)
        router = Router(list(backends.values()), own=1)
        app = create_app("worker", max_body_bytes=1 << 20)
        InService(router, list(backends), TOKEN).add_to(app)
        worker = await stack.enter_async_context(
            JsonClient(await stack.enter_async_context(serving(app)), bearer=TOKEN)
        )
        with pytest.raises(UnexpectedAnswer, match="has no inference server http://elsewhere"):
            await worker.post("/servers", {"serving": ["http://elsewhere"], "serial": 1})
        engine = await stack.enter_async_context(EngineClient(rank.url, TOKEN))
        gate = await StalenessGate.open(store.training, Limits(9, 0, 9), incarnation="test")
        strict = await stack.enter_async_context(WeightPublisher(engine, backends, [worker], gate, quorum=2))
        publisher = await stack.enter_async_context(WeightPublisher(engine, backends, [worker], gate))
        impatient = await stack.enter_async_context(WeightPublisher(engine, backends, [worker], gate, timeout_s=0.3))
        yield Run(strict, publisher, impatient, gate, router, other, own, rank)


async def test_a_server_that_cannot_follow_is_left_out_until_it_can(run: Run) -> None:
    publish, own, other = run.publisher.publish, run.own, run.other
    with pytest.raises(BackendError, match=r"1 of 2 inference servers .*weights.quorum=2 must: .*it is not read"):
        await run.strict.publish([])
    assert run.gate.current.label == 0
    assert run.place() == 0
    await publish([])  # the worker's own server refuses the manifest of another run folder
    assert run.publisher.out == (own.url,)
    assert run.gate.current.label == 1
    assert await run.labels() == [0, 1]  # it keeps its old label
    assert run.place() == 1
    assert await run.answer() == {1}
    await publish([])  # the run goes on
    own.run_dir.rename(own.run_dir.with_name("was elsewhere"))
    own.run_dir.symlink_to(other.run_dir)  # now it finds them
    await run.back()
    assert await run.labels() == [2, 2]
    assert run.place() == 0
    assert await run.answer() == {2}

    own.process.send_signal(signal.SIGSTOP)  # it answers nothing any more
    run.patience(1.0, 0)
    await publish([])
    await publish([])
    assert run.publisher.out == (own.url,)
    assert await run.answer() == {4}
    own.process.send_signal(signal.SIGCONT)
    run.patience(60.0, 0)
    await publish([])
    await run.back()
    assert await run.labels() == [5, 5]
    assert run.place() == 0

    run.rank.process.send_signal(signal.SIGSTOP)
    with pytest.raises(TrainingError, match=r"the rank did not publish version 6 within 0.3 s"):
        await run.impatient.publish([])
    assert run.gate.current.label == 5
    assert await run.labels() == [5, 5]
    run.rank.process.send_signal(signal.SIGCONT)

    for child in (own, other):
        child.process.send_signal(signal.SIGSTOP)
    run.patience(1.0, 0, 1)
    with pytest.raises(BackendError, match=r"2 of 2 inference servers could not load version 6, weights.quorum=1 must"):
        await publish([])
    assert run.gate.current.label == 5
