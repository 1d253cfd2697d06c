"""Processes on this host. Starts them, waits until they report, notices their death, stops whole trees.

    async with LocalScheduler(run_dir, log_dir) as scheduler:             # takes run.lock; one run per folder
        [server] = await scheduler.start(Job("server-0", "areal.inference.native.server", {...}))
        facts = await server.ready(timeout_s=300)
        ...                                                                # leaving the block leaves no process behind

A process leads a session of its own, so Ctrl-C reaches the controller alone, which stops the others. If the controller is
killed, cluster/child.py ends each child by itself, and the next run in the folder ends what is still left (by the mark of the
run that died). No torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any, Self

from areal.base.errors import ConfigError, ProcessDied
from areal.base.logs import warn
from areal.base.names import safe_name
from areal.cluster.child import RESERVED
from areal.cluster.log_tail import last_lines
from areal.cluster.process_tree import KILL_S, MARK, end, how_it_ended, kill, members
from areal.cluster.run_lock import RunLock
from areal.cluster.scheduler import Job, Process

_LOOK_S = 0.05  # between two looks for a ready file
STOP_GRACE_S = 10.0


class LocalProcess:
    """A started process. Implements scheduler.Process; made by LocalScheduler."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, mark: str, ready_file: Path, log: Path, log_start: int
    ) -> None:
        self.name = name
        self.pid = process.pid
        self.log = log
        self.stopped = False
        self._process = process
        self._mark = mark
        self._ready_file = ready_file
        self._log_start = log_start
        self.exit = asyncio.ensure_future(process.wait())

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def ready(self, timeout_s: float) -> dict[str, Any]:
        """What the child reported. Raises ProcessDied if it ends first or takes longer than timeout_s."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not self._ready_file.exists():
            await asyncio.wait({self.exit}, timeout=_LOOK_S)  # wakes at once when it ends
            if self.exit.done():
                raise self.death()
            if asyncio.get_running_loop().time() >= deadline:
                raise ProcessDied(
                    f"{self.name} (pid {self.pid}) did not report ready within {timeout_s:.0f} s; "
                    f"raise scheduler.startup_timeout_seconds if it only needs longer. {self._said()}"
                )
        facts = json.loads(self._ready_file.read_bytes())
        if not isinstance(facts, dict):
            raise ProcessDied(
                f"{self.name} (pid {self.pid}) reported {facts!r:.200} as ready, not an object. {self._said()}"
            )
        return facts

    async def wait(self) -> int:
        """Its exit code; negative = the signal that killed it."""
        return await asyncio.shield(self.exit)

    def death(self) -> ProcessDied:
        """How it ended and what it said last, as an error to raise. The process has ended."""
        code = self._process.returncode
        ended = how_it_ended(code) if code is not None else "is still running"
        return ProcessDied(f"{self.name} (pid {self.pid}) {ended}. {self._said()}")

    def _said(self) -> str:
        lines = self.last_lines()
        return f"Its last lines ({self.log}):\n{lines}" if lines else f"It wrote nothing to {self.log}"

    def last_lines(self, n: int = 20) -> str:
        """Of what this process wrote; an earlier one's lines in the same file are left out."""
        return last_lines(self.log, start=self._log_start, n=n)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """SIGTERM to the whole tree, SIGKILL to what is left of it after grace_s. Returns when all have ended, but for what hangs in the
        kernel, which nobody can end: that is said and left behind."""
        self.stopped = True
        try:
            kill(members(self._mark, self.pid), signal.SIGTERM)
            await asyncio.wait({self.exit}, timeout=grace_s)
        finally:  # also when we are cancelled: nothing stays
            self.end_tree()
        await asyncio.wait({self.exit}, timeout=KILL_S)
        if not self.exit.done():
            warn(
                "Scheduler",
                f"{self.name} (pid {self.pid}) cannot be ended: it waits for a disk or device that does not answer",
            )

    def end_tree(self) -> None:
        """Kill what is left of it, itself included. Only while it runs or right after its end."""
        end(self._mark, self.pid)


