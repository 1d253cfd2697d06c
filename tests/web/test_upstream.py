"""HTTP/1.1 towards our own ports, over real sockets: what servers may do to an answer, and whose connection is used again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from areal.web.upstream import HIGH_WATER, Answer, NotConnected, Upstream

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Server:
    """Plays `answer` for each request; counts connections and keeps the requests' bytes."""

    def __init__(self) -> None:
        self.answer: Callable[[asyncio.StreamWriter], Awaitable[None]] = self.plain
        self.connections = 0
        self.requests: list[bytes] = []
        self.early = False  # answers when it has the head
        self.left = asyncio.Event()

    async def plain(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if self.early:
                    await self.answer(writer)
                if b"transfer-encoding: chunked" in head:
                    body = await reader.readuntil(b"0\r\n\r\n")
                else:
                    length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
                    body = await reader.readexactly(int(length or 0))
                self.requests.append(head + body)
                if not self.early:
                    await self.answer(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left.set()
        finally:
            writer.close()


@asynccontextmanager
async def serving(server: Server, *, idle_s: float = 60.0) -> AsyncIterator[tuple[Upstream, str]]:
    upstream = Upstream(connect_s=5.0, idle_s=idle_s)
    listening = await asyncio.start_server(server.connection, "127.0.0.1", 0)
    try:
        yield upstream, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        upstream.close()
        listening.close()
        await asyncio.sleep(0)  # the connections hear of it


async def whole(answer: Answer) -> bytes:
    parts = []
    try:
        while data := await answer.read():
            parts.append(data)
    finally:
        answer.close()
    return b"".join(parts)


async def get(upstream: Upstream, url: str, *, method: str = "GET", silence_s: float = 30.0) -> Answer:
    return await upstream.request(method, url, [(b"x-mine", b"1")], b"", silence_s=silence_s)


async def test_a_connection_is_used_again_after_a_whole_answer_and_no_other() -> None:
    server = Server()
    async with serving(server) as (upstream, url):
        for _ in range(3):
            assert await whole(await get(upstream, url + "/a?b=%20")) == b"ok"
        assert server.connections == 1
        assert server.requests[0].startswith(b"GET /a?b=%20 HTTP/1.1\r\nhost: 127.0.0.1:")
        (await get(upstream, url)).close()  # its end came with its head and was not read
        await whole(await get(upstream, url))
        assert server.connections == 1

        async def endless(writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
            await asyncio.Event().wait()

        server.answer = endless
        answer = await get(upstream, url)
        assert await answer.read() == b"x"
        assert not answer.complete
        answer.close()
        server.answer = server.plain
        assert await whole(await get(upstream, url)) == b"ok"
        assert server.connections == 2


async def test_a_connection_on_which_a_request_broke_off_is_not_used_again() -> None:
    """The server had answered before it had all of it, and would take the next request for the rest."""
    server, give_up, given_up = Server(), asyncio.Event(), asyncio.Event()
    server.early = True

    async def upload() -> AsyncIterator[bytes]:
        yield b"abc"
        await give_up.wait()
        given_up.set()
        raise OverflowError("too large")

    async with serving(server) as (upstream, url):
        answer = await upstream.request("POST", url, [(b"content-length", b"9")], upload(), silence_s=30)
        give_up.set()
        await given_up.wait()
        assert await whole(answer) == b"ok"
        assert await whole(await get(upstream, url)) == b"ok"
        assert server.connections == 2
        assert server.requests[-1].startswith(b"GET / HTTP/1.1\r\n")


async def test_a_connection_that_was_unused_for_too_long_is_not_used_again() -> None:
    server = Server()
    async with serving(server, idle_s=0.0) as (upstream, url):
        for _ in range(2):
            await whole(await get(upstream, url))
    assert server.connections == 2


@pytest.mark.parametrize(
    ("sent", "body"),
    [
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", b"abcde"),
        (b"HTTP/1.1 103 Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc", b"abc"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nlink: x\r\n\r\n", b"abc"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabcHTTP/1.1 500 No\r\ncontent-length: 2\r\n\r\nno", b"abc"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nuntil the end", b"until the end"),
    ],
)
@pytest.mark.parametrize("step", [1, 1000])
async def test_answers_of_every_framing_are_read_however_they_are_cut(sent: bytes, body: bytes, step: int) -> None:
    server = Server()

    async def answer(writer: asyncio.StreamWriter) -> None:
        for start in range(0, len(sent), step):
            writer.write(sent[start : start + step])
            await asyncio.sleep(0)
        if b"close" in sent:
            writer.close()

    server.answer = answer
    async with serving(server) as (upstream, url):
        got = await get(upstream, url)
        assert got.status == (204 if b"204" in sent else 200)
        assert (b"link", b"x") not in got.headers
        assert await whole(got) == body


async def test_an_answer_to_head_has_no_body_whatever_its_length_says() -> None:
    server = Server()

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n")

    server.answer = answer
    async with serving(server) as (upstream, url):
        got = await get(upstream, url, method="HEAD")
        assert (await whole(got), got.complete) == (b"", True)


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"", "disconnected"),
        (b"SSH-2.0-x\r\n", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc", "cut short"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", "cut short"),
    ],
)
async def test_what_breaks_off_is_no_whole_answer(sent: bytes, error: str) -> None:
    server = Server()

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        writer.close()

    server.answer = answer
    async with serving(server) as (upstream, url):
        with pytest.raises(ConnectionError, match=error):
            await whole(await get(upstream, url))


async def test_silence_is_the_servers_and_not_a_readers_who_comes_late() -> None:
    server, go_on = Server(), asyncio.Event()

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
        await go_on.wait()
        writer.write(b"1\r\ny\r\n")

    server.answer = answer
    async with serving(server) as (upstream, url):
        got = await get(upstream, url, silence_s=1.5)
        await asyncio.sleep(2.0)
        assert await got.read() == b"x"
        go_on.set()
        assert await got.read() == b"y"
        with pytest.raises(TimeoutError):
            await got.read()
        got.close()


async def test_a_reader_that_does_not_read_makes_the_sender_wait() -> None:
    server, sent = Server(), 0
    size = 64 << 20

    async def answer(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        while sent < size:
            writer.write(b"x" * (1 << 20))
            await writer.drain()
            sent += 1 << 20

    server.answer = answer
    async with serving(server) as (upstream, url):
        got = await get(upstream, url)
        still = 0
        while still < 10:  # until it cannot go on, which one look in a moment of standing still does not tell
            before = sent
            await asyncio.sleep(0.05)
            still = still + 1 if before == sent > 0 else 0
        assert sent < size
        first = await got.read()
        assert HIGH_WATER <= len(first) < size
        assert len(first) + len(await whole(got)) == size


async def test_an_upload_goes_up_in_chunks_and_its_failure_is_the_requests() -> None:
    server = Server()

    async def upload(fails: bool) -> AsyncIterator[bytes]:
        yield b"abc"
        if fails:
            raise OverflowError("too large")
        yield b"de"

    async with serving(server) as (upstream, url):
        assert await whole(await upstream.request("POST", url, [], upload(False), silence_s=30)) == b"ok"
        assert server.requests[0].endswith(b"\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
        with pytest.raises(OverflowError):
            await upstream.request("POST", url, [], upload(True), silence_s=30)
        await asyncio.wait_for(server.left.wait(), 60)


async def test_where_nobody_listens_nothing_was_sent() -> None:
    server = Server()
    async with serving(server) as (_, url):
        pass
    upstream = Upstream(connect_s=5.0, idle_s=1.0)
    with pytest.raises(NotConnected, match="Connection refused") as refused:
        await get(upstream, url)
    assert "127.0.0.1" not in str(refused.value)


@pytest.mark.parametrize(
    ("path", "header"), [("/a b", b"1"), ("/a\r\nx: y", b"1"), ("/é", b"1"), ("/", b"1\r\nx-evil: 1"), ("/", b"1\n")]
)
async def test_nothing_that_would_be_another_line_is_sent(path: str, header: bytes) -> None:
    server = Server()
    async with serving(server) as (upstream, url):
        with pytest.raises(ValueError, match=r"line end|cannot stand"):
            await upstream.request("GET", url + path, [(b"x-mine", header)], b"", silence_s=30)
    assert server.connections == 0
