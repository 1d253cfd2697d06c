"""The HTTP edge: an application in which every failure is JSON with a remedy, and plain-ASGI routes for the hot path.

    app = create_app("gateway", max_body_bytes=config.rollout.agent.max_body_bytes)
    @app.post("/rl/start_session")                       # control routes: FastAPI
    async def start_session(body: StartSession) -> Started: ...
    add_route(app, "/v1/chat/completions", chat)         # model routes: async def chat(scope, receive, send)

ArealError becomes its status and a body (OpenAI's shape unless `error_body` says otherwise), with Retry-After and
x-should-retry where the error has them; a request that does not validate is 400; anything unforeseen is a JSON 500 whose
cause stands in the log under the x-request-id that the client sees. Bodies arrive decompressed, within the limit.
Here is one of the three broad `except`s, `bugs_as_errors`. Used by gateway, proxy and inference servers; served by serve.py. No torch.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send

from areal.base.errors import ArealError, BadRequest, InternalError, MethodNotAllowed, NotFound, Unavailable
from areal.base.hosts import names_loopback
from areal.web.body import ClientGone, receive_within
from areal.web.error_bodies import openai_error_body
from areal.web.origin import check_host

ErrorBody = Callable[[str, ArealError, str], Any]
Handler = Callable[[Scope, Receive, Send], Awaitable[None]]

_log = logging.getLogger("areal.web")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


def error_headers(error: ArealError) -> list[tuple[bytes, bytes]]:
    """Retry-After and x-should-retry, where the error says something about trying again."""
    headers: list[tuple[bytes, bytes]] = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(error.retry_after_s).encode()))
    if error.should_retry is not None:
        headers.append((b"x-should-retry", b"true" if error.should_retry else b"false"))
    return headers


def _openai_body(path: str, error: ArealError, request_id: str) -> Any:
    return openai_error_body(error)


def create_app(
    title: str,
    *,
    max_body_bytes: int,
    error_body: ErrorBody = _openai_body,
    lifespan: Lifespan[FastAPI] | None = None,
) -> Application:
    """A FastAPI application with our error edge and no documentation pages.

    error_body(path, error, request_id) gives the JSON body of an error; a dialect with another shape chooses by path."""
    edge = partial(_Edge, max_body_bytes=max_body_bytes, error_body=error_body)
    app = Application(
        edge, title=title, openapi_url=None, docs_url=None, redoc_url=None, lifespan=lifespan, redirect_slashes=False
    )

    async def failed(request: Request, error: Exception) -> Response:
        known = as_areal_error(error)
        body = error_body(request.url.path, known, request_id(request.scope))
        response = Response(orjson.dumps(body), known.status, media_type=_JSON)
        response.raw_headers.extend(error_headers(known))
        if isinstance(error, HTTPException) and error.headers:
            response.headers.update(error.headers)
        return response

    for kind in (ArealError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, failed)
    app.add_middleware(edge)
    return app


def add_route(app: Application, path: str, handler: Handler, methods: Sequence[str] = ("POST",)) -> None:
    """A plain-ASGI route: no request object, no validation, no buffering between the handler and the socket.

    At a path without parameters no layer of the framework sees its events. The router knows it too, for the methods that it
    does not take."""
    if "{" not in path:
        app.plain.update({(method, path): app.edge(handler) for method in methods})
    app.router.routes.append(Route(path, _PlainAsgi(handler), methods=list(methods)))


async def send_json(send: Send, body: Any, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """A whole JSON answer. body: anything orjson knows, or bytes that are JSON already."""
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    length = (b"content-length", str(len(data)).encode())
    await start_response(send, status, [(b"content-type", _JSON.encode()), length, *headers])
    await send({"type": "http.response.body", "body": data})


async def start_response(send: Send, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})


async def start_event_stream(send: Send, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """200 and the headers of an event stream; then `send_chunk` for each event, `end_response` after the last."""
    await start_response(send, 200, [*_STREAM_HEADERS, *headers])


def send_chunk(send: Send, data: bytes) -> Awaitable[None]:
    return send({"type": "http.response.body", "body": data, "more_body": True})


async def end_response(send: Send, data: bytes = b"") -> None:
    """The end, with the last bytes before it."""
    await send({"type": "http.response.body", "body": data})


def request_id(scope: Scope) -> str:
    """The id of this request: the client's x-request-id if it is a plain word, else made here. In every answer."""
    return str(scope["state"]["request_id"])


