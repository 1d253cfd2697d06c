"""A gateway on real sockets with a real store, in front of a stand-in worker that speaks HTTP byte by byte."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from areal.base.types import Limits, WorkerInfo
from areal.gateway.app import GatewayApp
from areal.gateway.attachment import Attachment
from areal.gateway.channel import ChannelDoor
from areal.gateway.control import Control
from areal.gateway.splice import Splice
from areal.gateway.state import RunFacts
from areal.store import open_store, store_url
from areal.store.base import Store
from areal.web.address import bind
from areal.web.auth import SessionKeys
from tests.channel.stub import StubChannel
from tests.gateway.channel_gateway import serving

ADMIN = "test-admin-key-4711"


@dataclass
class Call:
    """One request as the worker got it, and the socket to answer on."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def reply(self, body: bytes, *, status: str = "200 OK", headers: str = "") -> None:
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
        await self.send(head.encode() + body)

    async def begin_stream(self, content_type: str = "text/event-stream; charset=utf-8") -> None:
        await self.send(
            f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        )

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def end_stream(self) -> None:
        await self.send(b"0\r\n\r\n")


Answer = Callable[[Call], Awaitable[None]]


async def echo(call: Call) -> None:
    """The default answer: what the worker got."""
    await call.reply(orjson.dumps({"path": call.path, "headers": call.headers, "body": call.body.decode("latin-1")}))


@dataclass
class Worker:
    """A stand-in for a rollout worker: answers with whatever `answer` writes."""

    id: str
    answer: Answer = echo
    calls: list[Call] = field(default_factory=list)
    client_left: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""
    server: asyncio.Server | None = None

    async def start(self, port: int = 0) -> None:
        self.server = await asyncio.start_server(self._connection, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None
        for call in self.calls:
            call.writer.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while call := await _read_call(reader, writer):
                self.calls.append(call)
                answering = asyncio.ensure_future(self.answer(call))
                watching = asyncio.ensure_future(reader.read(1))  # ends with b"" when the client leaves
                await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
                if watching.done() and not answering.done():
                    self.client_left.set()
                    answering.cancel()
                watching.cancel()
                await asyncio.gather(answering, watching, return_exceptions=True)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


async def _read_call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Call | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    first, *lines = head.strip().split("\r\n")
    method, path, _ = first.split(" ")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(": ")
        headers[name.lower()] = value
    body = b""
    if headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    elif "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    return Call(method, path, headers, body, writer, reader)


@dataclass
class Place:
    """One run as the gateway sees it: store, keys, workers; and the gateway in front of it."""

    folder: Path
    store: Store
    keys: SessionKeys
    facts: RunFacts
    workers: dict[str, Worker] = field(default_factory=dict)
    url: str = ""

    async def add_worker(self, name: str, answer: Answer = echo) -> Worker:
        worker = Worker(name, answer)
        await worker.start()
        self.workers[name] = worker
        await self.heartbeat(worker)
        return worker

    async def heartbeat(self, worker: Worker) -> None:
        await self.store.registry.heartbeat(WorkerInfo(worker.id, worker.url, os.getpid(), "host", time.time()))

    def key(self, worker: str = "w0") -> str:
        return self.keys.mint(worker)

    def headers(self, key: str | None = None) -> dict[str, str]:
        return {"authorization": f"Bearer {key or self.key()}"}

    @asynccontextmanager
    async def gateway(
        self,
        *,
        host: str = "127.0.0.1",
        body_limit: int = 1 << 20,
        reading_age_s: float = 0.2,
        door: ChannelDoor | None = None,
        **timeouts: float,
    ) -> AsyncIterator[str]:
        """A gateway that serves this run, for the block; its URL."""
        listener = bind(host, 0)
        attachment = Attachment(port=listener.getsockname()[1], loopback=True, reading_age_s=reading_age_s)
        async with attachment, Splice(**timeouts) as splice:
            await attachment.attach(self.facts)
            control = Control(attachment, "secret")
            app = GatewayApp(attachment, splice, control, loopback=True, body_limit=body_limit, door=door)
            async with serving(app, listener) as url:
                yield url


@pytest.fixture
def upstream() -> Iterator[StubChannel]:
    with StubChannel() as channel:
        yield channel


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Place]:
    """A run without workers and without a gateway."""
    url = store_url(tmp_path / "store.sqlite")
    async with await open_store(url) as store:
        await store.training.set_limits(Limits(max_concurrent=1000, max_lag=10, batch_groups=1000))
        facts = RunFacts(
            run_id="exp/trial",
            pid=os.getpid(),
            store_url=url,
            signing_key_path=str(tmp_path / "signing.key"),
            admin_api_key=ADMIN,
            model_names=("default", "policy"),
        )
        place = Place(tmp_path, store, SessionKeys.load(tmp_path), facts)
        yield place
        for worker in place.workers.values():
            await worker.stop()


@pytest.fixture
async def place(run: Place) -> AsyncIterator[Place]:
    """A run with worker w0 and a gateway at `place.url`."""
    await run.add_worker("w0")
    async with run.gateway() as url:
        run.url = url
        yield run


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A client without connection limit, time-out or automatic decompression."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), auto_decompress=False, timeout=aiohttp.ClientTimeout(total=60)
    ) as session:
        yield session


@pytest.fixture
def admin() -> dict[str, Any]:
    return {"authorization": f"Bearer {ADMIN}"}
