"""A service out of its real processes, any of which a test may stop, kill and start again: inference server, workers, gateways.

    with Service(folder, script, agent={"session_timeout_seconds": 3}) as service:
        service.start("w0", "w1", "g0", "g1")
        service.kill("w0"); service.start("w0")        # the same logical worker on another port
        service.url("g0")

Started with the specs that a run writes (docs/architecture.md, "How a child starts"); the controller is the test's process.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

from areal.base.types import Limits
from areal.config.load import load_config
from areal.store import open_store, store_url
from areal.store.base import Store
from tests.ports import quiet_port

ADMIN = "admin-key-of-the-fault-tests"
RUN_TOKEN = "run-token-of-the-fault-tests"
SOON_S = 60.0  # generous: the machine may be busy
T = TypeVar("T")


class Service:
    """Scripted server `s0`, workers `w…`, gateways `g…`, each a process; killed at the end of the block."""

    def __init__(self, folder: Path, script: list[dict[str, Any]], *, agent: dict[str, Any] | None = None) -> None:
        self.folder = folder
        self.script = folder / "script.jsonl"
        self.script.write_text("".join(json.dumps(line) + "\n" for line in script))
        self.store_url = store_url(folder / "store.sqlite")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ports: dict[str, int] = {}  # of gateways, which keep theirs
        self.environment = os.environ | {"XDG_STATE_HOME": str(folder / "state")}
        overrides = [
            "rollout.backend=scripted:d1",
            f"rollout.scripted.path={self.script}",
            "rollout.agent.mode=online",
            f"rollout.agent.admin_api_key={ADMIN}",
            *(f"rollout.agent.{name}={value}" for name, value in (agent or {}).items()),
        ]
        self.config = load_config(None, overrides)

    def __enter__(self) -> Self:
        self.read(lambda store: store.training.set_limits(Limits(max_concurrent=500, max_lag=10, batch_groups=500)))
        self.start("s0")
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()

    def start(self, *names: str) -> None:
        """Start these processes side by side, and wait until each answers."""
        for name in names:
            (self.folder / f"{name}.ready.json").unlink(missing_ok=True)
            self._spawn(name)
        for name in names:
            ready = self.folder / f"{name}.ready.json"
            until(lambda name=name, ready=ready: ready.exists() or self._died(name))

    def kill(self, name: str) -> None:
        """SIGKILL, and wait for its end."""
        self.processes[name].kill()
        self.processes[name].wait(timeout=SOON_S)

    def terminate(self, name: str) -> None:
        """SIGTERM: it drains."""
        self.processes[name].send_signal(signal.SIGTERM)

    def ended(self, name: str) -> int:
        """Wait for its end; its exit code."""
        return self.processes[name].wait(timeout=SOON_S)

    def url(self, name: str) -> str:
        url: str = json.loads((self.folder / f"{name}.ready.json").read_text())["url"]
        return url

    def read(self, work: Callable[[Store], Coroutine[Any, Any, T]]) -> T:
        """What `work(store)` finds, through a connection of its own."""

        async def opened() -> T:
            async with await open_store(self.store_url) as store:
                return await work(store)

        return asyncio.run(opened())

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def _died(self, name: str) -> bool:
        assert self.processes[name].poll() is None, self.log(name)
        return False

    def _spawn(self, name: str) -> None:
        module, job = self._job(name)
        spec = self.folder / f"{name}.spec.json"
        spec.touch(0o600)
        head = {
            "name": name,
            "run_dir": str(self.folder),
            "run_token": RUN_TOKEN,
            "ready_file": str(self.folder / f"{name}.ready.json"),
            "parent_pid": os.getpid(),
        }
        spec.write_text(json.dumps(head | job))
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", module, "--spec", str(spec)],
                stdout=log,
                stderr=log,
                env=self.environment,
            )

    def _job(self, name: str) -> tuple[str, dict[str, Any]]:
        common = {"store_url": self.store_url, "signing_key_path": str(self.folder / "signing.key")}
        if name.startswith("s"):
            return "areal.inference.scripted.server", {"path": str(self.script)}
        if name.startswith("w"):
            return "areal.rollout.worker", common | {
                "worker_id": name,
                "model_dir": "",
                "servers": [self.url("s0")],
                "policy_names": ["default"],
                "config": self.config.model_dump(mode="json"),
            }
        return "areal.gateway.server", common | {
            "host": "127.0.0.1",
            "port": self.ports.setdefault(name, quiet_port()),
            "log_dir": "",
            "max_body_bytes": 1 << 20,
            "run_id": "faults/run",
            "admin_api_key": ADMIN,
            "internal_token": self.config.rollout.agent.internal_token,
            "model_names": ["default"],
        }


def until(condition: Callable[[], object]) -> None:
    """Wait for something that another process brings about."""
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
