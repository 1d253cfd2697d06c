"""The splice: one request to a worker, its answer back, bytes untouched and unbuffered in both directions.

    async with Splice() as splice:
        await splice.forward(exchange, Target("w0", "http://127.0.0.1:41873"))

A chunk leaves when it arrives. Bodies are never decoded (a compressed body keeps its content-encoding and length, T100);
hop-by-hop headers stay on their hop. A client that goes away closes the worker's connection at once. Proxy variables are
not honoured (T103), redirects not followed, nothing is sent twice: only a connection that could not be opened at all
(WorkerRefused) may be tried elsewhere. Errors: WorkerRefused, BackendError (502), BackendTimeout (504).
Used by app.py; exchange.py is the client's side of it.
"""

from __future__ import annotations

import asyncio
from typing import Self

import aiohttp
from yarl import URL

from areal.base.errors import BackendError, BackendTimeout, Unavailable
from areal.gateway.exchange import Exchange, Headers
from areal.gateway.routing import Target

CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 900.0  # longer than any client waits (600 s) and than a refresh; streams are kept alive by pings
IDLE_CONNECTION_S = (
    2.0  # far below the worker's keep-alive (web/serve.py: 75 s), so a request never meets a closing socket
)

# RFC 9110 section 7.6.1; `expect` is answered by our own server, `host` names the hop.
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding upgrade expect host".split()
)
_OURS_TO_SET = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")  # aiohttp must not invent what was not sent


class WorkerRefused(BackendError):
    """No connection to the worker could be opened, so nothing was sent and another worker may be asked."""

    retry_after_s = 2


class Splice:
    """The gateway's connections to its workers. One per process; safe for any number of tasks of one event loop."""

    def __init__(
        self, *, connect_timeout_s: float = CONNECT_TIMEOUT_S, silence_timeout_s: float = SILENCE_TIMEOUT_S
    ) -> None:
        self._timeout = aiohttp.ClientTimeout(
            total=None, connect=None, sock_connect=connect_timeout_s, sock_read=silence_timeout_s
        )
        self._silence_s = silence_timeout_s

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S, ttl_dns_cache=5),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            timeout=self._timeout,
            skip_auto_headers=_OURS_TO_SET,
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def forward(self, exchange: Exchange, target: Target) -> None:
        """Send the exchange's request to the target and splice the answer back.

        Raises before the answer has begun; later failures are told to the client in band by `exchange.break_off`."""
        async with exchange.cancelled_on_disconnect():
            response = await self._open(exchange, target)
            answer = _Answer(response, self._silence_s)
            try:
                # Our own server sets `date`; two of them would not be HTTP.
                headers = [pair for pair in end_to_end(response.raw_headers) if pair[0] != b"date"]
                await exchange.begin(response.status, headers)
                while chunk := await answer.chunk():
                    if response.content.at_eof():  # its end came with these bytes, and leaves with them
                        break
                    await exchange.write(chunk)
                await exchange.finish(chunk)
            except TimeoutError:
                await exchange.break_off(self._silent(target))
            except asyncio.CancelledError:  # the gateway stops and this stream outlived the grace; or the client left
                await exchange.break_off(Unavailable("the gateway is stopping; retry in a few seconds"))
                raise
            except (aiohttp.ClientError, ConnectionError) as error:
                await exchange.break_off(
                    BackendError(
                        f"worker {target.worker} went away in the middle of the answer ({reason(error)}); retry"
                    )
                )
            finally:
                answer.close()
                response.close()  # a finished answer's connection is back in the pool already

    async def _open(self, exchange: Exchange, target: Target) -> aiohttp.ClientResponse:
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in end_to_end(exchange.headers)]
        headers.append(("x-request-id", exchange.request_id))
        headers.extend(target.headers)
        body = exchange.body
        try:
            return await self._session.request(
                exchange.method,
                URL(target.url + exchange.upstream_path, encoded=True),
                headers=headers,
                data=body.whole if body.whole is not None else body.stream(),
                allow_redirects=False,
            )
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
            raise WorkerRefused(
                f"worker {target.worker} is not reachable ({reason(error)}); check that the service runs, then retry"
            ) from None
        except TimeoutError:
            raise self._silent(target) from None
        except (aiohttp.ClientError, ConnectionError) as error:
            if body.failure is not None:  # the client's side ended the upload: too large, or gone
                raise body.failure from None
            raise BackendError(
                f"worker {target.worker} closed the connection without an answer ({reason(error)}); retry"
            ) from None

    def _silent(self, target: Target) -> BackendTimeout:
        return BackendTimeout(
            f"worker {target.worker} sent nothing for {self._silence_s:.0f} s; retry, or check its log"
        )


class _Answer:
    """A worker's answer after its head. One timer watches over all of it: aiohttp sets one anew with every
    chunk, a fifteenth of the gateway's CPU."""

    def __init__(self, response: aiohttp.ClientResponse, silence_s: float) -> None:
        self._content, self._silence_s = response.content, silence_s
        self._loop = asyncio.get_running_loop()
        self._waits_since: float | None = None  # None: the client is the slow one
        if response.connection is not None and response.connection.protocol is not None:
            response.connection.protocol.read_timeout = None  # of this answer; the next request sets its own
        self._timer = self._loop.call_later(silence_s, self._look)

    async def chunk(self) -> bytes:
        """What has come, empty at the end. Raises TimeoutError after silence_s without a byte."""
        self._waits_since = self._loop.time()
        try:
            return await self._content.readany()
        finally:
            self._waits_since = None

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        silent_s = 0.0 if self._waits_since is None else self._loop.time() - self._waits_since
        if silent_s >= self._silence_s:
            self._content.set_exception(TimeoutError())
        else:
            self._timer = self._loop.call_later(self._silence_s - silent_s, self._look)


def end_to_end(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Headers that travel on, names in lower case: no hop-by-hop ones, none that `Connection` names, none of our own
    `x-areal-…` ones and not the request id, which is set once for the whole way."""
    lowered = [(name.lower(), value) for name, value in headers]
    named = {word.strip().lower() for name, value in lowered if name == b"connection" for word in value.split(b",")}
    return [
        (name, value)
        for name, value in lowered
        if name not in HOP_BY_HOP and name not in named and name != b"x-request-id" and not name.startswith(b"x-areal-")
    ]


def reason(error: BaseException) -> str:
    """A cause in a few words, without addresses or headers (they may hold keys)."""
    os_error = error if isinstance(error, OSError) else error.__cause__
    if isinstance(os_error, OSError) and os_error.strerror:
        return os_error.strerror.lower().rsplit(": ", 1)[-1]
    if isinstance(error, asyncio.TimeoutError):
        return "connecting timed out"
    return {"ServerDisconnectedError": "disconnected", "ClientPayloadError": "answer cut short"}.get(
        type(error).__name__, type(error).__name__
    )
