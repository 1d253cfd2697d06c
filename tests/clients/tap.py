"""A wire tap between an agent and the gateway: passes bytes on as they come, and notes what was asked and how it was answered.

    with Tap(gateway_url) as tap:
        ...                                     # the agent's base URL is tap.url
    tap.model_calls                             # [Exchange(path, body, status, events, …)]

What it answers questions with that no record of the run holds: did the agent ask for a stream, did it get one in pieces, was
a request refused, what exactly was sent.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import urlsplit

_OWN = {"host", "connection", "transfer-encoding", "content-length", "keep-alive"}
ANSWER_TIMEOUT_S = 240
MODEL_ROUTES = ("/chat/completions", "/responses", "/messages")


@dataclass
class Exchange:
    """One request. body: decoded JSON, or None. events: of an event stream; reads: how many pieces the answer came in."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    status: int = 0
    events: int = 0
    reads: int = 0

    @property
    def asks_a_model(self) -> bool:
        return self.method == "POST" and urlsplit(self.path).path.endswith(MODEL_ROUTES)

    @property
    def streamed(self) -> bool:
        """Asked for a stream, and got one in several pieces."""
        return bool(self.body and self.body.get("stream")) and self.events > 1 and self.reads > 1


class Tap:
    """A forwarding server on a port of its own while the block runs."""

    def __init__(self, gateway: str) -> None:
        self.exchanges: list[Exchange] = []
        tap, target = self, urlsplit(gateway)

        class Handler(_Handler):
            exchanges = tap.exchanges
            upstream = (target.hostname or "", target.port or 80)

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def model_calls(self) -> list[Exchange]:
        """Requests for an answer of the model, in order of arrival."""
        return [one for one in self.exchanges if one.asks_a_model]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Agents hang up when they are done; anything else belongs on stderr."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    exchanges: list[Exchange]
    upstream: tuple[str, int]

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers.get("content-length") or 0))
        body = None
        with suppress(ValueError):
            body = json.loads(sent)
        exchange = Exchange(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body)
        self.exchanges.append(exchange)
        connection = http.client.HTTPConnection(*self.upstream, timeout=ANSWER_TIMEOUT_S)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _OWN}
            connection.request(self.command, self.path, sent or None, headers)
            with connection.getresponse() as answer:
                self._pass_on(answer, exchange)
        finally:
            connection.close()

    do_GET = do_HEAD = do_DELETE = do_PUT = do_POST

    def _pass_on(self, answer: http.client.HTTPResponse, exchange: Exchange) -> None:
        exchange.status = answer.status
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _OWN:
                self.send_header(name, value)
        bodyless = self.command == "HEAD" or answer.status in (204, 304)
        if bodyless:
            self.send_header("content-length", answer.getheader("content-length") or "0")
        else:
            self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        while not bodyless and (piece := answer.read1(65536)):
            exchange.reads += 1
            exchange.events += piece.count(b"\ndata:") + piece.startswith(b"data:")
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        if not bodyless:
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *message: object) -> None:
        """Silent."""
