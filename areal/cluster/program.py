"""Runs somebody else's program once, as a process tree of its own, and ends all of it.

    ended = await run_program(["python", "agent.py"], clean_environment(["MY_TOKEN"]), timeout_s=300, out=print)
    ended.exit_code, ended.timed_out, ended.seconds

Its standard input is empty; what it prints comes line by line. When it ends, is late, or we are cancelled, everything it started is
killed, also what left its process group. Its mark continues this process's own, so that it also goes with the run (process_tree.py).
Used by the doctor, and for what surrounds a process by rollout/pool.py.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from areal.base.errors import ConfigError
from areal.cluster.process_tree import MARK, end, how_it_ended, members

Lines = Callable[[str], object]
LEFT_S = 2.0  # how long output is read on after the last process has ended
LONGEST_LINE = 64 * 1024  # characters; a longer one comes in pieces

PASSED_ON = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LC_ALL", "LC_CTYPE"),
    *("PYTHONPATH", "VIRTUAL_ENV", "SSL_CERT_FILE", "SSL_CERT_DIR", "NO_PROXY", "no_proxy"),
)
"""What a program needs to find its way on this machine, and nothing that could be a key."""


@dataclass(frozen=True, slots=True)
class Ended:
    """exit_code: negative = the signal that killed it; of a late one, ours. left_running: processes that outlived the program."""

    exit_code: int
    seconds: float
    timed_out: bool
    left_running: int

    @property
    def how(self) -> str:
        """In words."""
        return "was stopped at its time-out" if self.timed_out else how_it_ended(self.exit_code)


def clean_environment(names: Iterable[str] = (), **more: str) -> dict[str, str]:
    """PASSED_ON and `names` as they are in this process, then `more`: what a program is to know."""
    known = {name: os.environ[name] for name in (*PASSED_ON, *names) if name in os.environ}
    return known | more


def new_mark(name: str) -> str:
    """The mark of a tree that is about to start."""
    return f"{os.environ.get(MARK, '')}{name}-{secrets.token_hex(8)}:"


async def run_program(
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    timeout_s: float,
    out: Lines,
    err: Lines | None = None,
    folder: Path | None = None,
    memory_mb: int | None = None,
) -> Ended:
    """Run it to its end. err None: standard error comes in between, through `out`. folder: its working directory. memory_mb: most memory
    of each of its processes (RLIMIT_DATA). Raises ConfigError where it cannot be started."""
    mark, began = new_mark("program"), time.monotonic()
    timed_out, left = False, 0
    async with Output(out) as outs, Output(err or out) as errs:
        try:
            process = await asyncio.create_subprocess_exec(
                *_limited(words, memory_mb),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=outs.end,
                stderr=outs.end if err is None else errs.end,
                start_new_session=True,
                cwd=folder,
                env={**environment, MARK: mark},
            )
        except OSError as error:
            raise ConfigError(f"cannot start {words[0]}: {error}") from error
        finally:
            outs.close()
            errs.close()
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
            left = len(await asyncio.to_thread(members, mark, process.pid))
        except TimeoutError:
            timed_out = True
        finally:
            await end_tree(mark, process.pid)
            await process.wait()
    assert process.returncode is not None
    return Ended(process.returncode, time.monotonic() - began, timed_out, left)


class Output:
    """A pipe that a process writes into and whose lines go to `show`. The block ends when nobody can write any more, or LEFT_S after its
    body. Not a pipe of asyncio's: with those, waiting for a process waits for whoever has inherited its output, too."""

    def __init__(self, show: Lines) -> None:
        self._show = show

    async def __aenter__(self) -> Self:
        ours, self.end = os.pipe()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        self._open = True
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: protocol, os.fdopen(ours, "rb", buffering=0)
        )
        self._reading = asyncio.create_task(_read(reader, self._show), name="output of a program")
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()
        await asyncio.wait({self._reading}, timeout=LEFT_S)
        self._reading.cancel()
        self._transport.close()

    def close(self) -> None:
        """Our copy of the end that is written into, once the process has its own."""
        if self._open:
            os.close(self.end)
            self._open = False


async def end_tree(mark: str, leader: int) -> None:
    """`process_tree.end` beside the loop: it reads all of /proc. It goes on to its end also where we are cancelled meanwhile."""
    await asyncio.shield(asyncio.to_thread(end, mark, leader))


def _limited(words: Sequence[str], memory_mb: int | None) -> list[str]:
    """Through a shell that sets the limit and becomes the program: nothing of it runs without."""
    if memory_mb is None:
        return list(words)
    return ["/bin/sh", "-c", 'ulimit -d "$0" && exec "$@"', str(memory_mb * 1024), *words]


async def _read(stream: asyncio.StreamReader, show: Lines) -> None:
    decoder, line = codecs.getincrementaldecoder("utf-8")("replace"), ""
    while data := await stream.read(65536):
        *whole, line = (line + decoder.decode(data)).split("\n")
        for text in whole:
            show(text)
        if len(line) > LONGEST_LINE:
            show(line)
            line = ""
    if line:
        show(line)
