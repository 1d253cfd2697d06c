"""The processes that are measured: our gateway, worker and scripted server as a run starts them, and what stands beside them.

    async with Stack() as stack:                             # a run's folder, store, keys and registry, in a temporary folder
        fake = await stack.script("fake_backend.py", "--events", "64")
        worker = await stack.worker("w0", fake, config)      # rollout.backend and model as the config says
        gateway = await stack.gateway()
        await stack.register("w1", fake.url)                 # anything that answers may stand in a worker's place
        gateway.cpu_s(), gateway.rss()

Nothing of the product is replaced or patched; only training is missing, so limits are published here. Everything ends with
the block.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from areal.base.types import Limits, WorkerInfo
from areal.config.run import RunConfig
from areal.store import open_store, store_url
from areal.web.auth import SessionKeys
from gateway_rig.client import ADMIN_KEY

HERE = Path(__file__).parent
START_S = 120.0
_MANY = 10_000_000


@dataclass(frozen=True, slots=True)
class Running:
    """A started process and the URL where it answers. ready_s: how long that took."""

    name: str
    url: str
    process: psutil.Process
    ready_s: float = 0.0

    def cpu_s(self) -> float:
        """CPU seconds so far, user and system, of it and of what it started."""
        return sum(sum(one.cpu_times()[:2]) for one in (self.process, *self.process.children(recursive=True)))

    def rss(self) -> int:
        """Bytes of memory resident now."""
        return int(self.process.memory_info().rss)


class Stack:
    """A run without its controller: store, keys, registry, and the processes that use them."""

    async def __aenter__(self) -> Self:
        self._exit = AsyncExitStack()
        self.folder = Path(self._exit.enter_context(tempfile.TemporaryDirectory(prefix="areal-bench-")))
        self._started: list[subprocess.Popen[Any]] = []
        self._registered: dict[str, str] = {}
        self.keys = SessionKeys.load(self.folder)
        self._store_url = store_url(self.folder / "store.sqlite")
        self.store = await self._exit.enter_async_context(await open_store(self._store_url))
        await self.store.training.set_limits(Limits(max_concurrent=_MANY, max_lag=_MANY, batch_groups=_MANY))
        self._beating = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._beating.cancel()
        for process in reversed(self._started):
            process.terminate()
        for process in self._started:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        await self._exit.aclose()

    async def script(self, name: str, *arguments: str) -> Running:
        """A file of this folder that prints its URL."""
        return await self.program(name, [sys.executable, str(HERE / name), *arguments])

    async def program(
        self, name: str, command: list[str], *, url: str = "", environment: Mapping[str, str] | None = None
    ) -> Running:
        """Any program; without a url it prints one as its first line. Output goes to a file of the stack's folder."""
        process = self._popen(name, command, environment or {}, piped=not url)
        if not url:
            assert process.stdout is not None
            url = (await asyncio.to_thread(process.stdout.readline)).decode().strip()
            if not url:
                raise RuntimeError(f"{name} did not start: {self.log(name)}")
        return Running(name, url, psutil.Process(process.pid))

    def _popen(
        self, name: str, command: list[str], environment: Mapping[str, str], *, piped: bool
    ) -> subprocess.Popen[Any]:
        with (self.folder / f"{name}.log").open("wb") as log:
            out = subprocess.PIPE if piped else log
            process = subprocess.Popen(command, stdout=out, stderr=log, env={**os.environ, **environment})
        self._started.append(process)
        return process

    def log(self, name: str) -> str:
        """The end of what a process said."""
        return (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]

    async def gateway(self) -> Running:
        return await self._child(
            "gateway",
            "areal.gateway.server",
            host="127.0.0.1", port=0, log_level="info", log_dir=None, max_body_bytes=32 << 20, run_id="bench",
            store_url=self._store_url, signing_key_path=str(self.folder / "signing.key"), admin_api_key=ADMIN_KEY,
            model_names=["default"],
        )  # fmt: skip

    async def worker(self, name: str, server: Running, config: Mapping[str, Any], model_dir: str = "") -> Running:
        """A rollout worker that samples from `server`. config: dotted keys of a run config."""
        settings: dict[str, Any] = {"rollout": {"agent": {"mode": "online", "admin_api_key": ADMIN_KEY}}}
        for key, value in config.items():
            place = settings
            *path, last = key.split(".")
            for part in path:
                place = place.setdefault(part, {})
            place[last] = value
        run = RunConfig.model_validate(settings)
        return await self._child(
            name,
            "areal.rollout.worker",
            worker_id=name, model_dir=model_dir, servers=[server.url], store_url=self._store_url,
            signing_key_path=str(self.folder / "signing.key"), policy_names=["default"],
            config=run.model_dump(mode="json"),
        )  # fmt: skip

    async def scripted(self, lines: list[dict[str, Any]]) -> tuple[Running, Path]:
        """The scripted inference server, and its script."""
        path = self.folder / "script.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return await self._child("scripted", "areal.inference.scripted.server", path=str(path)), path

    async def register(self, worker_id: str, url: str) -> str:
        """Put a process that is no worker of ours into the registry, and keep it there. Returns a key that leads to it."""
        self._registered[worker_id] = url
        await self._heartbeats()
        return self.keys.mint(worker_id)

    async def _child(self, name: str, module: str, **job: Any) -> Running:
        ready, file = self.folder / f"{name}.ready.json", self.folder / f"{name}.spec.json"
        head = {"name": name, "run_dir": str(self.folder), "run_token": "t", "ready_file": str(ready)}
        file.touch(0o600)
        file.write_text(json.dumps({**head, "parent_pid": os.getpid(), **job}))
        began = time.perf_counter()
        environment = {"XDG_STATE_HOME": str(self.folder)}
        command = [sys.executable, "-m", module, "--spec", str(file)]
        running = await self.program(name, command, url="starting", environment=environment)
        while not ready.exists():
            if not running.process.is_running() or running.process.status() == psutil.STATUS_ZOMBIE:
                raise RuntimeError(f"{name} did not start: {self.log(name)}")
            if time.perf_counter() - began > START_S:
                raise RuntimeError(f"{name} was not ready after {START_S:.0f} s: {self.log(name)}")
            await asyncio.sleep(0.01)
        return Running(name, json.loads(ready.read_text())["url"], running.process, time.perf_counter() - began)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(1)
            await self._heartbeats()

    async def _heartbeats(self) -> None:
        for worker_id, url in self._registered.items():
            worker = WorkerInfo(worker_id, url, os.getpid(), socket.gethostname(), time.time())
            await self.store.registry.heartbeat(worker)
