"""Where processes run. One Protocol: start a job, watch it, stop it; the table is in cluster/__init__.py.

    async with LocalScheduler(run_dir) as scheduler:
        [process] = await scheduler.start(Job("server", module="areal.inference.native.server", spec={...}))
        ready = await process.ready(timeout_s=300)        # {"url": "http://127.0.0.1:41873"}
        await unless_a_process_dies(work(), scheduler)    # work that needs them

A job is `python -m <module> --spec FILE`: its settings travel in a file of mode 0600, so no secret stands on a command line.
The child binds its own port and reports it (cluster/child.py): ports are never guessed. No torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from areal.base.errors import ArealError, ProcessDied

DEATH_S = 8.0  # a broken link is seen before the end of the process behind it, on a busy machine long before

T = TypeVar("T")


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


async def unless_a_process_dies(
    work: Coroutine[Any, Any, T], scheduler: Scheduler, *, spared: Collection[str] = ()
) -> T:
    """What `work` returns; a process that ends on its own ends it at once, with that process's last lines as the reason. spared: names of
    processes that somebody keeps alive (kept.py), whose deaths are theirs to judge."""
    task = asyncio.create_task(work, name="work")
    death = asyncio.create_task(_death_but_of(spared, scheduler), name="deaths")
    try:
        await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED)
        if task.done() and task.exception() is not None:
            await asyncio.wait({death}, timeout=DEATH_S)  # it may have failed because a process died
        if death.done():
            raise death.result().death()
        return await task
    finally:
        for each in (task, death):
            each.cancel()
            with suppress(asyncio.CancelledError, ArealError):
                await each


async def _death_but_of(spared: Collection[str], scheduler: Scheduler) -> Process:
    while (process := await scheduler.first_death()).name in spared:
        pass
    return process
