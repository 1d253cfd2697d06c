"""The server end of the inference wire: any Backend object, served over HTTP as a plain ASGI app.

    app = WireApp(engine, run_token)              # engine implements backend.Backend in this process
    uvicorn.run(app, host="127.0.0.1", port=0)

A request that fails before its first token keeps its true status; headers are held back up to `hold_s` for that. Then
the stream says 200, and a ping whenever nothing happened for `ping_s` (a paused engine). When the client goes away the
engine's generator is closed, which is how an engine learns of an abort. Every route wants the run token. Client:
client.py. Used by native/server.py and scripted/server.py.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from areal.base.errors import ArealError, BackendError, BodyTooLarge, InternalError, InvalidKey, NotFound
from areal.base.types import TokenChunk
from areal.inference import wire
from areal.inference.backend import Backend
from areal.web.app import bugs_as_errors, stops_as_errors
from areal.web.body import disconnected
from areal.web.sse import DONE_EVENT, PING, encode_event

MAX_BODY_BYTES = 64 * 2**20  # a prompt of a few million tokens
HOLD_S = 15.0
PING_S = 15.0


class WireApp:
    """ASGI application. `extra`: further GET routes of a server, path -> a function that returns its JSON body."""

    def __init__(
        self,
        backend: Backend,
        token: str,
        *,
        extra: Mapping[str, Callable[[], bytes]] | None = None,
        hold_s: float = HOLD_S,
        ping_s: float = PING_S,
    ) -> None:
        self._backend = backend
        self._authorization = f"Bearer {token}".encode()
        self._extra = dict(extra or {})
        self._hold_s = hold_s
        self._ping_s = ping_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        try:
            with stops_as_errors(), bugs_as_errors("a request"):
                self._check_token(scope)
                await self._route(scope["method"], scope["path"], receive, send)
        except InternalError as bug:
            await _answer(send, 500, wire.encode_error(_broken(bug)))
        except ArealError as error:
            status = 409 if scope["path"] == "/load_weights" and isinstance(error, BackendError) else error.status
            await _answer(send, status, wire.encode_error(error))

    def _check_token(self, scope: Scope) -> None:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if not hmac.compare_digest(given, self._authorization):
            raise InvalidKey("this port takes the run's own token only")

    async def _route(self, method: str, path: str, receive: Receive, send: Send) -> None:
        if (method, path) == ("POST", wire.GENERATE_PATH):
            await self._generate(receive, send)
        elif (method, path) == ("GET", "/health"):
            await _answer(send, 200, wire.encode_health(await self._backend.health()))
        elif (method, path) == ("POST", "/pause"):
            await self._backend.pause()
            await _answer(send, 200, b"{}")
        elif (method, path) == ("POST", "/resume"):
            await self._backend.resume()
            await _answer(send, 200, b"{}")
        elif (method, path) == ("POST", "/load_weights"):
            wanted = wire.decode_load_weights(await _body(receive))
            version = await self._backend.load_weights(wanted.manifest, wanted.version, within_s=wanted.within_s)
            await _answer(send, 200, wire.encode_version(version))
        elif method == "GET" and path in self._extra:
            await _answer(send, 200, self._extra[path]())
        else:
            raise NotFound(f"{method} {path} is not a route of an inference server")

    async def _generate(self, receive: Receive, send: Send) -> None:
        chunks = self._backend.generate(wire.decode_request(await _body(receive)))
        gone = asyncio.ensure_future(disconnected(receive))
        events = _Events(send)
        try:
            with stops_as_errors(), bugs_as_errors("a stream"):
                await self._stream(chunks, gone, events)
        except ArealError as error:
            if not events.started:
                raise
            said = _broken(error) if isinstance(error, InternalError) else error
            await events.finish(encode_event(wire.encode_error(said)))
        finally:
            gone.cancel()
            await chunks.aclose()

    async def _stream(
        self, chunks: AsyncGenerator[TokenChunk, None], gone: asyncio.Future[None], events: _Events
    ) -> None:
        """Send chunks until the last one, pings between them, and stop at once when the client has gone."""
        sending = asyncio.ensure_future(_send_all(chunks, events))
        either: set[asyncio.Future[Any]] = {sending, gone}
        try:
            while not sending.done():
                wait_s = events.sent_at + (self._ping_s if events.started else self._hold_s) - time.monotonic()
                await asyncio.wait(either, timeout=max(0.0, wait_s), return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    return
                if wait_s <= 0 and not sending.done():
                    await events.send(PING)
        finally:
            await _cancel(sending)
        sending.result()


class _Events:
    """An SSE response whose status is decided by its first event. sent_at: time.monotonic() of the last one."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._one_at_a_time = asyncio.Lock()  # a ping and a chunk
        self.started = False
        self.sent_at = time.monotonic()

    async def send(self, event: bytes, *, more: bool = True) -> None:
        async with self._one_at_a_time:
            self.sent_at = time.monotonic()
            if not self.started:
                self.started = True
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send({"type": "http.response.body", "body": event, "more_body": more})

    async def finish(self, event: bytes) -> None:
        await self.send(event, more=False)


async def _send_all(chunks: AsyncGenerator[TokenChunk, None], events: _Events) -> None:
    async for chunk in chunks:
        await events.send(wire.encode_chunk(chunk))
    await events.finish(DONE_EVENT)


def _broken(bug: InternalError) -> BackendError:
    """A bug as the proxy may hear it: this port is an inner one."""
    return BackendError(f"the engine failed: {type(bug.__cause__).__name__}: {bug.__cause__}")


async def _cancel(future: asyncio.Future[Any]) -> None:
    """Cancel and wait until it has really ended, so that the generator under it can be closed."""
    if not future.done():
        future.cancel()
        await asyncio.wait({future})
    if not future.cancelled():
        future.exception()  # looked at: nobody else may, when the client has gone


async def _body(receive: Receive) -> bytes:
    """The whole request body. Raises BodyTooLarge."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise BackendError("the client closed the connection before its request was complete")
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise BodyTooLarge(f"the request body is larger than {MAX_BODY_BYTES} bytes; send a shorter prompt")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
