"""Calls to our own ports: JSON in, JSON out, time-outs on everything, errors as sentences.

    async with JsonClient(worker.url, bearer=run_token) as client:
        health = await client.get("/health", timeout_s=2)
        await client.post("/pause", {})
        async for event in client.events("/inference/v1/generate", body):
            ...

Proxy variables of the environment are not read (trust_env off): they are meant for the outside world, these calls are
not (T103). Refused or broken connection -> BackendError, time-out -> BackendTimeout, a status that is not 2xx ->
UnexpectedAnswer, which keeps the status and the decoded body. No retries here: a caller knows what may be repeated.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, Self

import aiohttp
import msgspec
import orjson

from areal.base.errors import BackendError, BackendTimeout
from areal.base.redact import redact
from areal.web.sse import SseDecoder, SseEvent

_SNIPPET = 300  # characters of a foreign body that may stand in a message
_LOOKED_AT = 30_000  # of which secrets are taken out before they are cut to that: half a key is not known as one
_LONGEST_WAIT_S = 365 * 86400.0  # a Retry-After of more means never


class UnexpectedAnswer(BackendError):
    """The other side answered with a status that is not 2xx. answered: that status; body: decoded JSON, or text;
    wait_s: its Retry-After."""

    def __init__(self, url: str, answered: int, body: Any, *, wait_s: float | None = None) -> None:
        super().__init__(f"{url} answered {answered}: {reason_of(body)}")
        self.answered, self.body, self.wait_s = answered, body, wait_s

    @property
    def error_code(self) -> str | None:
        """OpenAI's error.code, where the body has one."""
        match self.body:
            case {"error": {"code": str(code)}}:
                return code
        return None


def open_session(
    *,
    bearer: str | None = None,
    connections: int = 0,
    trace: aiohttp.TraceConfig | None = None,
) -> aiohttp.ClientSession:
    """A raw aiohttp session with our defaults: no proxies, no cookies, no total time-out, 10 s to connect.

    connections: most open at once; 0 = no bound (a bound would make sessions wait for each other)."""
    headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=connections, keepalive_timeout=30),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        headers=headers,
        trust_env=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=True,
        trace_configs=None if trace is None else [trace],
    )


class JsonClient:
    """One base URL, one key, one connection pool. Opened by `async with`; safe to use from many tasks of one loop."""

    def __init__(self, base_url: str, *, bearer: str | None = None, timeout_s: float = 30.0) -> None:
        self.base_url = base_url.rstrip("/")
        self._bearer = bearer
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = open_session(bearer=self._bearer)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        """Decoded JSON of a 2xx answer."""
        return await self._json("GET", path, None, timeout_s, {})

    async def post(
        self, path: str, body: Any, *, timeout_s: float | None = None, headers: dict[str, str] | None = None
    ) -> Any:
        """Send JSON, return the decoded JSON of a 2xx answer."""
        return await self._json("POST", path, body, timeout_s, headers or {})

    async def events(self, path: str, body: Any, *, silence_s: float = 120.0) -> AsyncIterator[SseEvent]:
        """POST and read an event stream. silence_s: longest wait for the next bytes (pings count).

        Leaving the loop early closes the connection, which is how a request is aborted."""
        timeout = aiohttp.ClientTimeout(sock_connect=10, sock_read=silence_s)
        async with self._request("POST", path, body, timeout, {}) as response:
            decoder = SseDecoder()
            async for chunk in response.content.iter_any():
                for event in decoder.feed(chunk):
                    yield event
            for event in decoder.close():
                yield event

    async def _json(self, method: str, path: str, body: Any, timeout_s: float | None, headers: dict[str, str]) -> Any:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s if timeout_s is None else timeout_s)
        async with self._request(method, path, body, timeout, headers) as response:
            data = await response.read()
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError:
            raise BackendError(f"{self.base_url}{path} answered something that is not JSON: {_snippet(data)}") from None

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Any, timeout: aiohttp.ClientTimeout, headers: dict[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            raise RuntimeError("JsonClient is used outside its `async with` block")
        url = f"{self.base_url}{path}"
        data = None if body is None else _encoded(body)
        if data is not None:
            headers = {"Content-Type": "application/json", **headers}
        try:
            async with self._session.request(method, url, data=data, headers=headers, timeout=timeout) as response:
                if not 200 <= response.status < 300:
                    body = decode_body(await response.read())
                    raise UnexpectedAnswer(url, response.status, body, wait_s=retry_after(response.headers))
                yield response
        except TimeoutError as error:
            raise BackendTimeout(f"{url} did not answer in time; check that it is not overloaded or stopped") from error
        except aiohttp.ClientError as error:
            raise BackendError(f"{url} is not reachable ({error}); check that the process runs") from error


def _encoded(body: Any) -> bytes:
    try:
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        return msgspec.json.encode(body)  # slower, but a task may hold an integer of more than 64 bits


def decode_body(data: bytes) -> Any:
    """JSON where it is JSON that can be said again, else text: a body is read after the status, whatever its type (T106)."""
    try:
        value = orjson.loads(data)
        if data.count(b"{") + data.count(b"[") > 200:  # the encoder takes 254 levels, the decoder many more
            orjson.dumps([[[[value]]]])
        return value
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return data.decode("utf-8", "replace")


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds of a Retry-After in either of its forms; None where there is none that can be read."""
    text = headers.get("Retry-After", "").strip()
    try:
        wait_s = float(text)
    except ValueError:
        try:  # then it is a date, if anything; one without a zone is in UTC
            at = parsedate_to_datetime(text)
            wait_s = at.replace(tzinfo=at.tzinfo or UTC).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return None if math.isnan(wait_s) else min(max(0.0, wait_s), _LONGEST_WAIT_S)


def reason_of(body: Any) -> str:
    """The sentence in an error body of any shape (OpenAI, Anthropic, FastAPI's detail, plain text), redacted."""
    if isinstance(body, dict):
        error = body.get("error", body)
        text = error.get("message") if isinstance(error, dict) else error
        text = text or body.get("detail") or orjson.dumps(body).decode()
    else:
        text = body
    return _snippet(str(text).encode())


def _snippet(data: bytes) -> str:
    text = redact(" ".join(data.decode("utf-8", "replace").split())[:_LOOKED_AT])
    text = text if len(text) <= _SNIPPET else text[:_SNIPPET] + "…"
    return text or "an empty body"
