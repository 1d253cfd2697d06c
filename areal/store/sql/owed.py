"""What a thread owes to a caller in an event loop: a result or an error, handed over in the caller's loop.

    owed = Owed(asyncio.get_running_loop())
    owed.result = 3                                   # or owed.error, in the thread that works
    loop.call_soon_threadsafe(owed.resolve)           # in the loop: `await owed.future` returns or raises

Used by database.py (writes) and readers.py (looks).
"""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Owed(Generic[T]):
    """Make it in the caller's loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.future: asyncio.Future[T] = loop.create_future()
        self.result: T | None = None
        self.error: BaseException | None = None

    def resolve(self) -> None:
        """In the caller's loop: hand over the result or the error. A caller that gave up is told nothing."""
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)  # type: ignore[arg-type]
