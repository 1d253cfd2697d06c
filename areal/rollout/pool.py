"""Processes that call a Python function of the user's, each one call at a time: slow, greedy or crashing code harms nobody else.

    pool = ProcessPool("my_agent:Agent", key="rollout.agent.path", method="run", size=8, timeout_s=600, memory_mb=2048,
                       environment=clean_environment(["MY_TOKEN"]), say=log_line)
    async with pool:                                # loads the target once: a wrong path is a ConfigError here
        value = await pool.call(task, base_url=url, api_key=key)      # CallFailed: raised, timed out, died
        value = await pool.call(task, say=other)    # what this call prints goes there instead

Arguments and results are JSON values (numbers of numpy become numbers); the function may be a plain one or a coroutine function. A
process that hangs, takes too much memory or crashes is ended with all it started, its call fails, and the next call gets a new one.
A call that is cancelled ends its process, too. Processes start as they are needed, at most `size`, keep what they have imported, see only
`environment`, and end with this process, however it ends. Used by agents of `mode: subproc` and by reward functions.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any, Self

import msgspec

from areal.base.errors import CallFailed, ConfigError
from areal.cluster.process_tree import MARK, how_it_ended
from areal.cluster.program import Lines, Output, end_tree, new_mark

START_S = 120.0  # that a process may take to import its target
LEFT_S = 0.5  # for the answer of a process that has just ended: it lies in our buffer by then


class ProcessPool:
    """`async with` starts the first process and ends all of them."""

    def __init__(
        self,
        target: str,
        *,
        key: str,
        method: str | None = None,
        size: int,
        timeout_s: float,
        memory_mb: int | None,
        environment: Mapping[str, str],
        say: Lines,
    ) -> None:
        """target: `module:attribute`. key: the configuration's name for it, in errors. method: of the target, to be called. timeout_s: of
        one call. memory_mb: of one process, null = no limit. say: takes each line that a process prints."""
        self._setup = {"target": target, "key": key, "method": method, "memory_mb": memory_mb}
        self._slots = asyncio.Semaphore(size)
        self._timeout_s = timeout_s
        self._environment = environment
        self._say = say
        self._idle: list[_Child] = []

    async def __aenter__(self) -> Self:
        self._idle.append(await self._new())
        return self

    async def __aexit__(self, *exc: object) -> None:
        idle, self._idle = self._idle, []
        for child in idle:
            await child.end()

    async def call(self, *args: Any, say: Lines | None = None, **kwargs: Any) -> Any:
        """What the function returns. Waits while all processes are busy. Raises CallFailed."""
        async with self._slots, self._child() as child:
            child.say = say or self._say
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = await child.ask({"args": args, "kwargs": kwargs})
            except TimeoutError:
                raise CallFailed(
                    "timed_out", f"it took longer than {self._timeout_s:g} s, so its process was ended"
                ) from None
            if "error" in answer:
                child.good = True
                raise CallFailed("raised", answer["error"])
            child.good = True
            return answer["result"]

    @contextlib.asynccontextmanager
    async def _child(self) -> AsyncIterator[_Child]:
        """One that nobody else uses; it is kept only if the block says that it is good."""
        child = self._idle.pop() if self._idle else None
        if child is None or not child.alive:
            if child is not None:
                await child.end()
            child = await self._replacement()
        child.good = False
        try:
            yield child
        finally:
            child.say = self._say
            if child.good and child.alive:
                self._idle.append(child)
            else:
                await child.end()

    async def _replacement(self) -> _Child:
        try:
            return await self._new()
        except ConfigError as error:  # it could be loaded at the start
            raise CallFailed("died", f"a new process could not be started: {error}") from error

    async def _new(self) -> _Child:
        child = _Child(self._say)
        await child.start(self._environment)
        try:
            async with asyncio.timeout(START_S):
                answer = await child.ask(self._setup)
        except TimeoutError:
            await child.end()
            raise ConfigError(
                f"{self._setup['key']}: importing {self._setup['target']} took longer than {START_S:g} s"
            ) from None
        except CallFailed as error:
            await child.end()
            raise ConfigError(f"{self._setup['key']}: importing {self._setup['target']} failed: {error}") from error
        except BaseException:
            await child.end()
            raise
        if "error" in answer:
            await child.end()
            raise ConfigError(answer["error"])
        return child


class _Child:
    """One process and the link to it."""

    def __init__(self, say: Lines) -> None:
        self.say = say
        self.good = True
        self._mark = new_mark("pool")
        self._output = Output(self._show)
        self._last = ""

    async def start(self, environment: Mapping[str, str]) -> None:
        """Call it once, before everything else."""
        ours, theirs = socket.socketpair()
        await self._output.__aenter__()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "areal.rollout.pool_child", str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=self._output.end,
                stderr=self._output.end,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
                env={**environment, "PYTHONUNBUFFERED": "1", MARK: self._mark},
            )
        self._output.close()
        self._reader, self._writer = await asyncio.open_connection(sock=ours)

    @property
    def alive(self) -> bool:
        return self._process.returncode is None and not self._reader.at_eof()

    async def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Raises CallFailed where the process ends in place of an answer."""
        with contextlib.suppress(ConnectionError):  # it has ended: reading says so
            data = msgspec.json.encode(question)  # unlike MessagePack, it takes integers of any size
            self._writer.write(len(data).to_bytes(4, "big") + data)
            await self._writer.drain()
        answer = asyncio.create_task(self._answer(), name="answer of a pool process")
        ended = asyncio.create_task(self._process.wait(), name="end of a pool process")
        try:
            await asyncio.wait({answer, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():  # what it started may hold the link open after it has ended
                await asyncio.wait({answer}, timeout=LEFT_S)
            if answer.done() and (found := answer.result()) is not None:
                return found
            code = await ended
        finally:
            for each in (answer, ended):
                each.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await each
        last = f"; it said last: {self._last[:500]}" if self._last else ""
        raise CallFailed("died", f"its process {how_it_ended(code)}{last}")

    async def _answer(self) -> dict[str, Any] | None:
        """None where it ends before."""
        try:
            length = int.from_bytes(await self._reader.readexactly(4), "big")
            return msgspec.msgpack.decode(await self._reader.readexactly(length), type=dict[str, Any])
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def end(self) -> None:
        """With all that it has started."""
        self._writer.close()
        await end_tree(self._mark, self._process.pid)
        await self._process.wait()
        await self._output.__aexit__()

    def _show(self, line: str) -> None:
        self._last = line or self._last
        self.say(line)
