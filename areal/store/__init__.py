"""What survives a crash: sessions, interactions, rewards, versions and what was trained. See base.py for the Protocol.

    async with await open_store("sqlite:///runs/areal/trial/store.sqlite") as store: ...

Choose by URL scheme; every process of a run opens the same URL. No torch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from areal.base.errors import ConfigError
from areal.store.base import Store
from areal.store.sqlite import SqliteStore

Clock = Callable[[], float]


def store_url(path: Path) -> str:
    """The URL of a store file."""
    return f"sqlite:///{path}"


async def open_store(url: str, *, clock: Clock = time.time, read_only: bool = False) -> Store:
    """Open the store at `url`, making it if it is not there; the caller closes it (`async with`). read_only: beside the live
    processes of a run or after it, changing nothing; every write raises StoreError.

    `sqlite:///PATH`: the text after the third slash is the path, literally (an absolute one makes it four slashes).
    clock: seconds since the epoch; tests pass their own. Raises ConfigError for a URL that names no store, StoreError for
    a file that cannot be used."""
    scheme, separator, rest = url.partition("://")
    if scheme in _COMING:
        raise ConfigError(f"store {scheme!r}: {_COMING[scheme]}; use sqlite:///PATH")
    if not separator or scheme not in _OPENERS:
        raise ConfigError(f"unknown store {url!r}; known: {', '.join(f'{name}:///PATH' for name in _OPENERS)}")
    return await asyncio.to_thread(_OPENERS[scheme], rest, clock, read_only)


def _open_sqlite(rest: str, clock: Clock, read_only: bool) -> Store:
    path = rest.removeprefix("/")
    if not rest.startswith("/") or not path or path == ":memory:":
        raise ConfigError(f"store URL 'sqlite://{rest}' names no file; write sqlite:///PATH")
    return SqliteStore(Path(path), clock, read_only=read_only)


_OPENERS: dict[str, Callable[[str, Clock, bool], Store]] = {"sqlite": _open_sqlite}
_COMING = dict.fromkeys(("postgres", "postgresql"), "a store for several hosts comes with the cluster store")
