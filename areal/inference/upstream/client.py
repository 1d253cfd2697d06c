"""The channel's client: one call, its attempts, its answer; the only place that repeats a call, and the only one that takes proxies.

    async with Channel(config.api_gateway, config.model_routing) as channel:
        route = channel.find("judge_model")                              # by role or model_id, None for another name
        answer = await channel.complete(route, body, request_id="req_1")
        async with aclosing(channel.stream(route, body)) as chunks:      # nothing is repeated once the first has come
            async for chunk in chunks: ...

Attempts are exactly `1 + max_retries` on 429, 5xx, broken connections and time-outs, and one on everything else (T098); between them the
channel's Retry-After, or a wait that doubles. A redirect is not followed, so the key goes to the configured address alone. Every call is one
[taotoken] line, whatever its end. Errors: UpstreamError with the last attempt's status, UpstreamLimit. Used by gateway/channel.py.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self, TypeVar

import aiohttp
import orjson

import areal
from areal.base.errors import ArealError, ConfigError, UpstreamError
from areal.base.logs import Log
from areal.base.redact import protect, redact
from areal.config.base_url import endpoint
from areal.config.upstream import ApiGatewayConfig, ModelRoutingConfig
from areal.inference.upstream.answers import Json, as_chunks, read_answer, read_chunk, usage_of, without_choices
from areal.inference.upstream.limits import RouteLimits, Spend
from areal.inference.upstream.proxies import proxy_for
from areal.inference.upstream.routes import Route, routes_of
from areal.web.client import open_session
from areal.web.sse import DONE, SseDecoder

_T = TypeVar("_T")
_line = Log("taotoken")
CONNECT_S = 10.0
MOST_BACKOFF_S = 30.0
LARGEST_ANSWER = 64 * 2**20  # bytes, after decompression
CLIENT_LEFT = 499
BYTES_PER_TOKEN = 4  # of a request or an answer whose usage the channel does not say, as a rule of thumb


@dataclass(slots=True)
class CallReport:
    """One call as its [taotoken] line tells it. status: 499 where the caller left before the end."""

    route: Route
    status: int = CLIENT_LEFT
    attempts: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    elapsed_s: float = 0.0
    reason: str = ""


@dataclass(slots=True)
class _Post:
    """One attempt. left: its body has gone out, so the model may be at work on it."""

    sent: bytes
    left: bool = False

    @property
    def lost(self) -> int:
        """Tokens that it cost if no answer is waited for, by size: nobody says them."""
        return len(self.sent) // BYTES_PER_TOKEN if self.left else 0


class Channel:
    """One per gateway. observe: hears of every call at its end, for counters."""

    def __init__(
        self,
        gateway: ApiGatewayConfig,
        routing: ModelRoutingConfig | None,
        *,
        observe: Callable[[CallReport], None] = lambda report: None,
    ) -> None:
        """Raises ConfigError for an address, key or proxy that no call can use."""
        protect(gateway.api_key)
        self._config, self._observe = gateway, observe
        self.routes = routes_of(gateway, routing)
        self._names = {name: route for route in self.routes for name in route.names}
        self._limits = {route.role: RouteLimits(route.role, route.config, gateway) for route in self.routes}
        self._url = endpoint(gateway.base_url)
        self._proxy = proxy_for(self._url, os.environ)
        self._headers = _headers(gateway.api_key)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        trace = aiohttp.TraceConfig()
        trace.on_request_chunk_sent.append(_note_left)
        self._session = open_session(trace=trace)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def find(self, name: str) -> Route | None:
        """The route of a role or model_id."""
        return self._names.get(name)

    async def complete(self, route: Route, body: Mapping[str, Any], *, request_id: str = "") -> Json:
        """The whole answer to a Chat Completions body. Raises UpstreamError, UpstreamLimit."""
        sent = orjson.dumps(route.request(body, stream=False))
        async with self._noted(route, request_id) as report, self._limits[route.role].calling() as spend:
            answer = await self._repeated(route, report, spend, sent, self._whole)
            _note_usage(report, answer)
            said = b"" if report.output_tokens else orjson.dumps(answer["choices"])
            spend(*_spent(report, sent, len(said) // BYTES_PER_TOKEN))
            return answer

    async def stream(
        self, route: Route, body: Mapping[str, Any], *, request_id: str = ""
    ) -> AsyncGenerator[Json, None]:
        """The answer's chunks as they come, each with a list of choices. Raises UpstreamError, UpstreamLimit; before the first chunk
        nothing of the answer is lost, after it the answer breaks off."""
        sent = orjson.dumps(route.request(body, stream=True))
        async with self._noted(route, request_id) as report, self._limits[route.role].calling() as spend:
            response, chunks, first = await self._repeated(route, report, spend, sent, self._begin)
            deltas = 0
            try:
                while first is not None:
                    _note_usage(report, first)
                    deltas += sum(_says(choice.get("delta")) for choice in first["choices"])
                    yield first
                    async with asyncio.timeout(route.timeout_s):
                        first = await anext(chunks, None)
            except TimeoutError:
                raise self._too_late(route, route.timeout_s) from None
            finally:
                await chunks.aclose()
                response.close()
                spend(*_spent(report, sent, deltas))

    @asynccontextmanager
    async def _noted(self, route: Route, request_id: str) -> AsyncIterator[CallReport]:
        """The [taotoken] line of what happens inside."""
        report, began = CallReport(route), time.perf_counter()
        try:
            yield report
            report.status = 200
        except ArealError as error:
            report.status, report.reason = error.status, redact(str(error))
            raise
        finally:
            report.elapsed_s = time.perf_counter() - began
            _line.line(
                model=route.role,
                model_id=route.model_id,
                status=report.status,
                elapsed_ms=round(report.elapsed_s * 1000, 1),
                attempts=report.attempts,
                prompt_tokens=report.prompt_tokens,
                output_tokens=report.output_tokens,
                **({"request_id": request_id} if request_id else {}),
                **({"reason": report.reason} if report.reason else {}),
            )
            self._observe(report)

    async def _repeated(
        self,
        route: Route,
        report: CallReport,
        spend: Spend,
        sent: bytes,
        attempt: Callable[[Route, _Post], Awaitable[_T]],
    ) -> _T:
        """Attempts until one succeeds, none may help, or the call's own time is over. One that nobody waited for any longer is paid for all
        the same, so its prompt is spent."""
        loop, config = asyncio.get_running_loop(), self._config
        ends_at = loop.time() + config.deadline_seconds
        while True:
            report.attempts += 1
            within_s, post = min(route.timeout_s, max(0.0, ends_at - loop.time())), _Post(sent)
            try:
                async with asyncio.timeout(within_s):
                    return await attempt(route, post)
            except TimeoutError:
                failed = self._too_late(route, within_s)
                spend(post.lost, 0)
            except asyncio.CancelledError:
                spend(post.lost, 0)
                raise
            except UpstreamError as error:
                failed = error
            wait_s = wait_before(report.attempts, failed.wait_s, config)
            if not failed.again or report.attempts > config.max_retries or loop.time() + wait_s >= ends_at:
                raise failed
            await asyncio.sleep(wait_s)

    async def _whole(self, route: Route, post: _Post) -> Json:
        response = await self._ask(route, post)
        try:
            return read_answer(route, response.status, response.headers, await self._rest(route, response))
        finally:
            response.release()

    async def _begin(
        self, route: Route, post: _Post
    ) -> tuple[aiohttp.ClientResponse, AsyncGenerator[Json, None], Json | None]:
        """A stream whose first chunk has come. The caller closes both."""
        response = await self._ask(route, post)
        try:
            kind = response.headers.get("Content-Type", "")
            if response.status != 200 or "json" in kind or "html" in kind:  # status first (T106)
                answer = read_answer(route, response.status, response.headers, await self._rest(route, response))
                chunks = _each(as_chunks(answer))
            else:
                chunks = self._chunks(route, response)
            return response, chunks, await anext(chunks)
        except BaseException:
            response.close()
            raise

    async def _chunks(self, route: Route, response: aiohttp.ClientResponse) -> AsyncGenerator[Json, None]:
        """Every event of the stream once, in order, however the bytes were cut (T104). Raises UpstreamError where it ends too early."""
        decoder, other, size, begun, finished, reading = SseDecoder(), list[bytes](), 0, False, False, True
        heads = list[Json]()  # events before the first that has a choice: they are no answer by themselves
        while reading:
            with self._transport(route):
                data = await response.content.readany()
            reading = bool(data)
            if not begun:  # perhaps it is no stream
                size += len(data)
                if size > LARGEST_ANSWER:
                    raise _too_large(route)
                other.append(data)
            for event in decoder.feed(data) if data else decoder.close():
                if event.data.strip() == DONE:
                    reading, finished = False, finished or begun
                    break
                if not event.data.strip():  # some keep a connection open by it
                    continue
                chunk = read_chunk(route, event.data, name=event.name)
                heads.append(chunk)
                begun = begun or bool(chunk["choices"])
                finished = finished or any(choice.get("finish_reason") for choice in chunk["choices"])
                if begun:
                    other = []
                    for each in heads:
                        yield each
                    heads = []
        if heads:
            raise without_choices(route, heads[-1])
        if not begun:
            for chunk in as_chunks(read_answer(route, 200, {}, b"".join(other))):
                yield chunk
        elif not finished:
            raise UpstreamError(f"the channel ended the answer of {route.role} before it was complete; retry")

    async def _ask(self, route: Route, post: _Post) -> aiohttp.ClientResponse:
        if self._session is None:
            raise RuntimeError("Channel is used outside its `async with` block")
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=min(CONNECT_S, route.timeout_s))
        with self._transport(route):
            return await self._session.post(
                self._url,
                data=post.sent,
                headers=self._headers,
                proxy=self._proxy,
                allow_redirects=False,
                timeout=timeout,
                trace_request_ctx=post,
            )

    async def _rest(self, route: Route, response: aiohttp.ClientResponse) -> bytes:
        parts, size = [], 0
        with self._transport(route):
            async for data in response.content.iter_any():
                size += len(data)
                if size > LARGEST_ANSWER:
                    raise _too_large(route)
                parts.append(data)
        return b"".join(parts)

    @contextmanager
    def _transport(self, route: Route) -> Iterator[None]:
        """What goes wrong on the way, as sentences without the address's secrets."""
        try:
            yield
        except aiohttp.ConnectionTimeoutError:
            text = f"the channel took no connection within {CONNECT_S:g} s; check api_gateway.base_url and that this host gets there"
            raise UpstreamError(text, status=504, again=True) from None
        except aiohttp.ClientConnectorCertificateError as error:
            text = f"the channel's certificate is not trusted ({error.certificate_error}); check api_gateway.base_url"
            raise UpstreamError(text) from None
        except aiohttp.ClientHttpProxyError as error:  # its own text has the proxy's address with the password
            text = (
                f"the proxy of the environment refuses the way to the channel ({error.status} {redact(error.message)}); "
                "correct its variable, or put the channel's host into NO_PROXY"
            )
            raise UpstreamError(text, again=error.status == 429 or error.status >= 500) from None
        except aiohttp.ClientConnectorError as error:
            # Of a proxy whose name nobody knows, aiohttp says the same as of a channel's.
            of_name = self._proxy is not None and isinstance(error, aiohttp.ClientConnectorDNSError)
            if of_name or isinstance(error, aiohttp.ClientProxyConnectionError):
                text = f"the proxy of the environment is not reachable ({_cause(error)}); correct it, or put the channel's host into NO_PROXY"
            else:
                text = f"the channel is not reachable ({_cause(error)}); check api_gateway.base_url and that this host gets there"
            raise UpstreamError(text, again=True) from None
        except aiohttp.ClientError as error:
            said = redact(" ".join(str(error).split()) or type(error).__name__)
            text = f"the channel broke off its answer for {route.role} ({said}); retry"
            raise UpstreamError(text, again=True) from None

    def _too_late(self, route: Route, within_s: float) -> UpstreamError:
        text = f"the channel sent nothing for {route.role} within {within_s:g} s; raise model_routing.{route.role}.timeout, or retry later"
        return UpstreamError(text, status=504, again=True)


