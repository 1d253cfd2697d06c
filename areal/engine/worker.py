"""A rank's process: a training engine behind a TCP port on loopback. Started by the scheduler; the leader of a net is driven by EngineClient,
the others by the leader.

    python -m areal.engine.worker --spec FILE              # job keys: engine/settings.py: EngineSettings, and `place`: engine/place.py

It binds a free port, meets the other ranks of its net, loads the model, reports tcp://127.0.0.1:PORT. A link starts with Hello (run token, protocol).
Commands run one at a time in one thread, in the order they came, so the event loop keeps answering; an error becomes a Failed reply and the rank
goes on, unless it broke the net (chorus.py): then the process ends with the reason. A checkpoint is copied in that thread and written in another,
one at a time, while further commands run; its reply comes when it is on disk. Of several ranks each copies and writes its own part: the followers
when the leader has made the folder and says Write, over a second link; the leader finishes it. SIGTERM ends it at once (0), but lets a checkpoint or a publication in
progress finish. Weights leave through areal.weights.
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
from functools import partial
from typing import TypeVar

import msgspec
from pydantic import ValidationError

from areal.base.errors import ArealError, ConfigError, ProcessDied
from areal.cluster.child import ChildSpec, report_ready, run_child
from areal.engine import commands
from areal.engine.checkpoint_files import File
from areal.engine.chorus import Crew, Follower, Leader
from areal.engine.commands import (
    Done,
    Failed,
    Hello,
    Load,
    Publish,
    Reply,
    Restore,
    Save,
    Score,
    Stop,
    TrainStep,
    Where,
    Write,
)
from areal.engine.frames import read_frame, write_frame
from areal.engine.link import raise_if_failed
from areal.engine.performer import Copied, Files, Performer
from areal.engine.place import Place
from areal.engine.settings import EngineSettings
from areal.models.torch_install import check_torch

HELLO_BYTES = 4096
HELLO_SECONDS = 10.0
OTHERS_FIRST_S = 2.0
"""How long a rank that ends because another one did waits, so that the run sees the other's end first."""
R = TypeVar("R")
Asked = Load | Score | TrainStep | Publish | Save | Restore | Stop


class RankServer:
    """Serves one rank; see the module's docstring."""

    def __init__(self, performer: Performer, crew: Crew, thread: ThreadPoolExecutor, token: str) -> None:
        self._performer = performer
        self._crew = crew
        self._thread = thread
        self._token = token
        self._turn = asyncio.Lock()
        self._running: Asked | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: asyncio.Task[None] | None = None
        self._held: Copied | None = None  # a follower's part, until the leader has asked for it
        self._let_go = asyncio.Event()
        self._links = 0
        self.broken: ProcessDied | None = None
        """Why no command can be run any more."""
        self.stopping = asyncio.Event()
        self.deserted = asyncio.Event()
        """Nobody is linked any more, who was."""

    @property
    def busy(self) -> bool:
        """A command runs at this moment."""
        return self._running is not None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One link, until it closes."""
        greeted = False
        try:
            if greeted := await self._greet(reader, writer):
                self._links += 1
                while (frame := await read_frame(reader)) is not None:
                    await self._serve(commands.decode_command(frame), writer)
        except (OSError, TimeoutError, msgspec.DecodeError) as error:
            print(f"a link ended: {error}", file=sys.stderr, flush=True)
        finally:
            writer.close()
            self._links -= greeted
            if greeted and not self._links:
                self.deserted.set()

    async def load(self, *, within_s: float) -> None:
        """The first command; a leader gives it to itself. Raises what kept the net from being loaded."""
        reply = await self._answer(Load(0), within_s)
        if isinstance(reply, Failed):
            raise_if_failed(reply)

    async def finish_writing(self) -> None:
        """Wait for a checkpoint or a publication in progress; training may be cut off, it leaves nothing half done."""
        if isinstance(self._running, Save | Publish):
            async with self._turn:
                pass
        if self._held is not None:
            await _first_of(self._let_go, self.deserted)
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

    async def _serve(self, command: commands.Command, writer: asyncio.StreamWriter) -> None:
        if isinstance(command, Hello):
            reply: Reply | Copied = Failed(0, "ArealError", "this link has said hello already")
        elif isinstance(command, Where):
            if isinstance(self._crew, Follower):
                self._crew.asked = True
            reply = self._performer.standing(command.request)
        elif isinstance(command, Write):
            reply = await self._write_own(command)
        else:
            if isinstance(command, Save):
                await self.written()
            settings, place = self._performer.settings, self._performer.place
            within_s = place.within_s if isinstance(command, Load) else settings.step_timeout_seconds
            reply = await self._answer(command, within_s)
        if isinstance(reply, Copied) and isinstance(self._crew, Follower):
            self._held = reply
            self._let_go.clear()
            reply = Done(reply.command.request)
        if isinstance(reply, Copied):
            self._writing = asyncio.create_task(self._write(reply, writer))
        else:
            await write_frame(writer, commands.encode(reply))
        if isinstance(command, Stop) or self.broken:
            self.stopping.set()

    async def _answer(self, command: Asked, within_s: float) -> Reply | Copied:
        async with self._turn:
            if self.broken:
                return Failed(command.request, "ProcessDied", str(self.broken))
            self._running = command
            try:
                own = self._attempt(self._thread, command, partial(self._performer.run, command, within_s=within_s))
                return await self._crew.together(command, own, within_s=within_s)
            except ProcessDied as error:
                self.broken = error
                return Failed(command.request, "ProcessDied", str(error))
            finally:
                self._running = None

    async def _write(self, copied: Copied, link: asyncio.StreamWriter) -> None:
        """Beside whatever is commanded next; the reply goes where the command came from."""
        try:
            reply = await self._written_together(copied)
        except ProcessDied as error:
            self.broken = error
            reply = Failed(copied.command.request, "ProcessDied", str(error))
        if isinstance(reply, Failed):
            await self._attempt(self._writer, copied.command, partial(self._performer.abandon, copied))
        with suppress(OSError):  # whoever asked is gone; the checkpoint stands all the same
            await write_frame(link, commands.encode(reply))
        if self.broken:
            self.stopping.set()

    async def _written_together(self, copied: Copied) -> Done | Failed:
        """Raises ProcessDied where another rank ended meanwhile."""
        performer, command, started = self._performer, copied.command, time.monotonic()
        begun = await self._attempt(self._writer, command, partial(performer.begin, copied))
        others = asyncio.create_task(self._crew.write(Write(command.request, go=not isinstance(begun, Failed))))
        if isinstance(begun, Failed):
            await others
            return begun
        own = await self._attempt(self._writer, command, partial(performer.write_own, copied))
        files: dict[str, File] = {}
        for part in (own, *(said if isinstance(said, Failed) else said.info["files"] for said in await others)):
            if isinstance(part, Failed):
                return part
            files |= msgspec.convert(part, dict[str, File])
        seconds = time.monotonic() - started
        return await self._attempt(self._writer, command, partial(performer.finish, copied, files, seconds))

    async def _write_own(self, command: Write) -> Done | Failed:
        """A follower's part of the checkpoint that was held last."""
        held = self._held
        files: Files | Failed = {}
        if held is None:
            return Failed(command.request, "CheckpointError", f"{self._performer.place.name} holds nothing to write")
        try:
            if command.go:
                files = await self._attempt(self._writer, held.command, partial(self._performer.write_own, held))
        finally:
            self._held = None
            self._let_go.set()
        return files if isinstance(files, Failed) else Done(command.request, {"files": msgspec.to_builtins(files)})

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


