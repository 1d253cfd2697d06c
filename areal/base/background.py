"""Work in the background of a block: it is stopped where the block ends, and what breaks it ends the block with that error.

    async with background(self._forever(), name="retention"):
        ...                                  # cancelled as soon as `_forever` raises; the block then raises what it raised

A task that nobody awaits dies without a word: Python tells of it when the task is collected, a run goes on without the part, and what
should have happened does not. So a part that works on its own runs in here, catches what passes (a store that is away), and lets the
rest out: a bug ends the process with its reason. For one task as long as one block; what is awaited where it is started needs none of this.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def background(work: Coroutine[Any, Any, None], *, name: str) -> AsyncIterator[None]:
    """Enter and leave it in one task. Raises what `work` raises, the first where it is several, and else what its block does."""
    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(work, name=name)
            yield
            task.cancel()
    except BaseExceptionGroup as several:
        failure = several.exceptions[0]
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    if failure is not None:  # out here, so that it keeps its own cause and context
        raise failure
