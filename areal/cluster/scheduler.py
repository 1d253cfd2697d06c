"""Where processes run. One Protocol: start a job, watch it, stop it; the table is in cluster/__init__.py.

    async with LocalScheduler(run_dir) as scheduler:
        [process] = await scheduler.start(Job("server", module="areal.inference.native.server", spec={...}))
        ready = await process.ready(timeout_s=300)        # {"url": "http://127.0.0.1:41873"}

A job is `python -m <module> --spec FILE`: its settings travel in a file of mode 0600, so no secret stands on a command line.
The child binds its own port and reports it (cluster/child.py): ports are never guessed. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from areal.base.errors import ProcessDied


@dataclass(frozen=True, slots=True)
class Job:
    """What to start. name: unique within the run (`server-0`), also the name of its log file."""

    name: str
    module: str
    spec: Mapping[str, Any]
    env: Mapping[str, str] = field(default_factory=dict)


class Process(Protocol):
    """One started process."""

    name: str
    pid: int

    async def ready(self, timeout_s: float) -> dict[str, Any]:
        """What the child reported. Raises ProcessDied (with its last log lines) if it ends first or takes longer."""
        ...

    async def wait(self) -> int:
        """Its exit code."""
        ...

    async def stop(self, grace_s: float = 10.0) -> None:
        """SIGTERM to the whole tree, then SIGKILL after grace_s."""
        ...

    def last_lines(self, n: int = 20) -> str:
        """Of its log."""
        ...

    def death(self) -> ProcessDied:
        """How it ended, with its last lines: the error to raise when first_death returned it."""
        ...


class Scheduler(Protocol):
    """`async with` stops everything it started, also on an exception or Ctrl-C. run_token: the run's secret, in every spec."""

    run_token: str

    async def start(self, *jobs: Job) -> list[Process]: ...

    async def first_death(self) -> Process:
        """Returns when a process ends that nobody stopped."""
        ...

    def log_path(self, name: str) -> Path: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...
