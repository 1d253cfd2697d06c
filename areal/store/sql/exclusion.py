"""Keeping a session that has ended out of training, and forgetting what it said (settled 18), inside a transaction.

    exclude(connection, session_id, because, now, delete=False)     # Conflict once a step has it
    forget_again(connection, lost_groups, now)                      # groups are handed back: deleted sessions stay out

A step owns its groups from `take` to `advance` (training.py): until it does, an exclusion takes its session out, and from then
on it is refused, so what was trained is never counted as dropped. Deletion is never refused: the recordings (messages, token ids,
log-probs) go at once, the facts that the sums are made of stay. If the step is lost in a crash, nothing is left to train on, and
the session counts as excluded. Used by sessions.py and training.py.
"""

from __future__ import annotations

from areal.base.errors import Conflict
from areal.store.sql import groups
from areal.store.sql.engine import Connection, Row

_STATE = (
    "SELECT s.seq, s.group_seq, s.drop_reason, g.taken_step, g.consumed_step "
    "FROM sessions s LEFT JOIN task_groups g ON g.seq = s.group_seq WHERE s.id = ?"
)


def exclude(connection: Connection, session_id: str, because: str, now: float, *, delete: bool) -> None:
    """Of a session that has ended. delete: remove its content too, whatever became of it."""
    row = connection.execute(_STATE, (session_id,)).fetchone()
    too_late = None if row["drop_reason"] is not None else _step_that_has_it(row)
    if too_late is None:
        _leave_out(connection, row["seq"], row["group_seq"], now)
    elif not delete:
        raise Conflict(
            f"session {session_id!r} {too_late}; it cannot be excluded any more (delete: true still removes its content)"
        )
    if because:
        connection.execute("UPDATE sessions SET excluded_because = ? WHERE seq = ?", (because, row["seq"]))
    if delete:
        _delete_content(connection, row["seq"], now)


def forget_again(connection: Connection, lost_groups: list[int], now: float) -> None:
    """Groups that wait again after their step was lost: their deleted sessions have nothing left to train on."""
    for group_seq in lost_groups:
        deleted = connection.execute(
            "SELECT seq FROM sessions WHERE group_seq = ? AND deleted_at IS NOT NULL AND drop_reason IS NULL",
            (group_seq,),
        )
        for row in deleted.fetchall():
            _leave_out(connection, row["seq"], group_seq, now)


def _step_that_has_it(row: Row) -> str | None:
    if row["consumed_step"] is not None:
        return f"was trained at step {row['consumed_step']}"
    return None if row["taken_step"] is None else f"is being trained by step {row['taken_step']}"


def _leave_out(connection: Connection, session_seq: int, group_seq: int | None, now: float) -> None:
    if group_seq is None:
        return  # an evaluation is never a candidate
    connection.execute(
        "UPDATE sessions SET drop_reason = coalesce(drop_reason, 'excluded'), awaits_reward_since = NULL WHERE seq = ?",
        (session_seq,),
    )
    groups.forget_accounts(connection, "session_seq = ?", session_seq)
    groups.settle_again(connection, group_seq, now)


def _delete_content(connection: Connection, session_seq: int, now: float) -> None:
    connection.execute(
        "DELETE FROM recordings WHERE seq IN (SELECT seq FROM interactions WHERE session_seq = ?)", (session_seq,)
    )
    # Tags may name a person. Nothing is left to reward an evaluation for either.
    connection.execute(
        "UPDATE sessions SET deleted_at = coalesce(deleted_at, ?), tags = '{}', awaits_reward_since = NULL WHERE seq = ?",
        (now, session_seq),
    )
