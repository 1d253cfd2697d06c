"""The client end of the inference wire: one HttpBackend per inference server, whatever generates behind it.

    backend = HttpBackend("native", "http://127.0.0.1:31000", run_token)
    async with aclosing(backend.generate(request)) as chunks:
        async for chunk in chunks: ...
    await backend.close()

Time-outs: a stream may last for ever while something arrives (tokens or pings); silence of `silence_s` seconds is a
BackendTimeout. Leaving the stream early closes its connection, which aborts the request on the server. Proxy variables
of the environment are not read. Bodies: wire.py. Several servers: router.py.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from areal.base.errors import BackendError, BackendTimeout
from areal.base.types import GenerateRequest, TokenChunk
from areal.inference import wire
from areal.inference.backend import BackendHealth
from areal.web.sse import DONE, SseDecoder
from areal.web.upstream import Answer, NotConnected, Upstream

Read = Callable[[], Awaitable[bytes]]  # what has come of a body, b"" at its end

CONNECT_S = 10.0
SILENCE_S = 60.0
LOAD_S = 300.0  # weights.load_timeout_seconds says otherwise; the server says nothing meanwhile
LOAD_GRACE_S = 5.0  # a server that gives up at its deadline still says at which arrow it was
# Below any server's own keep-alive (ours 75 s, uvicorn's 5 s): no request meets a closing socket.
IDLE_CONNECTION_S = 3.0
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


class HttpBackend:
    """A Backend over HTTP. Use it in one event loop; any number of tasks at once. `close()` when done."""

    def __init__(
        self, name: str, url: str, token: str, *, silence_s: float = SILENCE_S, load_s: float = LOAD_S
    ) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self._headers = ((b"authorization", f"Bearer {token}".encode()), (b"content-type", b"application/json"))
        self._silence_s = silence_s
        self._load_s = load_s
        self._upstream = Upstream(connect_s=CONNECT_S, idle_s=IDLE_CONNECTION_S)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """See Backend.generate. Raises BadRequest and ContextOverflow (the request), BackendError, BackendTimeout."""
        last: TokenChunk | None = None
        async with self._post(wire.GENERATE_PATH, wire.encode_request(request)) as read:
            decoder = SseDecoder()
            while data := await read():
                for event in decoder.feed(data):
                    if event.data == DONE:
                        continue
                    chunk = wire.decode_chunk(event.data)
                    if chunk.finish_reason is None:
                        yield chunk
                    else:
                        last = chunk
            if last is None:
                raise BackendError(f"{self._who} ended the stream of {request.request_id} in the middle; see its log")
            yield last  # with the stream's end, so that its connection can be used again

    async def health(self) -> BackendHealth:
        """Raises BackendError also when the server speaks another protocol version."""
        async with self._call("GET", "/health", b"", self._silence_s) as read:
            return wire.decode_health(await _whole(read))

    async def pause(self) -> None:
        """See Backend.pause."""
        async with self._post("/pause", b"{}") as read:
            await _whole(read)

    async def resume(self) -> None:
        """See Backend.resume."""
        async with self._post("/resume", b"{}") as read:
            await _whole(read)

    async def load_weights(self, manifest: dict[str, Any], version: int, *, within_s: float | None = None) -> int:
        """See Backend.load_weights. The server is given `load_s` where nothing else is said, and a little longer to say so."""
        seconds = within_s or self._load_s
        body = wire.encode_load_weights(manifest, version, seconds)
        async with self._call("POST", "/load_weights", body, seconds + min(LOAD_GRACE_S, seconds / 4)) as read:
            return wire.decode_version(await _whole(read))

    async def close(self) -> None:
        """Close all connections; running streams end."""
        self._upstream.close()

    @property
    def _who(self) -> str:
        return f"inference server {self.name!r} at {self.url}"

    def _post(self, path: str, body: bytes) -> AbstractAsyncContextManager[Read]:
        return self._call("POST", path, body, self._silence_s)

    @asynccontextmanager
    async def _call(self, method: str, path: str, body: bytes, silence_s: float) -> AsyncIterator[Read]:
        """The body of an answer of status 200. Whatever goes wrong, also while it is read, is an ArealError."""
        answer: Answer | None = None
        try:
            answer = await self._upstream.request(method, self.url + path, self._headers, body, silence_s=silence_s)
            read = _unpacked(answer)
            if answer.status != 200:
                raise wire.decode_error(answer.status, await _whole(read))
            yield read
        except TimeoutError as error:
            raise BackendTimeout(
                f"{self._who} was silent for {silence_s:.0f} s on {path}; see its log, or start it again"
            ) from error
        except NotConnected as error:
            raise BackendError(f"{self._who} is not reachable ({error}); is it running?") from error
        except OSError as error:
            raise BackendError(
                f"{self._who} broke the connection on {path}: {error.strerror or error}; see its log"
            ) from error
        finally:
            if answer is not None:
                answer.close()  # where the rest is not wanted, a closed connection aborts the request


def _unpacked(answer: Answer) -> Read:
    """Its reading, without the compression that a server between may have added (T100)."""
    encodings = [value.lower() for name, value in answer.headers if name.lower() == b"content-encoding"]
    if encodings in ([], [b"identity"]):
        return answer.read
    if encodings not in ([b"gzip"], [b"deflate"]):
        raise BackendError(f"the inference server packed its answer as {encodings!r}; let it send it plain")
    inflater = zlib.decompressobj(_GZIP_OR_ZLIB)

    async def read() -> bytes:
        try:
            while data := await answer.read():
                if plain := inflater.decompress(data):
                    return plain
            return inflater.flush()
        except zlib.error as error:
            raise BackendError(
                f"the inference server sent damaged {encodings[0].decode()} ({error}); see its log"
            ) from error

    return read


async def _whole(read: Read) -> bytes:
    parts = []
    while data := await read():
        parts.append(data)
    return b"".join(parts)
