"""Groups inside a transaction: opening one under the capacity law, and settling one when its sessions have ended.

    group = join(connection, task_id, limits, now)     # an open group of this task, else a new one, else NoCapacity
    settle(connection, group_seq, now)                 # after a session of it ended
    settle_overdue(connection, now)                    # groups past their deadline

A group of n runs until n sessions have begun and all have ended and have their reward. Past its deadline it takes no new session and
waits no longer for stragglers if enough good sessions have ended; with too few it still waits for those that run (each has its idle
time-out), then it is dropped. It always waits for rewards: what ended in time is not lost to a slow judge. Plain functions on a connection that holds the write lock; sessions.py and training.py call them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from areal.base.errors import AdmissionHeld, NoCapacity, Unavailable
from areal.base.types import Limits, Purpose
from areal.store.admission import survivors_needed, tightest
from areal.store.base import Given
from areal.store.codec import from_json
from areal.store.sql.engine import Connection, Row

RUNNING = "accepted_at IS NULL AND dropped_at IS NULL"
WAITING = "accepted_at IS NOT NULL AND consumed_step IS NULL AND dropped_at IS NULL"
LAST_ATTEMPT = "SELECT max(last_attempt) FROM task_groups WHERE task_id = ? AND dropped_at IS NULL"
TOO_FEW = "too_few_survivors"
INTERRUPTED = "interrupted"  # a session whose agent ended with the run's processes: its place is free again
MEMBERS = "session_seq IN (SELECT seq FROM sessions WHERE group_seq = ?)"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a new session stands: its group's row number, its sample within it, its place among the tries of its task."""

    group_seq: int
    sample: int
    attempt: int


def read_limits(connection: Connection) -> Limits | None:
    row = connection.execute("SELECT value FROM settings WHERE name = 'limits'").fetchone()
    return None if row is None else from_json(row["value"], Limits)


def open_limits(connection: Connection, purpose: Purpose) -> Limits:
    """The published limits. Raises Unavailable before there are any, and while the run drains: then only evaluation,
    which the run itself asks for at its end, still starts."""
    limits = read_limits(connection)
    if limits is None:
        raise Unavailable(
            "the run has not opened for sessions yet: its trainer is still starting; retry in a few seconds"
        )
    if not limits.accepting and purpose == "train":
        raise Unavailable("the run is draining and takes no new sessions; start it again or use another one")
    return limits


def occupancy(connection: Connection) -> tuple[int, int]:
    """(running, accepted and waiting) groups."""
    running = connection.execute(f"SELECT count(*) FROM task_groups WHERE {RUNNING}").fetchone()[0]
    waiting = connection.execute(f"SELECT count(*) FROM task_groups WHERE {WAITING}").fetchone()[0]
    return int(running), int(waiting)


def join(connection: Connection, task_id: str, limits: Limits, now: float) -> Place:
    """The next free sample of this task's newest group if that still fills, else sample 0 of a new group."""
    newest = connection.execute(
        f"SELECT seq, n_samples FROM task_groups WHERE task_id = ? AND {RUNNING} AND deadline > ? ORDER BY seq DESC LIMIT 1",
        (task_id, now),
    ).fetchone()
    if newest is not None:
        taken = {row["sample"] for row in _members(connection, newest["seq"])}
        free = next((sample for sample in range(newest["n_samples"]) if sample not in taken), None)
        if free is not None:
            attempt = _attempt(connection, task_id, newest["seq"], free)
            connection.execute(
                "UPDATE task_groups SET last_attempt = ? WHERE seq = ? AND last_attempt < ?",
                (attempt, newest["seq"], attempt),
            )
            return Place(newest["seq"], free, attempt)
    if limits.held:
        raise AdmissionHeld(limits.held)
    bound = tightest(limits, *occupancy(connection))
    if bound.free <= 0:
        raise NoCapacity(bound.used, bound.limit)
    attempt = _next_attempt(connection, task_id)
    opened = connection.execute(
        "INSERT INTO task_groups (task_id, n_samples, opened_at, deadline, last_attempt) VALUES (?, ?, ?, ?, ?) RETURNING seq",
        (task_id, limits.n_samples, now, now + limits.group_timeout_s, attempt),
    )
    return Place(opened.fetchone()["seq"], 0, attempt)


def _attempt(connection: Connection, task_id: str, group_seq: int, sample: int) -> int:
    """How many tries of this task came before: a client that trains on one task id again and again must not be sampled the
    same tokens each time, and a try that comes again in the place of a dropped or an interrupted one (a resume) must be."""
    before = connection.execute(
        f"SELECT attempt FROM sessions WHERE group_seq = ? AND sample = ? AND drop_reason = '{INTERRUPTED}' LIMIT 1",
        (group_seq, sample),
    ).fetchone()
    return int(before["attempt"]) if before is not None else _next_attempt(connection, task_id)


def _next_attempt(connection: Connection, task_id: str) -> int:
    last = connection.execute(LAST_ATTEMPT, (task_id,)).fetchone()[0]
    return 0 if last is None else int(last) + 1


def settle(connection: Connection, group_seq: int, now: float) -> None:
    """Accept or drop the group if nothing is left to wait for. A group that is settled already stays as it is."""
    group = standing(connection, group_seq, now)
    if group is None or not group.closed or group.awaiting:
        return
    if group.enough:
        connection.execute("UPDATE task_groups SET accepted_at = ? WHERE seq = ?", (now, group_seq))
    else:
        drop(connection, group_seq, _why_too_few(connection, group_seq), now)


