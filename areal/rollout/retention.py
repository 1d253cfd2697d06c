"""Old content goes while the run goes on: the bounds of the config, applied beside training.

    async with Upholder(store.upkeep, retention_of(config), folder.checkpoints): ...

Every PERIOD_S seconds, where the config sets a bound. What training may come back to is read from the checkpoints themselves: the
oldest recovery state that is whole is the worst a resume can go back to. Used by assemble.py.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

from areal.base.background import background
from areal.base.errors import CheckpointError, StoreError
from areal.config.run import RunConfig
from areal.engine.checkpoint_files import checkpoints, looks_whole, read_mark
from areal.store.base import Retention, Upkeep

PERIOD_S = 10.0

_log = logging.getLogger("areal.rollout")


def retention_of(config: RunConfig) -> Retention:
    """The bounds of the config."""
    store = config.store
    return Retention(store.keep_steps, store.keep_seconds, store.keep_bytes)


def safe_step(folder: Path) -> int:
    """The step of the oldest whole recovery state; 0 without one: then whatever was trained may be trained again."""
    return min((one.step for one in checkpoints(folder) if _resumable(one.path)), default=0)


def _resumable(path: Path) -> bool:
    try:
        return looks_whole(path) and read_mark(path).resumable
    except CheckpointError:
        return False


class Upholder:
    """Applies the bounds while its block runs; does nothing where there are none."""

    def __init__(self, upkeep: Upkeep, keep: Retention, folder: Path, *, period_s: float = PERIOD_S) -> None:
        self._upkeep = upkeep
        self._keep = keep
        self._folder = folder
        self._period_s = period_s
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        if self._keep != Retention():
            await self._stack.enter_async_context(background(self._forever(), name="retention"))
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self._stack.__aexit__(*exc)

    async def _forever(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            try:
                step = await asyncio.to_thread(safe_step, self._folder)
                count = await self._upkeep.forget(self._keep, step)
            except (StoreError, OSError) as error:  # also a folder of checkpoints that cannot be read just now
                _log.warning("old content is deleted later: %s", error)
            else:
                if count:
                    _log.info("the content of %d old sessions was deleted (store.keep_...)", count)
