"""What an error looks like in each public protocol, before an answer has begun and in the middle of a stream.

    status, headers, body = error_reply(InvalidKey(), "anthropic", request_id)
    event = error_event(BackendError("…"), "openai", request_id)        # bytes of one Server-Sent Event

Only what the gateway says itself passes here; the worker's own errors are spliced through like any answer. Secrets in
messages are redacted (web/error_bodies.py). Used by exchange.py.
"""

from __future__ import annotations

from typing import Any

import orjson

from areal.base.errors import ArealError
from areal.gateway.paths import Dialect
from areal.web.app import error_headers
from areal.web.error_bodies import anthropic_error_body, openai_error_body
from areal.web.sse import encode_event

Reply = tuple[int, list[tuple[bytes, bytes]], bytes]


def error_reply(error: ArealError, dialect: Dialect, request_id: str) -> Reply:
    """Status, headers and body of an answer that is this error."""
    data = orjson.dumps(_body(error, dialect, request_id))
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode()), *error_headers(error)]
    return error.status, head, data


def error_event(error: ArealError, dialect: Dialect, request_id: str) -> bytes:
    """This error as the last event of a stream. Every SDK raises it with its message."""
    body = _body(error, dialect, request_id)
    if dialect == "anthropic":
        return encode_event(orjson.dumps(body), "error")
    if dialect == "responses":  # the protocol's event has the fields on top; the SDK raises on an `error` object
        event = {"type": "error", "code": error.code, "message": body["error"]["message"], "param": error.param, **body}
        return encode_event(orjson.dumps(event), "error")
    return encode_event(orjson.dumps(body))


def _body(error: ArealError, dialect: Dialect, request_id: str) -> dict[str, Any]:
    return anthropic_error_body(error, request_id) if dialect == "anthropic" else openai_error_body(error)