class LocalScheduler:
    """Implements scheduler.Scheduler. `run_token` is what the run's processes authenticate each other with.

    grace_s: how long a process may drain when the block is left, before it is killed. hidden: variables of our environment that processes
    do not inherit."""

    def __init__(
        self,
        run_dir: Path,
        log_dir: Path | None = None,
        grace_s: float = STOP_GRACE_S,
        hidden: Collection[str] = (),
    ) -> None:
        self.run_dir = run_dir.absolute()
        self.run_token = secrets.token_urlsafe(32)
        self._log_dir = (log_dir or self.run_dir / "logs").absolute()
        self._grace_s = grace_s
        self._hidden = frozenset(hidden)
        self._lock = RunLock(self.run_dir)
        self._processes: dict[str, LocalProcess] = {}
        self._deaths: asyncio.Queue[LocalProcess] = asyncio.Queue()
        self._watchers: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        for folder in (self.run_dir, self.run_dir / "processes", self._log_dir):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock.__enter__()
        if self._lock.former:
            end(f"{self._lock.former}:")  # what a controller that was killed has left
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            await asyncio.gather(
                *(process.stop(self._grace_s) for process in self._processes.values() if process.alive)
            )
        finally:
            if left := [process for process in self._processes.values() if process.alive]:
                for process in left:
                    process.end_tree()  # stopping was cancelled, for some before it had begun
                await asyncio.wait([process.exit for process in left], timeout=KILL_S)  # still to be reaped
            for name in self._processes:
                self._forget_files(name)
            for watcher in self._watchers.values():
                watcher.cancel()
            self._lock.__exit__()

    async def start(self, *jobs: Job) -> list[Process]:
        """Start all; if one cannot be started, those of this call are stopped again. Raises ConfigError for a bad job."""
        started: list[LocalProcess] = []
        async with self._undo(started):
            for job in jobs:
                started.append(await self._start(job))
        return list(started)

    @contextlib.asynccontextmanager
    async def _undo(self, started: list[LocalProcess]) -> AsyncIterator[None]:
        try:
            yield
        except BaseException:
            await asyncio.gather(*(process.stop() for process in started))
            raise

    async def _start(self, job: Job) -> LocalProcess:
        former = self._processes.get(job.name)
        if former is not None and former.alive:
            raise ConfigError(f"process {job.name!r} runs already (pid {former.pid}); names are unique within a run")
        if (
            job.name in self._watchers
        ):  # it ends what is left of the former one by a mark that the new one will have too
            await asyncio.wait({self._watchers[job.name]})
        if clash := sorted(set(job.spec) & set(RESERVED)):
            raise ConfigError(f"the spec of {job.name!r} may not set {', '.join(clash)}: the scheduler does")
        spec_file, ready_file = self._files(job.name)
        ready_file.unlink(missing_ok=True)
        spec_file.unlink(missing_ok=True)
        spec = {
            **job.spec,
            "name": job.name,
            "run_dir": str(self.run_dir),
            "run_token": self.run_token,
            "ready_file": str(ready_file),
            "parent_pid": os.getpid(),
        }
        descriptor = os.open(spec_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(spec, file)
        process = await self._spawn(job, spec_file, ready_file)
        self._processes[job.name] = process
        self._watchers[job.name] = asyncio.create_task(self._watch(process), name=f"watch {job.name}")
        return process

    async def _spawn(self, job: Job, spec_file: Path, ready_file: Path) -> LocalProcess:
        log = self.log_path(job.name)
        mark = f"{self._lock.marker}:{safe_name(job.name)}:"  # ends in a colon: server-1 is no prefix of server-10
        # Unbuffered and with native tracebacks: the last lines of a process that dies are worth most.
        defaults = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        inherited = {name: value for name, value in os.environ.items() if name not in self._hidden}
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            log_start = os.fstat(descriptor).st_size
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", job.module, "--spec", str(spec_file)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                start_new_session=True,
                env={**defaults, **inherited, **job.env, MARK: mark},
            )
        finally:
            os.close(descriptor)
        return LocalProcess(job.name, process, mark, ready_file, log, log_start)

    async def _watch(self, process: LocalProcess) -> None:
        await process.wait()
        if not process.stopped:
            self._deaths.put_nowait(process)  # first: looking for what it left behind takes its time
            process.end_tree()  # which has nobody any more

    async def first_death(self) -> Process:
        """The next process that ended although nobody stopped it; each is returned once."""
        return await self._deaths.get()

    def log_path(self, name: str) -> Path:
        return self._log_dir / f"{safe_name(name)}.log"

    def _files(self, name: str) -> tuple[Path, Path]:
        folder = self.run_dir / "processes"
        return folder / f"{safe_name(name)}.spec.json", folder / f"{safe_name(name)}.ready.json"

    def _forget_files(self, name: str) -> None:
        """The spec holds the run's token."""
        for path in self._files(name):
            path.unlink(missing_ok=True)
