"""The rank process: a training engine behind a TCP port on loopback. Started by the scheduler, driven by EngineClient.

    python -m areal.engine.worker --spec FILE              # job keys: engine/settings.py: EngineSettings

It loads the model, binds a free port, reports tcp://127.0.0.1:PORT. A link starts with Hello (run token, protocol). Commands run one at a time in one
thread, in the order they came, so the event loop keeps answering; an error becomes a Failed reply and the rank goes on.
A checkpoint is copied in that thread and written in another, one at a time, while further commands run; its reply comes when it is on disk.
SIGTERM ends it at once (0), but lets a checkpoint or a publication in progress finish. Weights leave through areal.weights.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec
from pydantic import ValidationError

from areal.base.errors import ArealError, ConfigError
from areal.cluster.child import ChildSpec, report_ready, run_child
from areal.engine import checkpoint, commands
from areal.engine.commands import (
    Command,
    Done,
    Failed,
    Hello,
    Publish,
    Published,
    Reply,
    Restore,
    Save,
    Score,
    Scored,
    Stepped,
    Stop,
    TrainStep,
)
from areal.engine.engine import TrainEngine
from areal.engine.frames import read_frame, write_frame
from areal.engine.settings import EngineSettings
from areal.models.torch_install import check_torch
from areal.weights import Source, source

HELLO_BYTES = 4096
HELLO_SECONDS = 10.0
R = TypeVar("R")
Asked = Score | TrainStep | Publish | Save | Restore | Stop


@dataclass(frozen=True, slots=True)
class Copied:
    """A checkpoint that is to be written. seconds: how long the copy held up the engine's thread."""

    command: Save
    held: checkpoint.Held
    seconds: float


class RankServer:
    """Serves one engine; see the module's docstring."""

    def __init__(self, engine: TrainEngine, source: Source, thread: ThreadPoolExecutor, token: str) -> None:
        self._engine = engine
        self._source = source
        self._thread = thread
        self._token = token
        self._turn = asyncio.Lock()
        self._running: Command | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: asyncio.Task[None] | None = None
        self.stopping = asyncio.Event()

    @property
    def busy(self) -> bool:
        """A command runs at this moment."""
        return self._running is not None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One link, until it closes."""
        try:
            if await self._greet(reader, writer):
                while (frame := await read_frame(reader)) is not None:
                    command = commands.decode_command(frame)
                    if isinstance(command, Save):
                        await self.written()
                    reply = await self._answer(command)
                    if isinstance(reply, Copied):
                        self._writing = asyncio.create_task(self._write(reply, writer))
                    else:
                        await write_frame(writer, commands.encode(reply))
                    if isinstance(command, Stop):
                        self.stopping.set()
        except (OSError, TimeoutError, msgspec.DecodeError) as error:
            print(f"a link ended: {error}", file=sys.stderr, flush=True)
        finally:
            writer.close()

    async def finish_writing(self) -> None:
        """Wait for a checkpoint or a publication in progress; training may be cut off, it leaves nothing half done."""
        if isinstance(self._running, Save | Publish):
            async with self._turn:
                pass
        await self.written()

    async def written(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._writing is not None:
            await asyncio.wait({self._writing})

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        async with asyncio.timeout(HELLO_SECONDS):
            frame = await read_frame(reader, HELLO_BYTES)
        if frame is None:
            return False
        hello = commands.decode_command(frame)
        refusal: Failed | None = None
        if not isinstance(hello, Hello) or not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            refusal = Failed(0, "Forbidden", "wrong run token; only the controller of this run may command its ranks")
        elif hello.protocol != commands.PROTOCOL:
            refusal = Failed(
                0,
                "ConfigError",
                f"the rank speaks protocol {commands.PROTOCOL}, the controller {hello.protocol}; start both from one installation",
            )
        await write_frame(writer, commands.encode(refusal or Done(0, {"pid": os.getpid()})))
        return refusal is None

    async def _answer(self, command: Command) -> Reply | Copied:
        if isinstance(command, Hello):
            return Failed(0, "ArealError", "this link has said hello already")
        async with self._turn:
            self._running = command
            try:
                return await self._attempt(self._thread, command, partial(self._run, command))
            finally:
                self._running = None

    async def _write(self, copied: Copied, link: asyncio.StreamWriter) -> None:
        """Beside whatever is commanded next; the reply goes where the command came from."""
        reply = await self._attempt(self._writer, copied.command, partial(self._written, copied))
        with suppress(OSError):  # whoever asked is gone; the checkpoint stands all the same
            await write_frame(link, commands.encode(reply))

    async def _attempt(self, thread: ThreadPoolExecutor, command: Asked, work: Callable[[], R]) -> R | Failed:
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, work)
        except ArealError as error:
            return Failed(command.request, type(error).__name__, str(error))
        except Exception as error:  # the rank loop is one of the three places where anything may arrive
            traceback.print_exc()
            kind = type(error).__name__
            return Failed(
                command.request,
                "ArealError",
                f"{type(command).__name__} failed: {kind}: {error}; the rank's log has more",
            )

    def _written(self, copied: Copied) -> Reply:
        command, started = copied.command, time.monotonic()
        source_dir = self._engine.settings.model_dir
        checkpoint.write(command.path, copied.held, source_dir, step=command.step, about=command.about)
        seconds = {"held_seconds": copied.seconds, "write_seconds": time.monotonic() - started}
        return Done(command.request, seconds | {"bytes": copied.held.bytes})

    def _run(self, command: Command) -> Reply | Copied:
        match command:
            case Score(request, rows):
                return Scored(request, [values.astype("<f4").tobytes() for values in self._engine.score(rows)])
            case TrainStep(request, rows, step, current_version, lags):
                stats = self._engine.train_step(rows, step=step, current_version=current_version, lags=lags)
                return Stepped(request, stats)
            case Publish(request, version, retire):
                for old in retire:  # before, not after: two copies would stand beside each other at the peak of a step
                    self._source.retire(old)
                manifest = self._source.publish(self._engine.named_tensors(), version)
                return Published(request, manifest)
            case Save(step=step, full=full):
                started = time.monotonic()
                held = self._engine.hold(step, full=full)
                return Copied(command, held, time.monotonic() - started)
            case Restore(request, path):
                return Done(request, self._engine.restore(path))
            case Stop(request):
                return Done(request)
        raise ConfigError(f"a rank does not know {type(command).__name__}")


async def main(spec: ChildSpec) -> None:
    """Load, serve, end on Stop or SIGTERM."""
    try:
        settings = EngineSettings.model_validate(dict(spec.job))
    except ValidationError as error:
        raise ConfigError(f"the spec of {spec.name} does not fit this version of areal: {error}") from None
    check_torch()
    thread = ThreadPoolExecutor(1, thread_name_prefix="engine")  # TrainEngine.load sets torch's thread count in it
    engine = await asyncio.get_running_loop().run_in_executor(thread, TrainEngine.load, settings)
    weights = source(settings.transfer, spec.run_dir)
    rank = RankServer(engine, weights, thread, spec.run_token)
    server = await asyncio.start_server(rank.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    report_ready(spec, url=f"tcp://{host}:{port}")
    try:
        await rank.stopping.wait()
    finally:
        server.close()
        await rank.finish_writing()
        weights.close()
        # A training step cannot be interrupted inside torch, and the interpreter would wait for its thread.
        if rank.busy:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


if __name__ == "__main__":
    run_child(main)
