"""The embedded store: one SQLite file that every process of a host opens (see database.py)."""

from __future__ import annotations

from areal.store.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
