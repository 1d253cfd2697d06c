"""A bare forwarder: what the gateway stands on (uvicorn, aiohttp) and nothing else. `python forwarder.py URL`.

No keys, no registry, no request ids, no error shapes, no metrics, no watch over clients that hang up: the least that can
forward a stream on this stack, for comparison. Prints its own URL.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import aiohttp
import uvloop

from areal.web.address import bind
from areal.web.serve import serve


class Forwarder:
    """The ASGI application."""

    def __init__(self, upstream: str, session: aiohttp.ClientSession) -> None:
        self._upstream, self._session = upstream, session

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
        headers = [(k.decode(), v.decode()) for k, v in scope["headers"] if k not in (b"host", b"content-length")]
        url = self._upstream + scope["path"]
        async with self._session.request(scope["method"], url, data=body, headers=headers) as response:
            kept = [(k.lower(), v) for k, v in response.raw_headers if k.lower() != b"transfer-encoding"]
            await send({"type": "http.response.start", "status": response.status, "headers": kept})
            async for chunk in response.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


async def main() -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        await serve(Forwarder(sys.argv[1], session), bind("127.0.0.1", 0), ready=lambda url: print(url, flush=True))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