async def main(spec: ChildSpec) -> None:
    """Meet, load, serve, end on Stop or SIGTERM, or where the net is broken."""
    settings, place = _read(spec)
    check_torch()
    performer = Performer(settings, place, spec.run_dir)
    thread = ThreadPoolExecutor(1, thread_name_prefix="engine")  # TrainEngine.load sets torch's thread count in it
    leader = Leader(place, performer.standing) if place.rank == 0 else None
    rank = RankServer(performer, leader or Follower(place), thread, spec.run_token)
    server = await asyncio.start_server(rank.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    url, begun, code = f"tcp://{host}:{port}", time.monotonic(), 0
    try:
        urls = await asyncio.get_running_loop().run_in_executor(thread, performer.come, url)
        if leader is not None:
            await leader.connect(urls, spec.run_token)
            await rank.load(within_s=max(1.0, place.within_s - (time.monotonic() - begun)))
        report_ready(spec, url=url)
        await _until_the_end(rank, place)
    except ProcessDied as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = 1
        if rank.broken is None or leader is not None:
            await asyncio.sleep(OTHERS_FIRST_S)
    except asyncio.CancelledError:  # SIGTERM
        code = 0
    finally:
        server.close()
        await rank.finish_writing()
        performer.close()
    # A training step cannot be interrupted inside torch, and the interpreter would wait for its thread.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _read(spec: ChildSpec) -> tuple[EngineSettings, Place]:
    job = dict(spec.job)
    try:
        place = Place.model_validate(job.pop("place", {}))
        return EngineSettings.model_validate(job), place
    except ValidationError as error:
        raise ConfigError(f"the spec of {spec.name} does not fit this version of areal: {error}") from None


async def _first_of(*events: asyncio.Event) -> None:
    """Returns where one of them is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


async def _until_the_end(rank: RankServer, place: Place) -> None:
    """Returns where the rank was asked to end; raises ProcessDied where it cannot go on."""
    await _first_of(rank.stopping, *([rank.deserted] if place.rank else []))
    if rank.broken is not None:
        raise rank.broken
    if not rank.stopping.is_set():
        raise ProcessDied(f"{place.names[0]}, which leads the ranks of this net, is gone")


if __name__ == "__main__":
    run_child(main)