def as_areal_error(error: Exception) -> ArealError:
    """Any exception of the edge as one of ours; unforeseen ones become InternalError without their text."""
    if isinstance(error, ArealError):
        return error
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    if isinstance(error, HTTPException):
        if error.status_code == 404:
            return NotFound(f"no such route ({error.detail}); check the path after the base URL")
        if error.status_code == 405:
            return MethodNotAllowed("this route does not take that method; check the client's HTTP method")
        known = BadRequest(str(error.detail))
        known.status = error.status_code
        return known
    return InternalError("internal error; the service's log has the cause under this answer's x-request-id")


@contextmanager
def bugs_as_errors(what: str) -> Iterator[None]:
    """Whatever goes wrong in the block comes out as an ArealError; a bug as InternalError, with its trace in the log."""
    try:
        yield
    except (ArealError, ClientGone):
        raise
    except Exception as error:
        known = as_areal_error(error)
        if isinstance(known, InternalError):
            _log.exception("%s failed", what)
        raise known from error


@contextmanager
def stops_as_errors() -> Iterator[None]:
    """Around all of a request's work: where a stop of this process waits for it no longer, the client hears 503 and may try again.

    Only the server cancels what is at the edge, after its grace; a client that leaves cancels what runs further in."""
    try:
        yield
    except asyncio.CancelledError as cut:
        raise Unavailable(
            "the service is stopping and could not wait for this request to finish; retry in a few seconds"
        ) from cut


_JSON = "application/json"
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
)


def _validation_error(error: RequestValidationError) -> BadRequest:
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    if first["type"] == "json_invalid":
        return BadRequest("the body is not valid JSON; send an object with content-type: application/json")
    param = ".".join(where) or None
    return BadRequest(f"{param or 'request body'}: {first['msg'].lower()}", param=param)


class Application(FastAPI):
    """With plain routes, by method and path, which are answered before any layer of the framework."""

    def __init__(self, edge: Callable[[Handler], ASGIApp], **settings: Any) -> None:
        super().__init__(**settings)
        self.edge = edge
        self.plain: dict[tuple[str, str], ASGIApp] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        plain = self.plain.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        await (plain or super().__call__)(scope, receive, send)


class _PlainAsgi:
    """Starlette takes a function for a request handler and an object for an ASGI application."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(scope, receive, send)


class _Edge:
    """Around a plain route, and around the framework: request id, Host on loopback, body limit, and the last catch before a
    socket closes."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, error_body: ErrorBody) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._error_body = error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = _request_id(scope)
        # OpenAI's SDKs read the first, Anthropic's the second.
        id_headers = [(b"x-request-id", name), (b"request-id", name)]
        scope.setdefault("state", {})["request_id"] = name.decode()
        started = False

        def send_with_id(message: Message) -> Awaitable[None]:  # no coroutine of its own: it is called for every token
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), *id_headers]
            return send(message)

        try:
            with stops_as_errors(), bugs_as_errors(f"request {request_id(scope)} {scope['path'][:200]}"):
                if names_loopback(scope["server"][0]):
                    check_host(scope["headers"], "this port")
                await self._app(scope, await receive_within(scope, receive, self._max_body_bytes), send_with_id)
        except ClientGone:
            return
        except ArealError as known:
            if started:  # too late for a status: closing the connection is the only honest signal left
                raise
            with suppress(OSError):  # the client may have left meanwhile
                body = self._error_body(scope["path"], known, request_id(scope))
                await send_json(send_with_id, body, known.status, error_headers(known))


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return bytes(value)
    return b"req_" + secrets.token_hex(12).encode()
