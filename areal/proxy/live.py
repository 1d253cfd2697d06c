"""A session that runs in this process: its row, its conversation, and the model calls in flight.

    with live.calling(task):                     # refuses once admission has closed
        ...
    await live.close(bound_s=10.0)               # admission closes; calls finish within the bound or are cancelled

One owner, the event loop. Made and ended by sessions.py; used by recorder.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from areal.base.errors import InvalidKey
from areal.base.types import Session
from areal.proxy.conversation import Conversation


class LiveSession:
    """What this process knows of one running session; everything durable is in the store."""

    def __init__(self, session: Session, conversation: Conversation) -> None:
        self.session = session
        self.conversation = conversation
        self.closing = False
        self.used_at = time.monotonic()  # the last call's end, or when it was loaded
        self._calls: set[asyncio.Task[Any]] = set()

    @property
    def id(self) -> str:
        return self.session.id

    @property
    def in_flight(self) -> int:
        """Model calls running now."""
        return len(self._calls)

    @contextmanager
    def calling(self, task: asyncio.Task[Any]) -> Iterator[None]:
        """This task is a model call of the session. Raises InvalidKey when the session is ending."""
        if self.closing:
            raise InvalidKey(f"session {self.id} is ending and takes no more model calls; start a new session")
        self._calls.add(task)
        try:
            yield
        finally:
            self._calls.discard(task)
            self.used_at = time.monotonic()

    async def idle(self) -> None:
        """Wait until no call is in flight."""
        while self._calls:
            await asyncio.wait(self._calls.copy())

    async def close(self, bound_s: float) -> None:
        """No new calls; those in flight get bound_s seconds, then they are cancelled (and recorded as aborted)."""
        self.closing = True
        if self._calls:
            _, late = await asyncio.wait(self._calls.copy(), timeout=bound_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
