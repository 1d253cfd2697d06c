"""Runs a command once, as a process tree of its own, and ends all of it.

    run = await run_agent("python agent.py", {"OPENAI_BASE_URL": url}, timeout_s=300, show=sys.stderr.write)
    run.exit_code, run.timed_out, run.seconds

The command line is the shell's. Its standard input is empty; what it prints is shown line by line as it comes, with "agent | " before
it. When it ends, is late, or we are cancelled, everything it started is killed, also what left its process group.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from areal.base.errors import ConfigError
from areal.cluster.process_tree import MARK, end, how_it_ended, members

Show = Callable[[str], object]
LEFT_S = 2.0  # how long output is read on after the last process has ended


@dataclass(frozen=True, slots=True)
class AgentRun:
    """exit_code: negative = the signal that killed it; of a late one, ours. left_running: processes that outlived the command."""

    command: str
    exit_code: int
    seconds: float
    timed_out: bool
    left_running: int

    @property
    def ended(self) -> str:
        """In words."""
        return "was stopped at its time-out" if self.timed_out else how_it_ended(self.exit_code)


async def run_agent(command: str, environment: Mapping[str, str], *, timeout_s: float, show: Show) -> AgentRun:
    """Raises ConfigError where there is no shell to run it."""
    mark, began = f"doctor:{secrets.token_hex(8)}:", time.monotonic()
    try:
        process = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment, MARK: mark},
        )
    except OSError as error:
        raise ConfigError(f"cannot start the agent: {error}; --agent is a command line for /bin/sh") from error
    assert process.stdout is not None
    showing = asyncio.create_task(_show(process.stdout, show), name="agent output")
    timed_out, left = False, 0
    try:
        async with asyncio.timeout(timeout_s):
            await process.wait()
        left = len(members(mark, process.pid))
    except TimeoutError:
        timed_out = True
    finally:
        end(mark, process.pid)
        await process.wait()
        await asyncio.wait({showing}, timeout=LEFT_S)
        showing.cancel()
    assert process.returncode is not None
    return AgentRun(command, process.returncode, time.monotonic() - began, timed_out, left)


async def _show(output: asyncio.StreamReader, show: Show) -> None:
    decoder, line = codecs.getincrementaldecoder("utf-8")("replace"), ""
    while data := await output.read(65536):
        *whole, line = (line + decoder.decode(data)).split("\n")
        for text in whole:
            show(f"agent | {text}\n")
    if line:
        show(f"agent | {line}\n")
