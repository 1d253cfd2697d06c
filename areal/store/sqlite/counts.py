"""Every count of a run, derived from its rows in one snapshot.

    counts = read(connection)
    counts.recorded_tokens == counts.trained_tokens + counts.masked_tokens + counts.dropped_tokens + pending

Tokens are those of training sessions; evaluation is counted nowhere here. A token is dropped when its session or its group was
dropped, trained or masked when the group was consumed and the session accounted for, pending until then.
"""

from __future__ import annotations

import sqlite3

from areal.base.types import Counts
from areal.store.admission import free_groups
from areal.store.sqlite import groups

# A fate per session, then one pass over the small rows of interactions (a covering index, no blob is read).
_DROPPED_TOKENS = """
SELECT coalesce(sum(i.output_tokens), 0) FROM interactions i WHERE i.session_seq IN (
    SELECT seq FROM sessions WHERE drop_reason IS NOT NULL
    UNION
    SELECT s.seq FROM task_groups g JOIN sessions s ON s.group_seq = g.seq WHERE g.dropped_at IS NOT NULL
)
"""
_RECORDED_TOKENS = """
SELECT coalesce(sum(i.output_tokens), 0)
FROM interactions i JOIN sessions s ON s.seq = i.session_seq WHERE s.group_seq IS NOT NULL
"""
_ACCOUNTED_TOKENS = """
SELECT coalesce(sum(a.tokens) FILTER (WHERE a.reason = ''), 0), coalesce(sum(a.tokens) FILTER (WHERE a.reason <> ''), 0)
FROM token_accounts a JOIN sessions s ON s.seq = a.session_seq JOIN task_groups g ON g.seq = s.group_seq
WHERE g.consumed_step IS NOT NULL AND s.drop_reason IS NULL
"""


def read(connection: sqlite3.Connection) -> Counts:
    """All counts on one snapshot."""
    running, waiting = groups.occupancy(connection)
    limits = groups.read_limits(connection)
    dropped = connection.execute(
        "SELECT drop_reason, count(*) FROM task_groups WHERE dropped_at IS NOT NULL GROUP BY drop_reason"
    )
    trained, masked = connection.execute(_ACCOUNTED_TOKENS).fetchone()
    return Counts(
        running=running,
        accepted=waiting,
        consumed=_number(connection, "SELECT count(*) FROM task_groups WHERE consumed_step IS NOT NULL"),
        dropped=dict(dropped.fetchall()),
        running_sessions=_number(connection, "SELECT count(*) FROM sessions WHERE ending IS NULL"),
        free_slots=free_groups(limits, running, waiting) if limits is not None else 0,
        recorded_tokens=_number(connection, _RECORDED_TOKENS),
        trained_tokens=trained,
        masked_tokens=masked,
        dropped_tokens=_number(connection, _DROPPED_TOKENS),
    )


def _number(connection: sqlite3.Connection, query: str) -> int:
    return int(connection.execute(query).fetchone()[0])
