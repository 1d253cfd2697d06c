"""Request bodies: whole, decompressed, and never larger than the limit.

    body = await read_body(receive)          # in a plain-ASGI route of an app made by create_app

app.py wraps every request with `receive_within`, so routes see plain bytes whatever content-encoding the client chose,
and a body that grows beyond the limit (also while it is being decompressed) ends as 413. The gateway, which passes bodies
on as they are, decodes the few that it reads itself by `decoded`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from starlette.types import Message, Receive, Scope

from areal.base.errors import BadRequest, BodyTooLarge

_WINDOW_BITS = {b"gzip": (16 + zlib.MAX_WBITS,), b"x-gzip": (16 + zlib.MAX_WBITS,)}
_DEFLATE = (zlib.MAX_WBITS, -zlib.MAX_WBITS)  # zlib as the standard says, raw as some clients do
_MOST_ENCODINGS = 2  # a header may name any number, and each costs a decompression up to the limit


class ClientGone(Exception):
    """The client closed the connection before its request was read; there is nobody to answer."""


async def read_body(receive: Receive) -> bytes:
    """The whole request body. Raises ClientGone; BodyTooLarge where the edge bounds it."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        if not message.get("more_body"):
            return b"".join([*parts, part]) if parts else part
        parts.append(part)


async def disconnected(receive: Receive) -> None:
    """Returns when the client has hung up. Its body has been read, so nothing else can come."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def receive_within(scope: Scope, receive: Receive, limit: int) -> Receive:
    """A `receive` whose body stays within `limit` bytes and carries no content-encoding (removed from the scope)."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise _too_large(limit)
    counted = _counted(receive, limit)
    if not _encodings(scope["headers"]):
        return counted
    body = decoded(await read_body(counted), scope["headers"], limit)
    dropped = (b"content-encoding", b"content-length", b"transfer-encoding")
    scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in dropped]
    scope["headers"].append((b"content-length", str(len(body)).encode()))
    return _replay(body, receive)


def decoded(body: bytes, headers: Iterable[tuple[bytes, bytes]], limit: int) -> bytes:
    """The body without its content-encodings. Raises BadRequest for unknown, broken or too many ones, BodyTooLarge."""
    encodings = _encodings(headers)
    if len(encodings) > _MOST_ENCODINGS:
        raise BadRequest(f"{len(encodings)} content-encodings are more than {_MOST_ENCODINGS}; compress the body once")
    for encoding in reversed(encodings):
        body = _decompress(body, encoding, limit)
    return body


def _encodings(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """Those that change the bytes, in the order in which they were applied."""
    words = (
        word.strip().lower() for name, value in headers if name == b"content-encoding" for word in value.split(b",")
    )
    return [word for word in words if word not in (b"", b"identity")]


def _decompress(body: bytes, encoding: bytes, limit: int) -> bytes:
    choices: Iterable[int] = _DEFLATE if encoding == b"deflate" else _WINDOW_BITS.get(encoding, ())
    for window_bits in choices:
        inflater = zlib.decompressobj(window_bits)
        try:
            plain = inflater.decompress(body, limit + 1)
        except zlib.error:
            continue
        if len(plain) > limit:
            raise _too_large(limit)
        if inflater.eof:
            return plain
    name = encoding.decode("latin-1")
    raise BadRequest(f"the body is not valid {name}, or content-encoding {name} is unknown; use gzip, deflate or none")


def _counted(receive: Receive, limit: int) -> Receive:
    left = limit

    async def counted() -> Message:
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise _too_large(limit)
        return message

    return counted


def _replay(body: bytes, receive: Receive) -> Receive:
    pending = [body]

    async def replay() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replay


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limit} bytes; send less or raise rollout.agent.max_body_bytes")
