"""A bare forwarder: what the gateway stands on (uvicorn, web/upstream.py) and nothing else. `python forwarder.py URL`.

No keys, no registry, no request ids, no error shapes, no metrics, no watch over clients that hang up: the least that can
forward a stream on this stack, for comparison. Prints its own URL.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import uvloop

from areal.web.address import bind
from areal.web.serve import serve
from areal.web.upstream import Upstream


class Forwarder:
    """The ASGI application."""

    def __init__(self, server: str, upstream: Upstream) -> None:
        self._server, self._upstream = server, upstream

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for event in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{event}.complete"})
            return
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body"):
                break
        headers = [pair for pair in scope["headers"] if pair[0] not in (b"host", b"content-length")]
        url = self._server + scope["path"]
        answer = await self._upstream.request(scope["method"], url, headers, body, silence_s=60.0)
        try:
            kept = [(k.lower(), v) for k, v in answer.headers if k.lower() != b"transfer-encoding"]
            await send({"type": "http.response.start", "status": answer.status, "headers": kept})
            while chunk := await answer.read():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            answer.close()


async def main() -> None:
    upstream = Upstream(connect_s=5.0, idle_s=2.0)
    await serve(Forwarder(sys.argv[1], upstream), bind("127.0.0.1", 0), ready=lambda url: print(url, flush=True))
    upstream.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
