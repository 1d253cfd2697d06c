"""What every child process of a run does first: read its spec, report ready, die with its controller.

    def main(spec: ChildSpec) -> None:                 # or `async def`
        server = bind(spec.job["host"])
        report_ready(spec, url=server.url)
        server.serve()

    if __name__ == "__main__":
        run_child(main)                                # python -m areal.some.module --spec FILE

Linux watches the parent through a pidfd, other systems look twice a second. (Not PR_SET_PDEATHSIG: it follows the parent's
*thread*, and a second SIGTERM in the middle of our own exit would cut it short.) The other end is cluster/local.py. No torch, nothing heavy: a child's start-up time begins here.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import gc
import inspect
import json
import os
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import uvloop

from areal.base.atomic import write_atomic
from areal.base.errors import ArealError, ConfigError
from areal.base.processes import exists
from areal.cluster.process_tree import end, kill, members

RESERVED = ("name", "run_dir", "run_token", "ready_file", "parent_pid")
"""Keys of the spec file that the scheduler writes; everything else is the job's own."""

ORPHAN_GRACE_S = 5.0
"""How long a child may drain after its controller is gone before it is killed."""

GARBAGE_OBJECTS = 10_000
"""How many more objects there may be before Python looks for cycles among the young ones."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What a child is told. job: its own keys. parent_pid 0: started by hand, nobody to watch."""

    name: str
    run_dir: Path
    run_token: str
    ready_file: Path
    parent_pid: int
    job: Mapping[str, Any]


def read_spec(argv: Sequence[str] | None = None) -> ChildSpec:
    """The spec that `--spec FILE` names (argv None: this process's arguments).

    Raises ConfigError if the file is missing, is not such a spec, or may be read by other users (it holds secrets).
    """
    parser = argparse.ArgumentParser(description="A process of an areal run; started by its scheduler.")
    parser.add_argument("--spec", required=True, metavar="FILE", help="JSON file of mode 0600 (docs/architecture.md)")
    path = Path(parser.parse_args(argv).spec)
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise ConfigError(
                    f"{path} has mode {mode:04o}: other users could read the run's token; chmod 600 it or start the run anew"
                )
            content = json.loads(file.read())
    except OSError as error:
        raise ConfigError(
            f"cannot read the spec {path}: {error.strerror}; children are started by their scheduler"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}); start the run anew") from None
    return _typed(path, content)


def _typed(path: Path, content: object) -> ChildSpec:
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, not an object; start the run anew")
    missing = [key for key in RESERVED if key not in content]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}; start the run anew")
    wrong = [key for key in RESERVED if not isinstance(content[key], int if key == "parent_pid" else str)]
    if wrong:
        raise ConfigError(f"{path}: {', '.join(wrong)} has the wrong type; start the run anew")
    return ChildSpec(
        name=content["name"],
        run_dir=Path(content["run_dir"]),
        run_token=content["run_token"],
        ready_file=Path(content["ready_file"]),
        parent_pid=content["parent_pid"],
        job={key: value for key, value in content.items() if key not in RESERVED},
    )


def report_ready(spec: ChildSpec, **facts: Any) -> None:
    """Tell the controller that this process serves: `facts` (JSON values, usually url=…) plus the pid. Atomic."""
    write_atomic(spec.ready_file, json.dumps({"pid": os.getpid(), **facts}).encode())


def stop_on_parent_death(spec: ChildSpec, *, grace_s: float = ORPHAN_GRACE_S) -> None:
    """From now on this process ends when its controller is gone: SIGTERM to it and all it started, SIGKILL after grace_s.

    Call it early, from the main thread. Exits at once if the controller is gone already.
    """
    if spec.parent_pid == 0:
        return
    direct = os.getppid() == spec.parent_pid
    atexit.register(_end_descendants, os.getpid())
    arguments = (spec.name, spec.parent_pid, direct, grace_s)
    threading.Thread(target=_watch_parent, args=arguments, name="parent-watch", daemon=True).start()


def _watch_parent(name: str, parent_pid: int, direct: bool, grace_s: float) -> None:
    _wait_for_end(parent_pid, direct)
    print(f"{name}: the controller (pid {parent_pid}) is gone, ending", file=sys.stderr, flush=True)
    own = os.getpid()
    kill([*members("", leader=own), own], signal.SIGTERM)
    time.sleep(grace_s)
    end("", leader=own)
    os.kill(own, signal.SIGKILL)


def _end_descendants(owner: int) -> None:
    """At exit: what this process started and has not ended by now would have nobody left to end it."""
    if os.getpid() == owner:
        end("", leader=owner)


def _wait_for_end(pid: int, direct: bool) -> None:
    """Returns once process `pid` has ended. direct: it is our parent, so a change of getppid says so too."""
    try:
        descriptor = os.pidfd_open(pid)  # type: ignore[attr-defined,unused-ignore]  # Linux only
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # not Linux, or a kernel that forbids it
        while os.getppid() == pid if direct else exists(pid):
            time.sleep(0.5)
        return
    try:
        if direct and os.getppid() != pid:  # it ended before the pidfd was opened; the pid may be another's by now
            return
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
    finally:
        os.close(descriptor)


Main = Callable[[ChildSpec], None] | Callable[[ChildSpec], Coroutine[Any, Any, None]]


def run_child(main: Main, argv: Sequence[str] | None = None) -> NoReturn:
    """Run `main(spec)` as this whole process and exit: 0 done or SIGTERM, 1 an error, 2 a wrong configuration.

    An ArealError or OSError becomes one line on stderr (the child's log); any other exception is a bug and keeps its
    traceback. SIGTERM unwinds main (an async main is cancelled), unless main handles the signal itself.
    """
    try:
        spec = read_spec(argv)
        signal.signal(signal.SIGTERM, _exit_cleanly)
        stop_on_parent_death(spec)
        _collect_rarely()
        if inspect.iscoroutinefunction(main):
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_until_terminated(main(spec)))
        else:
            main(spec)
    except ConfigError as error:
        _fail(f"error: {error}", 2)
    except (ArealError, OSError) as error:
        _fail(f"error: {type(error).__name__}: {error}", 1)
    except ExceptionGroup as group:  # of a TaskGroup: several tasks may have failed, the first says why
        cause = _first(group)
        if not isinstance(cause, ArealError | OSError):
            raise
        _fail(f"error: {type(cause).__name__}: {cause}", 2 if isinstance(cause, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def _collect_rarely() -> None:
    """Spare long-lived services most of the garbage collector's work: what was imported lives as long as the process and is never
    walked again, and hundreds of calls in flight are no garbage, though at Python's own 700 objects they would be looked through all
    the time. Reference counts free the rest at once, as always."""
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS, *gc.get_threshold()[1:])


def _first(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


async def _until_terminated(work: Coroutine[Any, Any, None]) -> None:
    """Await `work`; SIGTERM cancels it. Not through the loop's own handlers: they are gone once the loop has closed."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    terminated = False

    def terminate(_signal: int, _frame: FrameType | None) -> None:
        nonlocal terminated
        terminated = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        loop.call_soon_threadsafe(task.cancel)

    signal.signal(signal.SIGTERM, terminate)
    try:
        await task
    except asyncio.CancelledError:
        if not terminated:
            raise


def _exit_cleanly(_signal: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one is enough: the next would interrupt what this one unwinds
    raise SystemExit(0)


def _fail(line: str, code: int) -> NoReturn:
    print(line, file=sys.stderr, flush=True)
    sys.exit(code)
