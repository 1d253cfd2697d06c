"""Which server answers: a session stays on the server that holds its KV prefix, a new one goes where least runs.

    router = Router([connect("native", url, token) for url in urls])
    async with aclosing(router.generate(request)) as chunks: ...
    router.forget(session_id)                     # the session has ended

Counts what goes through this router only; another process has its own. A server that fails before its first chunk
loses the session and is avoided for a while, so that the next try goes elsewhere. Backends: backend.py. Used by proxy/.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from areal.base.errors import BackendError, ConfigError
from areal.base.types import GenerateRequest, TokenChunk
from areal.inference.backend import Backend

MAX_SESSIONS = 100_000  # remembered homes; the longest unused one is forgotten first
AVOID_S = 5.0  # after a failure before the first chunk, while another server can take the session


class Router:
    """Affinity by session, else least load. One event loop, any number of tasks."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        if not backends:
            raise ConfigError("there is no inference server to route to; rollout.backend must ask for at least one")
        self.backends = tuple(backends)
        self.running = [0] * len(backends)  # streams in flight, per backend
        self._homes: OrderedDict[str, int] = OrderedDict()
        self._sessions = [0] * len(backends)  # homes per backend
        self._avoid_until = [0.0] * len(backends)  # time.monotonic()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Backend.generate of the session's server."""
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

    def place(self, session_id: str) -> int:
        """The index of the session's server; chosen now if it has none (fewest streams, then fewest sessions)."""
        index = self._homes.get(session_id)
        if index is None:
            now = time.monotonic()
            index = min(
                range(len(self.backends)),
                key=lambda k: (self._avoid_until[k] > now, self.running[k], self._sessions[k]),
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
