"""HTTP/1.1 below the application: heads have a bound and a time, what is no HTTP is answered in JSON.

    uvicorn.Config(app, http=Http1)

uvicorn's parser reads a head of any size, waits for the rest of a request for ever, says in plain text that something was no HTTP, and
loses the body of a request that offers an upgrade, as Java's HttpClient does with every first one (`Upgrade: h2c`). Here such
an offer is not taken and the request is read on; a head over 64 KiB is 431, one that is not complete after a minute 408; a body
that stops coming for a minute closes its connection. Used by serve.py.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from areal.base.errors import ArealError, BadRequest
from areal.web.error_bodies import openai_error_body

LARGEST_HEAD = 64 * 1024  # bytes of the request line and all headers
STALLED_S = 60.0  # without a byte of a request that has begun


class _HeadTooLarge(BadRequest):
    status = 431


class _TooSlow(BadRequest):
    status = 408


class Http1(HttpToolsProtocol):
    """One connection. `stalled_s`: see STALLED_S."""

    stalled_s = STALLED_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refusal: ArealError | None = None
        self._head_bytes = 0  # that came for a head which is not complete
        self._unfinished = ""  # the part of a request that is being read: head, body or none
        self._ended = False  # whether a request was complete within the bytes that came last
        self._reading_on = False  # the parser is being told of a body whose head was read before
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.stalled_s, self._stalled)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._wait_no_more()
        self._ended = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._read_on(data[offer.args[0] :])
            return
        except httptools.HttpParserError:
            self._refuse(self._refusal or BadRequest("this is no HTTP/1.1 request; check the client's URL and headers"))
            return
        if self._unfinished == "head" and not self._ended:  # else only some of these bytes are the head's
            self._head_bytes += len(data)
        if self._unfinished == "head" and self._head_bytes > LARGEST_HEAD:
            self._refuse(_head_too_large())
        elif self._unfinished:
            self._timer = self.loop.call_later(self.stalled_s, self._stalled)

    def on_message_begin(self) -> None:
        if self._reading_on:
            return
        self._unfinished, self._head_bytes = "head", 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._reading_on:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._reading_on:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._reading_on:
            self._reading_on = False
            return
        self._unfinished = "body"
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > LARGEST_HEAD:
            self._refusal = _head_too_large()
            raise self._refusal
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and self._framing():
            return  # the parser takes the upgrade for done and skips the body; see _read_on
        self._unfinished, self._ended = "", True
        super().on_message_complete()

    def _read_on(self, rest: bytes) -> None:
        """Go on in HTTP/1.1 behind the head of a request that offered something else."""
        if self._unfinished:
            self.parser = httptools.HttpRequestParser(self)
            self._reading_on = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + self._framing() + b"\r\n")
        if rest:
            self.data_received(rest)

    def _framing(self) -> bytes:
        """The headers that say where the body ends."""
        wanted = (b"content-length", b"transfer-encoding")
        return b"".join(b"%b: %b\r\n" % pair for pair in self.headers if pair[0] in wanted)

    def _refuse(self, error: ArealError) -> None:
        body = orjson.dumps(openai_error_body(error))
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nx-should-retry: false\r\nconnection: close\r\n\r\n"
        running = self.cycle is not None and not self.cycle.response_complete
        if not self.pipeline and not (running and self.cycle.response_started):  # else it would stand in another answer
            self.transport.write(head.encode() + body)
            if running:
                self.cycle.disconnected = True
        self.transport.close()

    def _stalled(self) -> None:
        if self.flow.read_paused:  # we do not listen: the application has to take what came first
            self._timer = self.loop.call_later(self.stalled_s, self._stalled)
        elif self._unfinished == "head":
            self._refuse(_TooSlow(f"the request's head was not complete after {self.stalled_s:g} s; send it at once"))
        else:
            self.transport.close()  # the application hears that its client is gone

    def _wait_no_more(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _head_too_large() -> _HeadTooLarge:
    return _HeadTooLarge(f"the URL and headers are larger than {LARGEST_HEAD} bytes; send less in them")
