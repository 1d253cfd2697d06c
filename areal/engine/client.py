"""The controller's end of a rank: typed commands out, typed replies back, one TCP link on loopback.

    async with EngineClient(ready["url"], run_token) as engine:
        stats = await engine.train_step(rows, 3, 3)
        manifest = await engine.publish(version=4, retire=[2])
    written = await engine.begin_save(path, 4, full=True)      # training goes on; `await written` waits for the disk

No time-outs: a step takes as long as it takes while the rank lives. A link that breaks is ProcessDied for every call that waits and every later
one; the rank's last log lines come from its scheduler. What a rank refuses is raised here as the error it raised there. No torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import msgspec
import numpy as np

from areal.base.errors import (
    ArealError,
    CheckpointError,
    ConfigError,
    Forbidden,
    ProcessDied,
    ShapeError,
    TrainingError,
)
from areal.base.types import FloatArray
from areal.engine import commands
from areal.engine.commands import Command, Done, Failed, Hello, Published, Reply, Row, Scored, Stepped
from areal.engine.frames import read_frame, write_frame

RAISED: dict[str, type[ArealError]] = {
    error.__name__: error for error in (ArealError, CheckpointError, ConfigError, Forbidden, ShapeError, TrainingError)
}
"""What a rank may answer Failed with, by name."""

_Reply = TypeVar("_Reply", Scored, Stepped, Published, Done)


class EngineClient:
    """One link to one rank. Calls may overlap; the rank takes them one at a time, in the order sent."""

    def __init__(self, url: str, token: str) -> None:
        """url: tcp://HOST:PORT as the rank reported. Entering connects."""
        self.url = url
        self._token = token
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._next = 0
        self._lost: ProcessDied | None = ProcessDied(f"the link to {url} is not open; use `async with`")
        self._listener: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> Self:
        """Raises Forbidden (wrong token), ConfigError (other protocol) or ProcessDied (nobody there)."""
        address = urlsplit(self.url)
        try:
            reader, self._writer = await asyncio.open_connection(address.hostname, address.port)
        except OSError as error:
            raise ProcessDied(f"the training rank at {self.url} is not there ({error}); see its log") from error
        self._lost = None
        self._listener = asyncio.create_task(self._listen(reader), name=f"rank {self.url}")
        try:
            await self._call(Hello(commands.PROTOCOL, self._token), 0, Done)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def score(self, rows: Sequence[Row]) -> list[FloatArray]:
        """Log-probs under the current weights, one array [n] per row, 0 where not trained."""
        request = self._number()
        reply = await self._call(commands.Score(request, list(rows)), request, Scored)
        return [np.frombuffer(values, dtype="<f4").astype(np.float32) for values in reply.logprobs]

    async def train_step(
        self, rows: Sequence[Row], step: int, current_version: int, lags: Mapping[int, int] | None = None
    ) -> dict[str, float]:
        """One training step; stats as in commands.Stepped. current_version: label of the weights that are being trained; lags:
        how many steps each label in the rows is behind it."""
        request = self._number()
        command = commands.TrainStep(request, list(rows), step, current_version, dict(lags or {}))
        return (await self._call(command, request, Stepped)).stats

    async def publish(self, version: int, *, retire: Sequence[int] = ()) -> dict[str, Any]:
        """The manifest of the current weights under this label; labels in `retire` are freed before that."""
        request = self._number()
        return (await self._call(commands.Publish(request, version, list(retire)), request, Published)).manifest

    async def begin_save(
        self, path: str, step: int, *, full: bool, about: Mapping[str, Any] | None = None
    ) -> asyncio.Task[dict[str, Any]]:
        """Ask for a checkpoint folder on the rank's disk; returns once the command is sent. full: with what `restore` needs.

        Steps that are asked for from here on change nothing in it. Await the result for when it is written: `held_seconds`,
        `write_seconds`, `bytes`; raises CheckpointError if it could not be."""
        request = self._number()
        reply = await self._send(commands.Save(request, path, step, full, dict(about or {})), request)
        return asyncio.create_task(self._written(request, reply), name=f"write {path}")

    async def _written(self, request: int, reply: asyncio.Future[Reply]) -> dict[str, Any]:
        return (await self._reply(reply, request, Done, "Save")).info

    async def save(self, path: str, step: int, *, full: bool) -> dict[str, Any]:
        """The same, and wait until it is written."""
        return await (await self.begin_save(path, step, full=full))

    async def restore(self, path: str) -> dict[str, Any]:
        """Go on from a full checkpoint; returns its facts (`step`, `optimizer_steps`)."""
        request = self._number()
        return (await self._call(commands.Restore(request, path), request, Done)).info

    async def stop(self) -> None:
        """Ask the rank to end; it answers, then exits 0."""
        request = self._number()
        await self._call(commands.Stop(request), request, Done)

    async def close(self) -> None:
        """Close the link; the rank goes on."""
        self._fail(ProcessDied(f"the link to {self.url} was closed"))
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.wait([self._listener])
        if self._writer is not None:
            self._writer.close()
            with suppress(OSError):  # broken already: nothing left to close
                await self._writer.wait_closed()

    def _number(self) -> int:
        self._next += 1
        return self._next

    async def _call(self, command: Command, request: int, expected: type[_Reply]) -> _Reply:
        return await self._reply(await self._send(command, request), request, expected, type(command).__name__)

    async def _send(self, command: Command, request: int) -> asyncio.Future[Reply]:
        if self._lost is not None or self._writer is None:
            raise ProcessDied(str(self._lost))
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[request] = future
        try:
            await write_frame(self._writer, commands.encode(command))
        except BaseException as error:
            self._waiting.pop(request, None)
            if isinstance(error, ConnectionError):
                raise ProcessDied(f"the training rank at {self.url} is gone ({error}); see its log") from error
            raise
        return future

    async def _reply(self, future: asyncio.Future[Reply], request: int, expected: type[_Reply], asked: str) -> _Reply:
        try:
            reply = await future
        finally:
            self._waiting.pop(request, None)
        if isinstance(reply, Failed):
            raise RAISED.get(reply.kind, ArealError)(reply.message)
        if not isinstance(reply, expected):
            raise ProcessDied(f"the rank at {self.url} answered {type(reply).__name__} to {asked}")
        return reply

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while (frame := await read_frame(reader)) is not None:
                reply = commands.decode_reply(frame)
                future = self._waiting.get(reply.request)
                if future is not None and not future.done():
                    future.set_result(reply)
            reason = "it closed the link"
        except (OSError, msgspec.DecodeError) as error:
            reason = str(error)
        self._fail(ProcessDied(f"the training rank at {self.url} is gone ({reason}); see its log"))

    def _fail(self, error: ProcessDied) -> None:
        self._lost = self._lost or error
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ProcessDied(str(error)))