@dataclass(frozen=True, slots=True)
class Standing:
    """A running group: how many of its sessions wait for their reward, whether no other session will be waited for (it is filled and none
    runs, or its time is up), and whether enough ended well to train on."""

    awaiting: int
    closed: bool
    enough: bool


def standing(connection: Connection, group_seq: int, now: float) -> Standing | None:
    """None for a group that does not run (any more)."""
    group = connection.execute(
        f"SELECT n_samples, deadline FROM task_groups WHERE seq = ? AND {RUNNING}", (group_seq,)
    ).fetchone()
    if group is None:
        return None
    live, kept, awaiting = connection.execute(
        "SELECT count(*) FILTER (WHERE ending IS NULL), count(*) FILTER (WHERE ending IS NOT NULL AND drop_reason IS NULL), "
        "count(awaits_reward_since) FROM sessions WHERE group_seq = ?",
        (group_seq,),
    ).fetchone()
    enough = kept >= survivors_needed(group["n_samples"])
    overdue = group["deadline"] <= now
    filled = len(_members(connection, group_seq)) >= group["n_samples"]
    closed = (overdue or filled) and (not live or (overdue and enough))
    return Standing(awaiting, closed, enough)


def settle_again(connection: Connection, group_seq: int, now: float) -> None:
    """After a session that had ended well was taken out: a waiting group with too few left is dropped."""
    settle(connection, group_seq, now)
    waiting = connection.execute(
        f"SELECT n_samples, (SELECT count(*) FROM sessions WHERE group_seq = g.seq AND ending IS NOT NULL "
        f"AND drop_reason IS NULL) AS kept FROM task_groups g WHERE seq = ? AND {WAITING}",
        (group_seq,),
    ).fetchone()
    if waiting is not None and waiting["kept"] < survivors_needed(waiting["n_samples"]):
        drop(connection, group_seq, _why_too_few(connection, group_seq), now)


def settle_overdue(connection: Connection, now: float) -> None:
    for row in overdue(connection, now):
        settle(connection, row, now)


def overdue(connection: Connection, now: float) -> list[int]:
    """Running groups past their deadline, but for those that wait for rewards: these settle them."""
    rows = connection.execute(
        f"SELECT seq FROM task_groups WHERE {RUNNING} AND deadline <= ? AND NOT EXISTS (SELECT 1 FROM sessions s "
        "WHERE s.group_seq = task_groups.seq AND s.awaits_reward_since IS NOT NULL) ORDER BY deadline",
        (now,),
    )
    return [row["seq"] for row in rows.fetchall()]


def forget_accounts(connection: Connection, which: str, number: int) -> None:
    """The step that wrote them does not train what they are about."""
    connection.execute(f"DELETE FROM token_accounts WHERE {which}", (number,))


def drop(connection: Connection, group_seq: int, reason: str, now: float) -> None:
    forget_accounts(connection, MEMBERS, group_seq)
    connection.execute("UPDATE task_groups SET dropped_at = ?, drop_reason = ? WHERE seq = ?", (now, reason, group_seq))


def interrupt(connection: Connection, comes_again: Callable[[str], bool], now: float) -> dict[str, Given]:
    """See TrainingStore.interrupt."""
    connection.execute(
        f"UPDATE sessions SET ending = 'expired', ended_at = ?, drop_reason = '{INTERRUPTED}' WHERE ending IS NULL "
        f"AND group_seq IN (SELECT seq FROM task_groups WHERE {RUNNING})",
        (now,),
    )
    limits = read_limits(connection)
    rows = connection.execute(f"SELECT seq, task_id, deadline FROM task_groups WHERE {RUNNING}").fetchall()
    connection.executemany(
        "UPDATE task_groups SET deadline = ? WHERE seq = ?",
        [(now + limits.group_timeout_s if comes_again(row["task_id"]) and limits else now, row["seq"]) for row in rows],
    )
    settle_overdue(connection, now)
    return _given(connection)


def _given(connection: Connection) -> dict[str, Given]:
    rows = connection.execute(
        f"SELECT g.task_id, count(*) AS number, coalesce(sum(g.n_samples - (SELECT count(*) FROM sessions s WHERE "
        f"s.group_seq = g.seq AND coalesce(s.drop_reason, '') <> '{INTERRUPTED}')) FILTER (WHERE {RUNNING}), 0) AS missing "
        "FROM task_groups g GROUP BY g.task_id"
    )
    return {row["task_id"]: Given(int(row["number"]), int(row["missing"])) for row in rows.fetchall()}


def _members(connection: Connection, group_seq: int) -> list[Row]:
    """Its sessions, but for those that were interrupted."""
    return connection.execute(
        f"SELECT sample FROM sessions WHERE group_seq = ? AND coalesce(drop_reason, '') <> '{INTERRUPTED}'",
        (group_seq,),
    ).fetchall()


def _why_too_few(connection: Connection, group_seq: int) -> str:
    """The one reason all its sessions failed for, else that too few are left."""
    rows = connection.execute(
        "SELECT DISTINCT coalesce(drop_reason, '') AS reason FROM sessions WHERE group_seq = ?", (group_seq,)
    )
    reasons = [row["reason"] for row in rows.fetchall()]
    return reasons[0] if len(reasons) == 1 and reasons[0] else TOO_FEW
