"""What the controller reads and decides (`TrainingStore`).

A step owns its groups from `take` to `advance`; consumption is written together with the version whose step trained it, so a crash
between the two cannot exist. All counts are derived (counts.py).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from areal.base.errors import Conflict, NotFound
from areal.base.types import Counts, Limits, Session, Share, Version
from areal.store import codec
from areal.store.admission import check_limits
from areal.store.balance import check_shares
from areal.store.base import EndedGroup, Given, OpenGroup
from areal.store.sql import counts, exclusion, groups
from areal.store.sql.database import Database, Operation
from areal.store.sql.engine import Connection, Row
from areal.store.sql.sessions import SESSION, group_id, to_session

T = TypeVar("T")


class SqlTraining:
    """TrainingStore. `clock` returns seconds since the epoch."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    async def _write(self, operation: Operation[T]) -> T:
        # The controller alone writes here, and there is nobody who would try again: a full disk must not end a run.
        return await self._database.write(operation, patience_s=math.inf)

    async def set_limits(self, limits: Limits) -> None:
        check_limits(limits)

        def publish(connection: Connection) -> None:
            connection.execute(
                "INSERT INTO settings (name, value) VALUES ('limits', ?) "
                "ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                (codec.to_json(limits),),
            )

        await self._write(publish)

    async def limits(self) -> Limits | None:
        return await self._database.read(groups.read_limits)

    async def ready(self) -> tuple[EndedGroup, ...]:
        if await self._database.read(lambda connection: groups.overdue(connection, self._clock())):
            await self._write(lambda connection: groups.settle_overdue(connection, self._clock()))
        return await self._database.read(lambda connection: ended_groups(connection, _READY))

    async def take(self, version: Version, sessions: Mapping[str, Collection[str]]) -> bool:
        return await self._write(lambda connection: _take(connection, version, sessions, self._clock()))

    async def advance(self, version: Version, consumed: Sequence[str]) -> None:
        await self._write(lambda connection: _advance(connection, version, consumed))

    async def drop(self, group_ids: Sequence[str], reason: str) -> None:
        await self._write(lambda connection: _drop(connection, group_ids, reason, self._clock()))

    async def account(self, session_id: str, shares: Mapping[str, Share]) -> None:
        await self._write(lambda connection: _account(connection, session_id, shares))

    async def version(self, label: int | None = None) -> Version | None:
        if label is None:
            return await self._database.read(_current_version)
        return await self._database.read(lambda connection: _version(connection, label))

    async def release_after(self, step: int, incarnation: str) -> int:
        return await self._write(lambda connection: _release_after(connection, step, incarnation, self._clock()))

    async def interrupt(self, comes_again: Callable[[str], bool] = lambda task_id: True) -> dict[str, Given]:
        return await self._write(lambda connection: groups.interrupt(connection, comes_again, self._clock()))

    async def occupancy(self) -> tuple[tuple[OpenGroup, ...], int]:
        return await self._database.read(_occupancy)

    async def counts(self) -> Counts:
        return await self._database.read(counts.read)


# -- inside the transaction ------------------------------------------------------------------------


_READY = f"{groups.WAITING} AND taken_step IS NULL"
_SERVED = """
SELECT v.label, v.step, v.incarnation FROM versions v
WHERE EXISTS (SELECT 1 FROM task_groups g WHERE g.consumed_step = v.step AND g.consumed_incarnation = v.incarnation)
    OR NOT EXISTS (SELECT 1 FROM versions w WHERE w.incarnation = v.incarnation AND w.label < v.label)
ORDER BY v.label DESC LIMIT 1
"""


def ended_groups(connection: Connection, which: str, *values: object) -> tuple[EndedGroup, ...]:
    """The groups that a condition names, with the sessions of them that ended well."""
    members: dict[int, list[Session]] = defaultdict(list)
    rows = connection.execute(
        f"{SESSION} WHERE s.group_seq IN (SELECT seq FROM task_groups WHERE {which}) "
        "AND s.ending IS NOT NULL AND s.drop_reason IS NULL ORDER BY s.group_seq, s.sample",
        values,
    )
    for row in rows.fetchall():
        members[row["group_seq"]].append(to_session(row))
    found = connection.execute(f"SELECT * FROM task_groups WHERE {which} ORDER BY seq", values)
    return tuple(
        EndedGroup(group_id(row["seq"]), row["task_id"], tuple(members[row["seq"]]), row["accepted_at"])
        for row in found.fetchall()
    )


def _occupancy(connection: Connection) -> tuple[tuple[OpenGroup, ...], int]:
    rows = connection.execute(f"SELECT seq, task_id FROM task_groups WHERE {groups.RUNNING} ORDER BY seq").fetchall()
    accepted = connection.execute(f"SELECT count(*) FROM task_groups WHERE {groups.WAITING}").fetchone()[0]
    return tuple(OpenGroup(group_id(row["seq"]), row["task_id"]) for row in rows), int(accepted)


def _take(connection: Connection, version: Version, sessions: Mapping[str, Collection[str]], now: float) -> bool:
    held = connection.execute("SELECT seq FROM task_groups WHERE taken_step IS NOT NULL").fetchall()
    rows = {row["seq"]: sessions[group_id(row["seq"])] for row in _groups(connection, list(sessions))}
    connection.execute(
        "UPDATE task_groups SET taken_step = NULL, taken_incarnation = NULL WHERE taken_step IS NOT NULL"
    )
    exclusion.forget_again(connection, [row["seq"] for row in held], now)
    found: dict[int, set[str]] = {seq: set() for seq in rows}
    for seq in rows:
        members = connection.execute(
            f"SELECT s.id FROM task_groups g JOIN sessions s ON s.group_seq = g.seq WHERE g.seq = ? AND {groups.WAITING} "
            "AND s.ending IS NOT NULL AND s.drop_reason IS NULL",
            (seq,),
        )
        found[seq] |= {row["id"] for row in members.fetchall()}
    if any(found[seq] != set(wanted) for seq, wanted in rows.items()):
        return False
    connection.executemany(
        "UPDATE task_groups SET taken_step = ?, taken_incarnation = ? WHERE seq = ?",
        [(version.step, version.incarnation, seq) for seq in rows],
    )
    return True


