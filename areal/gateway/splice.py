"""The splice: one request to a worker, its answer back, bytes untouched and unbuffered in both directions.

    async with Splice() as splice:
        await splice.forward(exchange, Target("w0", "http://127.0.0.1:41873"))

A chunk leaves when it arrives. Bodies are never decoded (a compressed body keeps its content-encoding and length, T100);
hop-by-hop headers stay on their hop. A client that goes away closes the worker's connection at once. Proxy variables are
not honoured (T103), redirects not followed, nothing is sent twice: only a connection that could not be opened at all
(WorkerRefused) may be tried elsewhere. Errors: WorkerRefused, BackendError (502), BackendTimeout (504).
Used by app.py; exchange.py is the client's side of it, web/upstream.py the worker's.
"""

from __future__ import annotations

import asyncio
from typing import Self

from areal.base.errors import BackendError, BackendTimeout, BodyTooLarge, Unavailable
from areal.gateway.exchange import Exchange, Headers
from areal.gateway.routing import Target
from areal.web.upstream import Answer, NotConnected, Upstream

CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 900.0  # longer than any client waits (600 s) and than a refresh; streams are kept alive by pings
IDLE_CONNECTION_S = (
    2.0  # far below the worker's keep-alive (web/serve.py: 75 s), so a request never meets a closing socket
)

# RFC 9110 section 7.6.1; `expect` is answered by our own server, `host` names the hop.
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding upgrade expect host".split()
)


class WorkerRefused(BackendError):
    """No connection to the worker could be opened, so nothing was sent and another worker may be asked."""

    retry_after_s = 2


class Splice:
    """The gateway's connections to its workers. One per process; safe for any number of tasks of one event loop."""

    def __init__(
        self, *, connect_timeout_s: float = CONNECT_TIMEOUT_S, silence_timeout_s: float = SILENCE_TIMEOUT_S
    ) -> None:
        self._upstream = Upstream(connect_s=connect_timeout_s, idle_s=IDLE_CONNECTION_S)
        self._silence_s = silence_timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._upstream.close()

    async def forward(self, exchange: Exchange, target: Target) -> None:
        """Send the exchange's request to the target and splice the answer back.

        Raises before the answer has begun; later failures are told to the client in band by `exchange.break_off`."""
        async with exchange.cancelled_on_disconnect():
            answer = await self._open(exchange, target)
            try:
                # Our own server sets `date`; two of them would not be HTTP.
                headers = [pair for pair in end_to_end(answer.headers) if pair[0] != b"date"]
                await exchange.begin(answer.status, headers)
                while chunk := await answer.read():
                    if answer.complete:  # its end came with these bytes, and leaves with them
                        break
                    await exchange.write(chunk)
                await exchange.finish(chunk)
            except TimeoutError:
                await exchange.break_off(self._silent(target))
            except asyncio.CancelledError:  # the gateway stops and this stream outlived the grace; or the client left
                await exchange.break_off(Unavailable("the gateway is stopping; retry in a few seconds"))
                raise
            except BodyTooLarge as error:  # of an upload that the worker answered before it was complete
                await exchange.break_off(error)
            except OSError as error:
                await exchange.break_off(
                    BackendError(
                        f"worker {target.worker} went away in the middle of the answer ({reason(error)}); retry, and check that the RL service runs"
                    )
                )
            finally:
                answer.close()

    async def _open(self, exchange: Exchange, target: Target) -> Answer:
        headers = [*end_to_end(exchange.headers), (b"x-request-id", exchange.request_id.encode())]
        headers += [(name.encode(), value.encode()) for name, value in target.headers]
        body, url = exchange.body, target.url + exchange.upstream_path
        try:
            return await self._upstream.request(
                exchange.method,
                url,
                headers,
                body.whole if body.whole is not None else body.stream(),
                silence_s=self._silence_s,
            )
        except NotConnected as error:
            raise WorkerRefused(
                f"worker {target.worker} is not reachable ({reason(error)}); check that the service runs, then retry"
            ) from None
        except TimeoutError:
            raise self._silent(target) from None
        except OSError as error:
            raise BackendError(
                f"worker {target.worker} closed the connection without an answer ({reason(error)}); retry, and check that the RL service runs"
            ) from None

    def _silent(self, target: Target) -> BackendTimeout:
        return BackendTimeout(
            f"worker {target.worker} sent nothing for {self._silence_s:.0f} s; retry, or check its log"
        )


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


def reason(error: OSError) -> str:
    """A cause in a few words, without addresses or headers (they may hold keys)."""
    return (error.strerror or str(error)).lower()
