"""One TCP link to a rank: frames out, replies back by the number of their request. The controller has one to the rank that leads a net,
that one has one to each of the others.

    async with Link(ready["url"], run_token) as link:
        reply = await link.ask(command)                    # Failed is a reply like another
        future = await link.send(command)                  # returns once it is sent; `await future` is its reply

A link that breaks is ProcessDied for every request that waits and every later one. Used by client.py and chorus.py. No torch.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Self
from urllib.parse import urlsplit

import msgspec

from areal.base.errors import (
    ArealError,
    CheckpointError,
    ConfigError,
    Forbidden,
    ProcessDied,
    ShapeError,
    TrainingError,
)
from areal.engine import commands
from areal.engine.commands import Command, Failed, Hello, Reply
from areal.engine.frames import read_frame, write_frame

RAISED: dict[str, type[ArealError]] = {
    error.__name__: error
    for error in (ArealError, CheckpointError, ConfigError, Forbidden, ProcessDied, ShapeError, TrainingError)
}
"""What a rank may answer Failed with, by name."""


class Link:
    """See the module's docstring. Requests may overlap; the rank takes them one at a time, in the order sent."""

    def __init__(self, url: str, token: str) -> None:
        """url: tcp://HOST:PORT as the rank reported. Entering connects."""
        self.url = url
        self._token = token
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
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
            raise_if_failed(await self.ask(Hello(commands.PROTOCOL, self._token)))
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def ask(self, command: Command) -> Reply:
        """What the rank answers."""
        return await (await self.send(command))

    async def send(self, command: Command) -> asyncio.Future[Reply]:
        """Send it, and come back; the future is its reply."""
        if self._lost is not None or self._writer is None:
            raise ProcessDied(str(self._lost))
        request = 0 if isinstance(command, Hello) else command.request
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[request] = future
        future.add_done_callback(lambda done: self._answered(request, done))
        try:
            await write_frame(self._writer, commands.encode(command))
        except BaseException as error:
            future.cancel()
            if isinstance(error, ConnectionError):
                raise ProcessDied(f"the training rank at {self.url} is gone ({error}); see its log") from error
            raise
        return future

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

    def _answered(self, request: int, future: asyncio.Future[Reply]) -> None:
        if self._waiting.get(request) is future:
            del self._waiting[request]
        if not future.cancelled():
            future.exception()  # seen; whoever awaits it is told all the same

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
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(ProcessDied(str(error)))


def raise_if_failed(reply: Reply) -> None:
    """What a rank refused is raised here as the error it raised there."""
    if isinstance(reply, Failed):
        raise RAISED.get(reply.kind, ArealError)(reply.message)
