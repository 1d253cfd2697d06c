"""One exchange with a client: its request as it comes in, the answer as it goes out, and what breaks in between.

    exchange = Exchange(scope, receive, send, route, body_limit=32 << 20)
    call = await exchange.body.read()                  # only where the gateway must look; otherwise body.stream()
    await exchange.refuse(error)                       # before the answer began: status and body in the protocol's shape
    await exchange.break_off(error)                    # after it began: an error event in the stream, then its end

Holds no state beyond its request. errors.py shapes the errors; splice.py moves the bytes.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import asynccontextmanager
from urllib.parse import quote

from starlette.types import Message, Receive, Scope, Send

from areal.base.errors import ArealError, BodyTooLarge
from areal.gateway.errors import error_event, error_reply
from areal.gateway.paths import Route
from areal.web.body import ClientGone, decoded

Headers = Iterable[tuple[bytes, bytes]]
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")  # as web/app.py takes it, so that it stays one id on the whole way
_URL_CHARACTERS = "".join(map(chr, range(0x21, 0x7F)))  # of a query that is left as it is; other bytes are no URL
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")


class RequestBody:
    """The request's bytes, counted against the limit. whole: all of them, once they are here; None while they stream."""

    def __init__(self, receive: Receive, limit: int, declared: int | None) -> None:
        self.whole: bytes | None = b"" if declared == 0 else None
        self.received = asyncio.Event()
        self.limit = limit
        self._receive, self._declared = receive, declared
        self._first: Message | None = None
        if self.whole is not None:
            self.received.set()

    async def peek(self) -> None:
        """Wait for the first bytes. Most requests are whole with them, and then need no stream."""
        if self.whole is None and self._first is None:
            self._check(self._declared or 0)
            self._first = await self._next()
            if not self._first.get("more_body", False):
                self.whole = self._first["body"]

    async def read(self) -> bytes:
        """The whole body. Raises BodyTooLarge."""
        if self.whole is None:
            self.whole = b"".join([chunk async for chunk in self.stream()])
        return self.whole

    async def stream(self) -> AsyncIterator[bytes]:
        """The bytes as they come, once. Raises BodyTooLarge when they grow beyond the limit."""
        size, message = 0, self._first or await self._next()
        while True:
            size += len(message["body"])
            self._check(size)
            if message["body"]:
                yield message["body"]
            if not message.get("more_body", False):
                return
            message = await self._next()

    async def _next(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        message.setdefault("body", b"")
        if not message.get("more_body", False):
            self.received.set()
        return message

    def _check(self, size: int) -> None:
        if size > self.limit:
            raise BodyTooLarge(
                f"the request body is larger than {self.limit} bytes; send less, or raise rollout.agent.max_body_bytes"
            )


class Exchange:
    """One request and its answer, in the protocol of its route."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, route: Route, body_limit: int) -> None:
        self.route = route
        self.method: str = scope["method"]
        self.headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.status = 0  # of the answer, 0 until it begins
        self.broken = ""  # why the answer broke off after it had begun
        self.worker: str | None = None
        self.delivered = False  # the answer has left completely
        self.gone = False  # the client closed its connection before that
        self._query: bytes = scope["query_string"]
        self._receive, self._send = receive, send
        self._event_stream = False
        self._tail = b""
        given = self.header(b"x-request-id")
        self.request_id = given.decode() if given and _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(16)}"
        length = self.header(b"content-length")
        declared = int(length) if length and length.isdigit() else None
        if declared is None and self.header(b"transfer-encoding") is None:
            declared = 0
        self.body = RequestBody(receive, body_limit, declared)

    @property
    def upstream_path(self) -> str:
        """Path and query on the worker."""
        return self.route.upstream + (f"?{quote(self._query, safe=_URL_CHARACTERS)}" if self._query else "")

    def header(self, name: bytes) -> bytes | None:
        """The first header of this (lower-case) name."""
        return next((value for key, value in self.headers if key == name), None)

    async def decoded_body(self) -> bytes:
        """The whole body, decompressed, for the few calls that the gateway reads itself."""
        return decoded(await self.body.read(), self.headers, self.body.limit)

    @asynccontextmanager
    async def cancelled_on_disconnect(self) -> AsyncIterator[None]:
        """Its block is cancelled, and ClientGone raised, as soon as the client closes its connection."""
        task = asyncio.current_task()
        assert task is not None

        async def watch() -> None:
            await self.body.received.wait()
            while (await self._receive())["type"] != "http.disconnect":
                pass
            if not self.delivered:
                self.gone = True
                task.cancel()

        watcher = asyncio.create_task(watch())
        try:
            yield
        except asyncio.CancelledError:
            if self.gone and task.uncancel() == 0:
                raise ClientGone from None
            raise
        finally:
            watcher.cancel()

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the head of the answer; the request id is added to it."""
        self.status = status
        kind = dict(headers)
        self._event_stream = kind.get(b"content-type", b"").startswith(b"text/event-stream") and (
            kind.get(b"content-encoding", b"identity") == b"identity"
        )
        head = [*headers, (b"x-request-id", self.request_id.encode())]
        if self.route.dialect == "anthropic" and b"request-id" not in kind:
            head.append((b"request-id", self.request_id.encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": head})

    def write(self, chunk: bytes) -> Awaitable[None]:
        """Send bytes of the answer now."""
        if self._event_stream:
            self._tail = chunk[-4:] if len(chunk) >= 4 else (self._tail + chunk)[-4:]
        return self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self, last: bytes = b"") -> None:
        """Send the end of the answer."""
        self.delivered = True
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def answer(self, body: bytes, *, content_type: str = "application/json", status: int = 200) -> None:
        """A whole answer of the gateway's own."""
        head = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
        await self.begin(status, head)
        await self.finish(body)

    async def refuse(self, error: ArealError) -> None:
        """An error before the answer began: status, headers and body in the protocol's shape."""
        status, headers, body = error_reply(error, self.route.dialect, self.request_id)
        if status == 405:
            headers.append((b"allow", ", ".join(self.route.methods).encode()))
        await self.begin(status, headers)
        await self.finish(body)

    async def break_off(self, error: ArealError) -> None:
        """An error after the answer began. At an event boundary it is said in the stream, which then ends; in the middle
        of an event or of any other body nothing can be said, so the connection breaks and the client notices. Nor is anything said to
        a client that is gone."""
        if self.gone:
            return
        self.broken = str(error)
        if self._event_stream and (not self._tail or self._tail.endswith(_EVENT_ENDS)):
            await self.finish(error_event(error, self.route.dialect, self.request_id))
