"""Bytes that are no request, not yet a request, or one that never ends: answered in JSON, bounded, and let go of."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from areal.web.address import bind
from areal.web.app import add_route, create_app, send_json
from areal.web.body import read_body
from areal.web.protocol import LARGEST_HEAD, Http1
from areal.web.serve import serve


@pytest.fixture
async def port() -> AsyncIterator[int]:
    app = create_app("bytes", max_body_bytes=1 << 20)

    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, {"body": (await read_body(receive)).decode(), "headers": len(scope["headers"])})

    add_route(app, "/echo", echo, ["GET", "POST"])
    sock, stop, ready = bind("127.0.0.1", 0), asyncio.Event(), asyncio.Event()
    server = asyncio.create_task(serve(app, sock, ready=lambda _: ready.set(), stop=stop, grace_s=1))
    await ready.wait()
    yield sock.getsockname()[1]
    stop.set()
    await server


class Link:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = await self.reader.readexactly(int(headers["content-length"]))
        return int(head[0].split(" ")[1]), headers, json.loads(body)

    async def closed(self) -> bool:
        return await self.reader.read() == b""


Connect = Callable[[], Awaitable[Link]]


@pytest.fixture
async def connect(port: int) -> AsyncIterator[Connect]:
    """connect() opens a connection of its own."""
    links: list[Link] = []

    async def one() -> Link:
        links.append(Link(*await asyncio.open_connection("127.0.0.1", port)))
        return links[-1]

    yield one
    for link in links:
        link.writer.close()
        with contextlib.suppress(ConnectionError):
            await link.writer.wait_closed()


def post(body: bytes, *more: str) -> bytes:
    head = ["POST /echo HTTP/1.1", "host: localhost", f"content-length: {len(body)}", *more]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS client
        b"hello\r\n\r\n",
        b"FLY / HTTP/1.1\r\n\r\n",
        b"GET /echo HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_a_json_400(connect: Connect, data: bytes) -> None:
    link = await connect()
    await link.send(data)
    status, headers, body = await link.answer()
    assert (status, headers["content-type"], headers["connection"]) == (400, "application/json", "close")
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert await link.closed()


@pytest.mark.parametrize("kind", ["one endless header", "many headers", "an endless url", "in one piece"])
async def test_a_head_without_end_is_431(connect: Connect, kind: str) -> None:
    link = await connect()
    piece = {"many headers": b"a: b\r\n" * 200, "an endless url": b"y" * 1200}.get(kind, b"x" * 1200)
    await link.send(b"GET /echo?" if kind == "an endless url" else b"GET /echo HTTP/1.1\r\nhost: localhost\r\nlong: ")
    if kind == "in one piece":
        await link.send(b"x" * (LARGEST_HEAD + 1) + b"\r\n\r\n")
    else:
        for _ in range(LARGEST_HEAD // 1200 + 2):
            await link.send(piece)
    status, _, body = await link.answer()
    assert status == 431
    assert str(LARGEST_HEAD) in body["error"]["message"]


async def test_a_large_head_and_a_large_body_within_the_bounds_pass(connect: Connect) -> None:
    link = await connect()
    for _ in range(2):  # the bound is one request's, not the connection's
        await link.send(post(b"b" * 300_000, "long: " + "x" * 60_000))
        status, _, body = await link.answer()
        assert (status, len(body["body"])) == (200, 300_000)


async def test_a_request_that_stops_coming_is_let_go(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Http1, "stalled_s", 0.2)
    silent, head, body = await connect(), await connect(), await connect()
    await head.send(b"GET /echo HTTP/1.1\r\nhost")
    await body.send(post(b"x" * 10)[:-3])
    assert (await head.answer())[0] == 408
    assert await head.closed()
    assert await silent.closed()
    assert await body.closed()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
async def test_an_offered_upgrade_is_not_taken_and_loses_nothing(connect: Connect, split: bool, chunked: bool) -> None:
    link = await connect()
    offer = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB"
    if chunked:
        head = f"POST /echo HTTP/1.1\r\nhost: localhost\r\n{offer}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        whole = head + b"5\r\nhello\r\n0\r\n\r\n"
    else:
        whole = post(b"hello", offer)
    for _ in range(2):
        if split:
            at = whole.index(b"hello") - 1
            await link.send(whole[:at])
            await asyncio.sleep(0.05)
            await link.send(whole[at:])
        else:
            await link.send(whole)
        status, _, body = await link.answer()
        assert (status, body["body"]) == (200, "hello")
    await link.send(b"GET /echo HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
    assert (await link.answer())[2]["body"] == ""
    await link.send(post(b"after"))
    assert (await link.answer())[2]["body"] == "after"


async def test_requests_sent_ahead_are_answered_in_order(connect: Connect) -> None:
    link = await connect()
    await link.send(post(b"one") + post(b"two", "connection: upgrade", "upgrade: h2c") + post(b"three"))
    assert [(await link.answer())[2]["body"] for _ in range(3)] == ["one", "two", "three"]
