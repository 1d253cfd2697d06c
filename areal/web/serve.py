"""Serve an application on a socket that is already bound, until SIGTERM, Ctrl-C or an event; then drain.

    sock = bind(host, port, setting="--port")
    await serve(app, sock, ready=lambda url: announce("Gateway", f"listening at {url}"), drain=refuse_new_sessions)

Each connection takes a file descriptor, so the process takes as many as the system lets it have: the usual soft limit of
1024 would refuse the thousandth agent. Draining: `drain` runs first, while the port still answers (new sessions get 503, live ones finish); then the port closes
and requests in flight have grace_s. A second signal skips the waiting. Used by gateway, rollout worker, inference servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from areal.web.address import url_of
from areal.web.protocol import Http1

OPEN_FILES = 65_536


class _Server(uvicorn.Server):
    """uvicorn that says when it answers, and leaves signals to `serve`, which decides when the port closes."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.answering = asyncio.Event()
        self.forced = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.answering.set()

    def force(self) -> None:
        self.force_exit = True
        self.forced.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    app: ASGIApp,
    sock: socket.socket,
    *,
    ready: Callable[[str], None] | None = None,
    drain: Callable[[], Coroutine[Any, Any, None]] | None = None,
    stop: asyncio.Event | None = None,
    grace_s: float = 10.0,
) -> None:
    """Returns when everything is closed. ready(url) is called once the port answers. stop: another way to end it."""
    stop = stop or asyncio.Event()
    allow_open_files()
    config = uvicorn.Config(
        app,
        http=Http1,
        log_config=None,
        access_log=False,
        log_level="warning",
        lifespan="on",
        server_header=False,
        proxy_headers=False,
        ws="none",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(grace_s)),
    )
    server = _Server(config)
    with _signals(stop, server):
        running = asyncio.create_task(server.serve([sock]))
        try:
            await _first(running, server.answering.wait())
            if server.answering.is_set() and ready is not None:
                ready(url_of(sock))
            await _first(running, stop.wait())
            if drain is not None and not running.done():
                await _first(running, drain(), server.forced.wait())
        finally:
            server.should_exit = True
            await running


def allow_open_files(most: int = OPEN_FILES) -> None:
    """Raise this process's soft limit of open files to `most`, as far as its hard limit goes. Never lowers it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _first(running: asyncio.Task[None], *others: Coroutine[Any, Any, Any]) -> None:
    """Wait for the first to finish and cancel the others, but never `running`; their errors are raised."""
    tasks = {asyncio.create_task(other) for other in others}
    try:
        done, _ = await asyncio.wait({running, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done & tasks:
        task.result()


@contextlib.contextmanager
def _signals(stop: asyncio.Event, server: _Server) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    caught: list[signal.Signals] = []

    def asked_to_stop() -> None:
        if stop.is_set():  # the second time, at once
            server.force()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: the caller's `stop` ends it
            loop.add_signal_handler(number, asked_to_stop)
            caught.append(number)
    try:
        yield
    finally:
        for number in caught:
            loop.remove_signal_handler(number)
