"""All processes that belong to a started one, also those that left its process group; and how a process ended, in words.

    members("9f3a:server-0:", leader=4711)      # pids alive: by environment, process group, session or descent
    kill(pids, signal.SIGKILL)
    how_it_ended(-9)                            # "was killed by signal 9 (SIGKILL)"

The mark is the environment variable MARK of whatever was started: it is inherited and cannot be taken back by a grandchild that
makes a session of its own and outlives its parent. Reads /proc; where there is none only the process group is known.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

MARK = "AREAL_PROCESS"
"""`<run marker>:<process name>:` in the environment of every process of a run."""

_PROC = Path("/proc")


KILL_S = 5.0
"""A process that SIGKILL does not end by then hangs in the kernel."""


def members(mark: str, leader: int = 0) -> list[int]:
    """Pids of living processes (no zombies) whose mark begins with `mark`, or that belong to process `leader`.

    Either may be empty. Never the calling process. Without /proc: minus the process group, which `kill` understands."""
    if not _PROC.joinpath("self", "stat").exists():
        return [-leader] if leader not in (0, os.getpid()) and _group_lives(leader) else []
    parents: dict[int, int] = {}
    found: set[int] = set()
    wanted = f"{MARK}={mark}".encode()
    for pid, parent, group, session in _processes():
        parents[pid] = parent
        if (leader and leader in (pid, group, session)) or (mark and _is_marked(pid, wanted)):
            found.add(pid)
    found |= {pid for pid in parents if not found.isdisjoint(_ancestors(pid, parents))}
    return sorted(found - {os.getpid()})


def _processes() -> Iterator[tuple[int, int, int, int]]:
    """(pid, parent, process group, session) of every process that has not ended."""
    for entry in os.listdir(_PROC):
        if not entry.isdigit():
            continue
        try:
            text = (_PROC / entry / "stat").read_text(errors="replace")
        except OSError:  # it ended while we looked
            continue
        state, parent, group, session = text.rpartition(")")[2].split()[:4]
        if state not in ("Z", "X"):
            yield int(entry), int(parent), int(group), int(session)


def _is_marked(pid: int, wanted: bytes) -> bool:
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:  # another user's, or ended
        return False
    return any(variable.startswith(wanted) for variable in environment.split(b"\0"))


def _ancestors(pid: int, parents: dict[int, int]) -> Iterator[int]:
    seen = {pid}
    while (pid := parents.get(pid, 0)) and pid not in seen:
        seen.add(pid)
        yield pid


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def kill(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each; those that have ended meanwhile are passed over."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def end(mark: str, leader: int = 0) -> None:
    """SIGKILL to all members, again until none is left (one may have started another meanwhile). Blocks for milliseconds.

    A leader's pid may be another's soon after its end: call this while it runs or right after."""
    deadline = time.monotonic() + KILL_S
    while (tree := members(mark, leader)) and time.monotonic() < deadline:
        kill(tree, signal.SIGKILL)
        time.sleep(0.005)  # the kernel needs a moment; no await: this also runs at exit and under cancellation


def how_it_ended(code: int) -> str:
    """`exited with code 3`, or `was killed by signal 9 (SIGKILL)`."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "a real-time signal"
    hint = "; out of memory? see dmesg" if code == -signal.SIGKILL else ""
    return f"was killed by signal {-code} ({name}{hint})"
