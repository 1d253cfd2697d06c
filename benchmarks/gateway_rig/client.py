"""An HTTP client that costs next to nothing, so that the servers are what is measured; and conversations to send.

    async with Connection(url) as connection:
        reply = await connection.post("/v1/chat/completions", key, body)
        reply.text(), reply.arrivals                       # the answer; (CLOCK_MONOTONIC ns, events so far) per read
    talk = Talk(stream=True); talk.body(); talk.said(reply.text())

HTTP/1.1 with keep-alive; bodies by length or chunked. A status other than 200 and an answer without an end raise Refused.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

import orjson

ADMIN_KEY = "bench-admin-key"
CHAT = "/v1/chat/completions"


class Refused(Exception):
    """The server did not answer as it should; the message holds what it said."""


@dataclass(slots=True)
class Reply:
    """body: without transfer coding. arrivals: when a read brought events, and how many had come by then."""

    body: bytes = b""
    arrivals: list[tuple[int, int]] = field(default_factory=list)

    def events(self) -> list[bytes]:
        return [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]

    def text(self) -> str:
        """What a streamed chat answer says. Raises Refused where it is not complete."""
        events = self.events()
        if not events or events[-1] != b"[DONE]":
            raise Refused(f"the stream has no end: {self.body[-300:]!r}")
        choices = [choice for event in events[:-1] for choice in orjson.loads(event)["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)


class Connection:
    """One keep-alive connection, opened on entry."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._host, self._port = parts.hostname, parts.port

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._writer.close()

    async def post(self, path: str, key: str, body: Any, method: str = "POST") -> Reply:
        """Raises Refused, OSError."""
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        self._writer.write(
            f"{method} {path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\nauthorization: Bearer {key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode()
            + data
        )
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
            lines = head.lower().split(b"\r\n")
            length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), None)
            reply = Reply()
            if length is not None:
                reply.body = await self._reader.readexactly(length)
            else:
                await self._chunked(reply)
        except asyncio.IncompleteReadError as error:
            raise Refused(f"the connection broke in the answer: {error.partial[-200:]!r}") from None
        if not head.startswith(b"HTTP/1.1 200"):
            raise Refused(f"{head[:12]!r} {reply.body[:300]!r}")
        return reply

    async def _chunked(self, reply: Reply) -> None:
        raw, parts, seen, size = b"", [], 0, -1
        while True:
            read = await self._reader.read(1 << 20)
            now = time.monotonic_ns()
            if not read:
                raise Refused("the connection broke in a stream")
            raw += read
            while True:
                line, found, rest = raw.partition(b"\r\n")
                if not found or len(rest) < int(line, 16) + 2:
                    break
                size = int(line, 16)
                parts.append(rest[:size])
                seen += rest[:size].count(b"data: ")
                raw = rest[size + 2 :]
            if not reply.arrivals or reply.arrivals[-1][1] != seen:
                reply.arrivals.append((now, seen))
            if size == 0:
                reply.body = b"".join(parts)
                return


class Talk:
    """A conversation that grows by an answer and a question a turn; its words are drawn anew for each."""

    def __init__(self, *, words: int, max_tokens: int | None = None) -> None:
        self._words, self._max_tokens = words, max_tokens
        self._draw = random.Random(words + random.getrandbits(32))
        self._messages = [{"role": "system", "content": self._text(3 * words)}, self._question()]

    def body(self) -> bytes:
        limit = {} if self._max_tokens is None else {"max_tokens": self._max_tokens}
        return orjson.dumps({"model": "default", "stream": True, "messages": self._messages, **limit})

    def said(self, answer: str) -> None:
        self._messages += [{"role": "assistant", "content": answer}, self._question()]

    def _question(self) -> dict[str, str]:
        return {"role": "user", "content": self._text(self._words)}

    def _text(self, words: int) -> str:
        return " ".join(self._draw.choices(WORDS, k=words))


_SAYING = (
    "the report says that every token was sampled once and recorded with its own number while agents read files "
    "call tools compare results and write short answers about rivers mountains cities weather prices and trains"
)
WORDS = _SAYING.split()


async def start_session(connection: Connection, task_id: str) -> str:
    """Through a gateway; returns the session's key."""
    reply = await connection.post("/rl/start_session", ADMIN_KEY, {"task_id": task_id})
    return str(orjson.loads(reply.body)["api_key"])


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
