"""Interactions become rows of running sessions: the busiest writes of a run, many of them in one statement.

    add_all(connection, [addition, ...])     # Database.write(..., many=Many(add_all, addition)): those that share a commit
    add(connection, addition)                # one by itself: says why it cannot be, or that it was there already

A statement runs without the interpreter's lock, so while one inserts 32 rows the event loop is at work on the next 32; row by row the two
threads take the lock from each other at every statement. Values are bound by place, and nothing is asked back (no RETURNING), each of
which saves a tenth of an interaction's SQL. The functions run inside the transaction. Used by sessions.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

from areal.base.errors import Conflict, InvalidKey, NotFound
from areal.base.types import Interaction
from areal.store import codec
from areal.store.sql.database import OneByOne
from areal.store.sql.engine import Connection, Row

STILL_ACTIVE_S = 0.1  # a session that was active so short a time ago is not written down as active again
LARGEST = 32  # rows in a statement; a few sizes, powers of two, so that they stay compiled


@dataclass(frozen=True, slots=True)
class Addition:
    """A finished interaction as column values; now: seconds since the epoch."""

    session_id: str
    facts: dict[str, Any]
    recording: dict[str, Any]
    now: float

    @classmethod
    def of(cls, interaction: Interaction, now: float) -> Addition:
        return cls(interaction.session_id, *codec.encode(interaction), now)


def add(connection: Connection, addition: Addition) -> None:
    """Repeating it changes nothing. Raises NotFound, InvalidKey for a session that has ended, Conflict for another session's id."""
    if _add_some(connection, [addition]):
        return
    interaction_id = addition.facts["id"]
    known = connection.execute(
        "SELECT s.id FROM interactions i JOIN sessions s ON s.seq = i.session_seq WHERE i.id = ?", (interaction_id,)
    ).fetchone()
    if known is None:
        running(connection, addition.session_id)  # raises why not
    elif known["id"] != addition.session_id:
        raise Conflict(f"interaction id {interaction_id!r} belongs to session {known['id']!r}; ids are used once")


def add_all(connection: Connection, additions: Sequence[Addition]) -> None:
    """All of them. Raises OneByOne where any has to be looked at by itself; what was written of the others is to be undone then."""
    start = 0
    while start < len(additions):
        size = min(LARGEST, 1 << (len(additions) - start).bit_length() - 1)
        if not _add_some(connection, additions[start : start + size]):
            raise OneByOne
        start += size


def running(connection: Connection, session_id: str) -> Row:
    """The row of a running session; raises NotFound, or InvalidKey when it has ended."""
    row: Row | None = connection.execute("SELECT * FROM sessions WHERE id = ?", (session_id,)).fetchone()
    if row is None:
        raise NotFound(f"no session {session_id!r}; start one with POST /rl/start_session")
    if row["ending"] is not None:
        raise InvalidKey(f"session {session_id!r} has {row['ending']}; start a new one with POST /rl/start_session")
    return row


def touch(connection: Connection, session_seqs: Sequence[int], now: float) -> None:
    """These sessions are active now."""
    connection.execute(_touch_statement(len(session_seqs)), (now, now - STILL_ACTIVE_S, *session_seqs))


def _add_some(connection: Connection, additions: Sequence[Addition]) -> bool:
    """Whether all of them are in. False: a session of theirs does not run, or an id is taken; nothing was written of a single one then."""
    count = len(additions)
    found = connection.execute(_running_statement(count), [each.session_id for each in additions])
    seqs: dict[str, int] = {row["id"]: row["seq"] for row in found.fetchall()}
    if any(each.session_id not in seqs for each in additions):
        return False
    facts = chain.from_iterable((seqs[each.session_id], *each.facts.values()) for each in additions)
    if connection.execute(_facts_statement(count), tuple(facts)).rowcount != count:
        return False
    recordings = chain.from_iterable((each.facts["id"], *each.recording.values()) for each in additions)
    connection.execute(_recordings_statement(count), tuple(recordings))
    touch(connection, [seqs[each.session_id] for each in additions], max(each.now for each in additions))
    return True


@cache
def _running_statement(count: int) -> str:
    return f"SELECT id, seq FROM sessions WHERE ending IS NULL AND id IN ({_marks(count)})"


@cache
def _touch_statement(count: int) -> str:
    return f"UPDATE sessions SET last_active_at = ? WHERE last_active_at < ? AND seq IN ({_marks(count)})"


@cache
def _facts_statement(count: int) -> str:
    rows = ", ".join([f"({_marks(1 + len(codec.FACTS))})"] * count)
    return f"INSERT INTO interactions (session_seq, {', '.join(codec.FACTS)}) VALUES {rows} ON CONFLICT (id) DO NOTHING"


@cache
def _recordings_statement(count: int) -> str:
    row = f"((SELECT seq FROM interactions WHERE id = ?), {_marks(len(codec.RECORDING))})"
    return f"INSERT INTO recordings (seq, {', '.join(codec.RECORDING)}) VALUES {', '.join([row] * count)}"


def _marks(count: int) -> str:
    return ", ".join("?" * count)
