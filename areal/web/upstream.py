"""HTTP/1.1 towards our own ports, for answers that stream: bytes are there when the socket has them, with nothing in between.

    upstream = Upstream(connect_s=5.0, idle_s=2.0)
    answer = await upstream.request("POST", url, headers, body, silence_s=60.0)    # when its head is here
    try:
        while data := await answer.read():      # what has come, b"" at the end
            ...
    finally:
        answer.close()                          # before its end: closes the connection, which is how a request is aborted
    upstream.close()

A general client sets a timer anew for every chunk and moves it through a reader, a response and their helpers: a third of what a
streamed token costs in this process. Here a connection is one asyncio.Protocol under llhttp's parser. Connections are kept for
idle_s after a whole answer, so keep that below the server's own. Bodies are not decoded, redirects not followed, nothing is sent
twice, no proxies (T103), no cookies. Reading slowly slows the sender down. Used by gateway/splice.py and inference/client.py.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
from collections.abc import AsyncIterable, Sequence
from functools import lru_cache
from urllib.parse import SplitResult, urlsplit

import httptools

HIGH_WATER = 256 * 1024  # bytes that wait to be read before the sender has to wait

RawHeaders = Sequence[tuple[bytes, bytes]]  # names in lower case

_FRAMING = frozenset((b"content-length", b"transfer-encoding"))
_TARGET = re.compile(r"[!-~]+")


class NotConnected(ConnectionError):
    """No connection could be opened, so nothing was sent."""


class Upstream:
    """Connections to any number of servers. One event loop, any number of tasks."""

    def __init__(self, *, connect_s: float, idle_s: float) -> None:
        """connect_s: longest wait for a new connection. idle_s: how long an unused one is kept."""
        self._connect_s = connect_s
        self._idle_s = idle_s
        self._idle: dict[tuple[str, int], list[_Connection]] = {}  # by host and port, the longest unused first
        self._open: set[_Connection] = set()

    async def request(
        self,
        method: str,
        url: str,
        headers: RawHeaders,
        body: bytes | AsyncIterable[bytes],
        *,
        silence_s: float,
    ) -> Answer:
        """Send a request and wait for the head of its answer. silence_s: longest wait for the next bytes of it.

        The url is sent as it is. Without a content-length among the headers a body that is an iterable is sent in chunks. Raises
        NotConnected, TimeoutError, ConnectionError, and what the iterable raises."""
        parts, target = _split(url)
        head = [f"{method} {target} HTTP/1.1\r\n".encode(), f"host: {parts.netloc}\r\n".encode()]
        head += [b"%b: %b\r\n" % pair for pair in headers]
        if b"".join(head).count(b"\n") != len(head):
            raise ValueError("a header holds a line end")
        connection = await self._connected(parts.hostname or "", parts.port, secure=parts.scheme == "https")
        answer = Answer(connection, silence_s, head_only=method == "HEAD")
        try:
            answer.send(head, body, sized=any(name == b"content-length" for name, _ in headers))
            await answer.head()
        except BaseException:
            answer.close()
            raise
        return answer

    def close(self) -> None:
        """Close all connections; answers that still run break."""
        for connection in list(self._open):
            connection.abort()

    async def _connected(self, host: str, port: int | None, *, secure: bool) -> _Connection:
        place = host, port or (443 if secure else 80)
        idle, loop = self._idle.get(place, []), asyncio.get_running_loop()
        while idle:
            connection = idle.pop()
            if loop.time() - connection.idle_since < self._idle_s and not connection.transport.is_closing():
                return connection
            connection.abort()  # as are those below, when their turn comes or the server closes them
        try:
            async with asyncio.timeout(self._connect_s):
                tls = ssl.create_default_context() if secure else None
                _, connection = await loop.create_connection(lambda: _Connection(self, place), *place, ssl=tls)
        except TimeoutError:
            raise NotConnected("connecting timed out") from None
        except OSError as error:
            # Not the loop's own words, which hold the address.
            known = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror
            raise NotConnected(known or "no address of it takes a connection") from error
        return connection

    def opened(self, connection: _Connection) -> None:
        self._open.add(connection)

    def free(self, connection: _Connection) -> None:
        """Its answer is complete; the next request may have it."""
        self._idle.setdefault(connection.place, []).append(connection)

    def lost(self, connection: _Connection) -> None:
        self._open.discard(connection)
        idle = self._idle.get(connection.place, [])
        if connection in idle:
            idle.remove(connection)


class _Connection(asyncio.Protocol):
    """A socket, and the answer that is being read from it."""

    def __init__(self, upstream: Upstream, place: tuple[str, int]) -> None:
        self.place = place
        self.idle_since = 0.0
        self.answer: Answer | None = None
        self.writable = asyncio.Event()
        self.writable.set()
        self._upstream = upstream

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._upstream.opened(self)

    def data_received(self, data: bytes) -> None:
        if self.answer is None:  # nobody asked
            self.abort()
        else:
            self.answer.feed(data)

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._upstream.lost(self)
        self.writable.set()
        if self.answer is not None:
            self.answer.lost(exc)

    def release(self) -> None:
        self.answer, self.idle_since = None, asyncio.get_running_loop().time()
        self._upstream.free(self)

    def abort(self) -> None:
        self.transport.abort()


class Answer:
    """One answer as it comes; also what llhttp's parser calls. One task reads it."""

    def __init__(self, connection: _Connection, silence_s: float, *, head_only: bool) -> None:
        self.status = 0  # until the head is here
        self.headers: list[tuple[bytes, bytes]] = []  # as they were sent
        self._connection: _Connection | None = connection
        self._head_only = head_only
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._waiting_bytes = 0  # in parts
        self._paused = False
        self._ended = False
        self._until_closed = False  # the end of the connection is that of the answer
        self._reusable = False
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._heard_at = self._loop.time()
        self._timer = self._loop.call_later(silence_s, self._look)
        self._sending: asyncio.Task[None] | None = None
        connection.answer = self

    @property
    def complete(self) -> bool:
        """Nothing more comes, and nothing waits to be read."""
        return self._ended and not self._parts

    async def read(self) -> bytes:
        """What has come, as soon as there is something; b"" at the end. Raises TimeoutError after a silence, ConnectionError."""
        while not self._parts:
            if self._ended:
                return b""
            await self._more()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._waiting_bytes = 0
        if self._paused and self._connection is not None and not self._connection.transport.is_closing():
            self._connection.transport.resume_reading()
            self._paused = False
        return data

    def close(self) -> None:
        """Nobody reads on. A connection whose answer was complete is used again, any other closed."""
        self._timer.cancel()
        connection, self._connection = self._connection, None
        if connection is None:
            return
        del self._parser  # it holds this answer's methods
        if self._paused and not connection.transport.is_closing():
            connection.transport.resume_reading()
        if self._reusable and self._error is None and self._all_sent() and not connection.transport.is_closing():
            connection.release()
        else:
            connection.answer = None
            connection.abort()
            if self._sending is not None:
                self._sending.cancel()

    # -- what Upstream and the connection say ------------------------------------------------------------------------

    def send(self, head: list[bytes], body: bytes | AsyncIterable[bytes], *, sized: bool) -> None:
        """head: its lines. sized: a content-length stands in it."""
        assert self._connection is not None
        if isinstance(body, bytes):
            if not sized and body:
                head.append(b"content-length: %d\r\n" % len(body))
            self._connection.transport.write(b"".join([*head, b"\r\n", body]))
            return
        if not sized:
            head.append(b"transfer-encoding: chunked\r\n")
        self._connection.transport.write(b"".join([*head, b"\r\n"]))
        self._sending = asyncio.create_task(self._upload(self._connection, body, chunked=not sized))
        self._sending.add_done_callback(self._sent)

    async def head(self) -> None:
        """Wait for status and headers."""
        while not self.status:
            await self._more()

    def feed(self, data: bytes) -> None:
        """The server's next bytes."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail(ConnectionError("what it sent is no HTTP answer"))
        if self._waiting_bytes >= HIGH_WATER and not self._paused and self._connection is not None:
            self._connection.transport.pause_reading()
            self._paused = True
        self._wake()

    def lost(self, exc: Exception | None) -> None:
        """The connection is closed, by whichever side."""
        if self.status and self._until_closed and exc is None:
            self._ended = True
        elif not self._ended:
            self._fail(exc or ConnectionError("answer cut short" if self.status else "disconnected"))
        self._wake()

    # -- what the parser says ----------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # else it stands behind the body, and may mean anything
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._ended:
            return
        status = self._parser.get_status_code()
        if status < 200:  # 100 or 103: the answer itself comes behind it
            self.headers.clear()
            return
        self.status = status
        self._until_closed = _FRAMING.isdisjoint(name.lower() for name, _ in self.headers)
        self._ended = self._head_only

    def on_body(self, data: bytes) -> None:
        if not self._ended:
            self._parts.append(data)
            self._waiting_bytes += len(data)

    def on_message_complete(self) -> None:
        if self.status and not self._ended:
            self._ended = True
            self._reusable = not self._head_only and self._parser.should_keep_alive()

    def on_message_begin(self) -> None:
        self._reusable = False  # should it be a second one, which is nobody's answer

    # ----------------------------------------------------------------------------------------------------------------

    def _more(self) -> asyncio.Future[None]:
        """Done when something has happened. Raises what went wrong before."""
        if self._error is not None:
            raise self._error
        self._heard_at = self._loop.time()
        self._waiter = self._loop.create_future()
        return self._waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # else its reader was cancelled
            waiter.set_result(None)

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._wake()

    def _look(self) -> None:
        waits = self._waiter is not None and not self._waiter.done()
        silent_s = self._loop.time() - self._heard_at if waits else 0.0
        if silent_s >= self._silence_s:
            self._fail(TimeoutError())
        else:
            self._timer = self._loop.call_later(self._silence_s - silent_s, self._look)

    async def _upload(self, connection: _Connection, body: AsyncIterable[bytes], *, chunked: bool) -> None:
        async for data in body:
            self._heard_at = self._loop.time()  # the server has to wait for this
            if data:
                connection.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)
            await connection.writable.wait()
        if chunked:
            connection.transport.write(b"0\r\n\r\n")

    def _all_sent(self) -> bool:
        """Whether nothing of the request is missing: a server that answered early would take the next one for its rest."""
        sending = self._sending
        return sending is None or (sending.done() and not sending.cancelled() and sending.exception() is None)

    def _sent(self, sending: asyncio.Task[None]) -> None:
        error = None if sending.cancelled() else sending.exception()
        if error is not None:
            self._fail(error)


@lru_cache(256)
def _split(url: str) -> tuple[SplitResult, str]:
    """The url's parts, and what stands in the request line. Raises ValueError if that would be no line."""
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not _TARGET.fullmatch(target):
        raise ValueError(f"{target[:200]!r} cannot stand in a request; quote it")
    return parts, target
