"""Server-Sent Events: encode ours, decode anybody's, whatever way the network cut the bytes.

    await send(encode_event(orjson.dumps(delta)))
    decoder = SseDecoder()
    async for chunk in response.content.iter_any():
        for event in decoder.feed(chunk):        # event.data is bytes: orjson reads it as it is
            ...

Decoding follows the WHATWG rules: LF, CR and CRLF end lines, comments are dropped, `data` lines are joined by LF, an
unknown field is ignored, a byte-order mark at the start too. No I/O. Used by proxy, gateway and inference clients.
"""

from __future__ import annotations

import msgspec

from areal.base.errors import BackendError

DONE = b"[DONE]"
DONE_EVENT = b"data: [DONE]\n\n"
PING = b": ping\n\n"

_BOM = b"\xef\xbb\xbf"
_LARGEST_EVENT = 16 * 2**20


class SseEvent(msgspec.Struct, frozen=True):
    """One dispatched event. name: the `event` field, `message` where there is none. data: the joined data lines."""

    data: bytes
    name: str = "message"
    id: str = ""


def encode_event(data: bytes, name: str | None = None) -> bytes:
    """One event on the wire. Data may span lines; a name is written as the `event` field before it."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    if b"\n" not in data and b"\r" not in data:
        return head + b"data: " + data + b"\n\n"
    lines = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    return head + b"".join(b"data: " + line + b"\n" for line in lines) + b"\n"


class SseDecoder:
    """Feed it bytes in any split; it gives events in order, each once. Raises BackendError for an event over 16 MiB."""

    def __init__(self) -> None:
        self._rest = b""
        self._more: list[bytes] = []  # what goes on the line that _rest begins, joined once it ends
        self._held = 0  # bytes of both
        self._at_start = True
        self._between = False  # nothing is held of an event that is to come
        self._data: list[bytes] = []
        self._name = ""
        self._id = ""

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Events that are complete now."""
        if (  # one event with nothing but a data line, as almost every chunk of a stream of tokens is
            self._between
            and chunk.startswith(b"data: ")
            and chunk.endswith(b"\n\n")
            and chunk.find(b"\n") == len(chunk) - 2
            and b"\r" not in chunk
        ):
            return [SseEvent(chunk[6:-2], id=self._id)]
        if (
            self._rest
            and not self._at_start
            and not self._rest.endswith(b"\r")
            and b"\n" not in chunk
            and b"\r" not in chunk
        ):
            self._more.append(chunk)
            self._hold(len(chunk))
            return []
        buffer = b"".join([self._rest, *self._more, chunk])
        self._more.clear()
        if self._at_start:
            if len(buffer) < len(_BOM) and _BOM.startswith(buffer):
                self._rest = buffer
                return []
            buffer = buffer.removeprefix(_BOM)
            self._at_start = False
        held = b""
        if b"\r" in buffer:
            if buffer.endswith(b"\r"):  # the LF of a CRLF may be in the next chunk
                buffer, held = buffer[:-1], b"\r"
            buffer = buffer.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = buffer.split(b"\n")
        self._rest, self._held = rest + held, 0
        self._hold(len(self._rest))
        events = []
        for line in lines:
            event = self._line(line)
            if event is not None:
                events.append(event)
        self._between = not (self._at_start or self._rest or self._data or self._name)
        return events

    def close(self) -> list[SseEvent]:
        """What a stream that ended without its last blank line still held."""
        events = self.feed(b"\n\n") if not self._rest.endswith(b"\r") else self.feed(b"\n\n\n")
        self._rest = b""
        return events

    def _hold(self, more: int) -> None:
        self._held += more
        if self._held > _LARGEST_EVENT:
            raise BackendError(f"an event grew over {_LARGEST_EVENT} bytes without an end; is this an event stream?")

    def _line(self, line: bytes) -> SseEvent | None:
        if not line:
            return self._dispatch()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
        elif field == b"id":
            self._id = value.decode("utf-8", "replace")
        return None

    def _dispatch(self) -> SseEvent | None:
        data, name = self._data, self._name
        self._data, self._name = [], ""
        return SseEvent(b"\n".join(data), name or "message", self._id) if data else None
