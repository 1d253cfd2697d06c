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

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp

from areal.base.errors import ArealError, BackendError, BackendTimeout
from areal.base.types import GenerateRequest, TokenChunk
from areal.inference import wire
from areal.inference.backend import BackendHealth
from areal.web.sse import DONE, SseDecoder, SseEvent

CONNECT_S = 10.0
SILENCE_S = 60.0
LOAD_S = 300.0  # weights.load_timeout_seconds says otherwise; the server says nothing meanwhile
# Below any server's own keep-alive (ours 75 s, uvicorn's 5 s): no request meets a closing socket.
IDLE_CONNECTION_S = 3.0


class HttpBackend:
    """A Backend over HTTP. Use it in one event loop; any number of tasks at once. `close()` when done."""

    def __init__(
        self, name: str, url: str, token: str, *, silence_s: float = SILENCE_S, load_s: float = LOAD_S
    ) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._silence_s = silence_s
        self._load_s = load_s
        self._session: aiohttp.ClientSession | None = None

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """See Backend.generate. Raises BadRequest and ContextOverflow (the request), BackendError, BackendTimeout."""
        last: TokenChunk | None = None
        async with self._post(wire.GENERATE_PATH, wire.encode_request(request)) as response:
            decoder = SseDecoder()
            while data := await response.content.readany():
                for event in _decode(decoder, data):
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
        async with self._call("GET", "/health", None, self._silence_s) as response:
            return wire.decode_health(await response.read())

    async def pause(self) -> None:
        """See Backend.pause."""
        async with self._post("/pause", b"{}") as response:
            await response.read()

    async def resume(self) -> None:
        """See Backend.resume."""
        async with self._post("/resume", b"{}") as response:
            await response.read()

    async def load_weights(self, manifest: dict[str, Any], version: int) -> int:
        """See Backend.load_weights. A refusal (409) is a BackendError with the server's reason."""
        body = wire.encode_load_weights(manifest, version)
        async with self._call("POST", "/load_weights", body, self._load_s) as response:
            return wire.decode_version(await response.read())

    async def close(self) -> None:
        """Close all connections; running streams end."""
        if self._session is not None:
            await self._session.close()

    @property
    def _who(self) -> str:
        return f"inference server {self.name!r} at {self.url}"

    def _post(self, path: str, body: bytes) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._call("POST", path, body, self._silence_s)

    @asynccontextmanager
    async def _call(
        self, method: str, path: str, body: bytes | None, silence_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response of status 200. Whatever goes wrong on the way, also while the body is read, is an ArealError."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=silence_s)
        try:
            async with self._open().request(
                method, self.url + path, data=body, headers=self._headers, timeout=timeout
            ) as response:
                try:
                    if response.status != 200:
                        raise wire.decode_error(response.status, await response.read())
                    yield response
                finally:
                    if not response.content.at_eof():
                        response.close()  # the rest is not wanted: a closed connection aborts the request
        except ArealError:
            raise
        except TimeoutError as error:
            raise BackendTimeout(
                f"{self._who} was silent for {silence_s:.0f} s on {path}; see its log, or start it again"
            ) from error
        except aiohttp.ClientConnectorError as error:
            raise BackendError(f"{self._who} is not reachable ({error.strerror or error}); is it running?") from error
        except aiohttp.ClientError as error:
            reason = str(error) or type(error).__name__
            raise BackendError(f"{self._who} broke the connection on {path}: {reason}; see its log") from error

    def _open(self) -> aiohttp.ClientSession:
        """The session, made on first use because it belongs to the running loop."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S)
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        return self._session


def _decode(decoder: SseDecoder, data: bytes) -> list[SseEvent]:
    try:
        return decoder.feed(data)
    except ValueError as error:
        raise BackendError(f"the inference server sent no event stream: {error}") from error