def wait_before(attempts: int, said_s: float | None, config: ApiGatewayConfig) -> float:
    """Seconds between so many attempts and the next. said_s: the channel's Retry-After."""
    if said_s is not None:
        return min(said_s, config.retry_after_limit_seconds)
    return min(MOST_BACKOFF_S, config.backoff_seconds * 2.0 ** (attempts - 1)) * random.uniform(0.5, 1.0)


def check_key(key: str) -> None:
    """Raises ConfigError for a key that no header can hold (T102)."""
    if not key.isascii() or not key.isprintable() or not key.strip():
        raise ConfigError(
            "api_gateway.api_key holds characters that no key has; copy it again, and look at the variable that it is read from"
        )


def _headers(key: str) -> dict[str, str]:
    check_key(key)
    return {
        "Authorization": f"Bearer {key}",
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        "Accept-Encoding": "gzip, deflate",
        "User-Agent": f"areal/{areal.__version__}",
    }


def _spent(report: CallReport, sent: bytes, output: int) -> tuple[int, int]:
    """Tokens for the budget: as the channel said, else by size; output: the estimate. The usage of a stream comes last, so
    one whose reader left early, or that broke, has none."""
    return report.prompt_tokens or len(sent) // BYTES_PER_TOKEN, report.output_tokens or output


def _says(delta: Any) -> bool:
    return isinstance(delta, dict) and any(value for name, value in delta.items() if name != "role")


async def _note_left(session: aiohttp.ClientSession, context: SimpleNamespace, sent: object) -> None:
    context.trace_request_ctx.left = True


def _too_large(route: Route) -> UpstreamError:
    return UpstreamError(
        f"the channel's answer for {route.role} is larger than {LARGEST_ANSWER} bytes; lower its max_tokens"
    )


def _note_usage(report: CallReport, said: Json) -> None:
    prompt, output = usage_of(said)
    report.prompt_tokens, report.output_tokens = max(report.prompt_tokens, prompt), max(report.output_tokens, output)


async def _each(chunks: list[Json]) -> AsyncGenerator[Json, None]:
    for chunk in chunks:
        yield chunk


def _cause(error: aiohttp.ClientConnectorError) -> str:
    return (error.os_error.strerror or str(error.os_error)).lower()