def _advance(connection: Connection, version: Version, consumed: Sequence[str]) -> None:
    known = _version(connection, version.label)
    newest = _current_version(connection)
    if known is None and newest is not None and newest.label > version.label:
        raise Conflict(f"version label {version.label} is below the newest one, {newest.label}; labels only grow")
    if known is not None and known != version:
        raise Conflict(
            f"version label {version.label} already stands for step {known.step} of {known.incarnation!r}; "
            "labels are never reused: take the next one"
        )
    connection.execute(
        "INSERT INTO versions (label, step, incarnation) VALUES (?, ?, ?) ON CONFLICT (label) DO NOTHING",
        (version.label, version.step, version.incarnation),
    )
    for row in _groups(connection, consumed):
        mine = (row["consumed_step"], row["consumed_incarnation"]) == (version.step, version.incarnation)
        if mine:
            continue  # the same call again, its answer was lost
        if row["accepted_at"] is None or row["dropped_at"] is not None or row["consumed_step"] is not None:
            raise Conflict(f"group {group_id(row['seq'])} is {_state(row)}; only an accepted group can be consumed")
        connection.execute(
            "UPDATE task_groups SET consumed_step = ?, consumed_incarnation = ?, taken_step = NULL, taken_incarnation = NULL "
            "WHERE seq = ?",
            (version.step, version.incarnation, row["seq"]),
        )


def _drop(connection: Connection, group_ids: Sequence[str], reason: str, now: float) -> None:
    for row in _groups(connection, group_ids):
        if row["consumed_step"] is not None:
            raise Conflict(f"group {group_id(row['seq'])} is {_state(row)}; it cannot be dropped any more")
        if row["dropped_at"] is None:
            groups.drop(connection, row["seq"], reason, now)


def _account(connection: Connection, session_id: str, shares: Mapping[str, Share]) -> None:
    session = connection.execute(
        "SELECT s.seq, s.drop_reason, g.dropped_at FROM sessions s JOIN task_groups g ON g.seq = s.group_seq WHERE s.id = ?",
        (session_id,),
    ).fetchone()
    if session is None:
        raise NotFound(f"no training session {session_id!r} to account for")
    recorded = connection.execute(
        "SELECT coalesce(sum(output_tokens), 0), count(*) FROM interactions WHERE session_seq = ?", (session["seq"],)
    ).fetchone()
    check_shares(session_id, Share(*recorded), shares)
    if session["drop_reason"] is not None or session["dropped_at"] is not None:
        return  # all its tokens are counted as dropped
    groups.forget_accounts(connection, "session_seq = ?", session["seq"])
    connection.executemany(
        "INSERT INTO token_accounts (session_seq, reason, tokens, interactions) VALUES (?, ?, ?, ?)",
        [(session["seq"], reason, share.tokens, share.interactions) for reason, share in shares.items()],
    )


def _release_after(connection: Connection, step: int, incarnation: str, now: float) -> int:
    lost = "consumed_step > ? AND consumed_incarnation <> ?"
    left = "taken_step IS NOT NULL AND taken_incarnation <> ?"
    handed_back = [
        row["seq"]
        for where, values in ((lost, (step, incarnation)), (left, (incarnation,)))
        for row in connection.execute(f"SELECT seq FROM task_groups WHERE {where}", values).fetchall()
    ]
    for seq in handed_back:
        groups.forget_accounts(connection, groups.MEMBERS, seq)
    released = connection.execute(
        f"UPDATE task_groups SET consumed_step = NULL, consumed_incarnation = NULL WHERE {lost}", (step, incarnation)
    )
    connection.execute(
        f"UPDATE task_groups SET taken_step = NULL, taken_incarnation = NULL WHERE {left}", (incarnation,)
    )
    exclusion.forget_again(connection, handed_back, now)
    return released.rowcount


def _version(connection: Connection, label: int) -> Version | None:
    row = connection.execute("SELECT * FROM versions WHERE label = ?", (label,)).fetchone()
    return None if row is None else Version(row["label"], row["step"], row["incarnation"])


def _current_version(connection: Connection) -> Version | None:
    row = connection.execute("SELECT * FROM versions WHERE label = (SELECT max(label) FROM versions)").fetchone()
    return None if row is None else Version(row["label"], row["step"], row["incarnation"])


def served_version(connection: Connection) -> Version | None:
    """See Reading.served. A step has groups, and consumes them with the row of its version; the version that a life begins with has none."""
    row = connection.execute(_SERVED).fetchone()
    return None if row is None else Version(row["label"], row["step"], row["incarnation"])


def _groups(connection: Connection, group_ids: Sequence[str]) -> list[Row]:
    rows = []
    for name in group_ids:
        number = int(name[1:]) if re.fullmatch(r"g\d{1,18}", name, re.ASCII) else 0
        row = connection.execute("SELECT * FROM task_groups WHERE seq = ?", (number,)).fetchone()
        if row is None:
            raise NotFound(f"no group {name!r}; use the ids that ready() returned")
        rows.append(row)
    return rows


def _state(group: Row) -> str:
    if group["dropped_at"] is not None:
        return f"dropped ({group['drop_reason']})"
    if group["consumed_step"] is not None:
        return f"consumed by step {group['consumed_step']} of {group['consumed_incarnation']!r}"
    return "still running"
