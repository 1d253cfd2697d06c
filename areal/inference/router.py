"""Which server answers: a session stays on the server that holds its KV prefix, a new one goes where least runs.

    router = Router([connect("native", url, token) for url in urls], own=1)
    async with aclosing(router.generate(request)) as chunks: ...
    router.forget(session_id)                     # the session has ended
    router.serve_from([0])                        # the others are out: they do not serve the current weights
    router.serve_from([])                         # requests wait

Counts what goes through this router only; another process has its own. A server that fails before its first chunk
loses the session and is avoided for a while, so that the next try goes elsewhere. The first `own` servers are this process's
own; it turns to the others while those are out or avoided. Backends: backend.py. Used by proxy/.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing, suppress

from areal.base.errors import BackendError, ConfigError, Unavailable
from areal.base.types import GenerateRequest, TokenChunk
from areal.inference.backend import Backend

MAX_SESSIONS = 100_000  # remembered homes; the longest unused one is forgotten first
AVOID_S = 5.0  # after a failure before the first chunk, while another server can take the session
WAIT_S = 60.0  # for a server to come back, where none is in service: as long as one that is silent is waited for


class Router:
    """Affinity by session, else least load. One event loop, any number of tasks."""

    def __init__(self, backends: Sequence[Backend], *, own: int | None = None) -> None:
        """own: how many of them, from the first on, are preferred; None = all."""
        if not backends:
            raise ConfigError("there is no inference server to route to; rollout.backend must ask for at least one")
        self.backends = tuple(backends)
        self.running = [0] * len(backends)  # streams in flight, per backend
        self._homes: OrderedDict[str, int] = OrderedDict()
        self._sessions = [0] * len(backends)  # homes per backend
        self._avoid_until = [0.0] * len(backends)  # time.monotonic()
        self._own = len(backends) if own is None else own
        self._serving: Collection[int] = range(len(backends))
        self._in_service = asyncio.Event()  # any of them
        self._in_service.set()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Backend.generate of the session's server. Where none is in service it waits for one, and raises Unavailable after WAIT_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                while not self._serving:
                    await self._in_service.wait()
        index = self.place(request.session_id)
        self.running[index] += 1
        started = False
        try:
            async with aclosing(self.backends[index].generate(request)) as chunks:
                async for chunk in chunks:
                    started = True
                    yield chunk
        except BackendError:
            if not started:
                self._avoid_until[index] = time.monotonic() + AVOID_S
                if self._homes.get(request.session_id) == index:
                    self.forget(request.session_id)
            raise
        finally:
            self.running[index] -= 1

    def serve_from(self, indices: Collection[int]) -> None:
        """Only these servers take requests from now on. What streams from another goes on; its sessions move with their next
        request."""
        self._serving = frozenset(indices)
        if self._serving:
            self._in_service.set()
        else:
            self._in_service.clear()

    def place(self, session_id: str) -> int:
        """The index of the session's server; chosen now if it has none (its own first, then fewest streams, then fewest
        sessions). Raises Unavailable while none is in service."""
        index = self._homes.get(session_id)
        if index is not None and index not in self._serving:
            self.forget(session_id)
            index = None
        if index is None:
            if not self._serving:
                raise Unavailable("no inference server serves the current weights now; retry in a few seconds")
            now = time.monotonic()
            index = min(
                self._serving,
                key=lambda k: (self._avoid_until[k] > now, k >= self._own, self.running[k], self._sessions[k], k),
            )
            self._homes[session_id] = index
            self._sessions[index] += 1
            if len(self._homes) > MAX_SESSIONS:
                self.forget(next(iter(self._homes)))
        self._homes.move_to_end(session_id)
        return index

    def forget(self, session_id: str) -> None:
        """The session has ended, or has to find another server."""
        index = self._homes.pop(session_id, None)
        if index is not None:
            self._sessions[index] -= 1
