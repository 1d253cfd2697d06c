"""One run at a time in a run folder: `run.lock`, held through flock by the controller, freed by the kernel at its end.

    with RunLock(run_dir) as lock:
        lock.marker        # this run's mark in the environment of all its processes
        lock.former        # the mark of the run that held the folder before, if it left one; its orphans bear it
    holder(run_dir)        # Holder(pid, …, alive) or None, for those who only look

The file stays (removing a lock file races with the next to take it); it holds pid, host and marker as JSON.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from areal.base.errors import ConfigError
from areal.base.processes import exists


@dataclass(frozen=True, slots=True)
class Holder:
    """Who took the lock last and has not let go of it in order. alive: it holds it still; else it was killed."""

    pid: int
    host: str
    since: float
    marker: str
    alive: bool


def holder(run_dir: Path) -> Holder | None:
    """None: nobody has the folder, its last run ended in order. Takes no lock, so that a run may start at this very moment."""
    path = run_dir / "run.lock"
    try:
        content, inode = json.loads(path.read_bytes() or b"{}"), path.stat().st_ino
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(content, dict) or not isinstance(content.get("pid"), int):
        return None
    host = str(content.get("host", ""))
    alive = exists(content["pid"]) and _is_locked(inode) if host == socket.gethostname() else False
    return Holder(content["pid"], host, float(content.get("since", 0.0)), str(content.get("marker", "")), alive)


def _is_locked(inode: int) -> bool:
    """Whether the kernel knows a lock on this file; true where it does not say (no /proc)."""
    try:
        locks = Path("/proc/locks").read_text()
    except OSError:
        return True
    return any(":" in word and word.rpartition(":")[2] == str(inode) for word in locks.split())


class RunLock:
    """Taken by `with`. Raises ConfigError naming the holder if another run lives in the folder."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "run.lock"
        self.marker = secrets.token_hex(8)
        self.former = ""
        self._file = -1

    def __enter__(self) -> Self:
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = self._read()
            os.close(self._file)
            raise ConfigError(
                f"{self.path.parent} is in use by another run (pid {holder.get('pid', 'unknown')} on "
                f"{holder.get('host', 'an unknown host')}): end that one, or choose another trial_name or --output-dir"
            ) from None
        self.former = self._read().get("marker", "")
        facts = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time(), "marker": self.marker}
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(facts).encode(), 0)
        return self

    def __exit__(self, *exc: object) -> None:
        os.ftruncate(self._file, 0)  # an orderly end leaves no orphans to look for
        os.close(self._file)

    def _read(self) -> dict[str, str]:
        try:
            content = json.loads(os.pread(self._file, 4096, 0) or b"{}")
        except ValueError:
            return {}
        return {str(key): str(value) for key, value in content.items()} if isinstance(content, dict) else {}
