"""What survives a crash: sessions, interactions, rewards, versions and what was trained. See base.py for the Protocol.

    async with await open_store("sqlite:///runs/areal/trial/store.sqlite") as store: ...
    async with await open_store("postgresql://user:secret@host/areal?schema=trial") as store: ...

Choose by URL scheme; every process of a run opens the same URL. sqlite.py serves one host and needs nothing, postgres.py several and
needs `areal[postgres]`; sql/ is what both share. No torch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from areal.base.errors import ConfigError
from areal.store.base import Store
from areal.store.sql.engine import Engine
from areal.store.sql.store import SqlStore
from areal.store.sqlite import SqliteEngine

Clock = Callable[[], float]


def store_url(path: Path) -> str:
    """The URL of a store file."""
    return f"sqlite:///{path}"


REQUEST_PATIENCE_S = 30.0  # of a process whose callers wait for an answer
RUN_PATIENCE_S = 600.0  # of the process whose failure ends a run


async def open_store(url: str, *, clock: Clock = time.time, read_only: bool = False, patience_s: float = 0.0) -> Store:
    """Open the store at `url`, making it if it is not there; the caller closes it (`async with`). read_only: beside the live
    processes of a run or after it, changing nothing; every write raises StoreError. patience_s: how long calls wait for a server that has
    gone away since, before they raise StoreAway.

    `sqlite:///PATH`: the text after the third slash is the path, literally (an absolute one makes it four slashes).
    `postgresql://...`: see postgres.py. clock: seconds since the epoch; tests pass their own. Raises ConfigError for a URL that
    names no store or whose driver is missing, StoreError for a file or server that cannot be used."""
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in _ENGINES:
        raise ConfigError(f"unknown store {scheme or url!r}; known: {', '.join(_KNOWN)}")
    return await asyncio.to_thread(lambda: SqlStore(_ENGINES[scheme](url, read_only), clock, patience_s=patience_s))


def _sqlite(url: str, read_only: bool) -> Engine:
    rest = url.partition("://")[2]
    path = rest.removeprefix("/")
    if not rest.startswith("/") or not path or path == ":memory:":
        raise ConfigError(f"store URL {url!r} names no file; write sqlite:///PATH")
    return SqliteEngine(Path(path), read_only=read_only)


def _postgres(url: str, read_only: bool) -> Engine:
    try:
        from areal.store.postgres import PostgresEngine
    except ImportError as error:
        raise ConfigError(
            f"a Postgres store needs the psycopg driver ({error}): pip install 'areal[postgres]'"
        ) from error
    return PostgresEngine(url, read_only=read_only)


_ENGINES: dict[str, Callable[[str, bool], Engine]] = {"sqlite": _sqlite, "postgresql": _postgres, "postgres": _postgres}
_KNOWN = ("sqlite:///PATH", "postgresql://USER@HOST/DATABASE")
