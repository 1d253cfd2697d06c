"""Every count of a run, derived from its rows in one snapshot.

    counts = read(connection)
    counts.recorded_tokens == counts.trained_tokens + counts.masked_tokens + counts.dropped_tokens + pending

Tokens are those of training sessions; evaluation is counted nowhere here. A token is dropped when its session or its group was
dropped (a dropped session has no account), trained or masked when its group was consumed and it was accounted for, pending
until then.
"""

from __future__ import annotations

from areal.base.types import Counts
from areal.store.admission import free_groups
from areal.store.sql import groups
from areal.store.sql.engine import Connection

# Sums over everything are taken from the narrowest rows there are (a covering index, the accounts); what does not belong
# is found by index and subtracted, because it is little: evaluation, and groups that are not consumed yet.
_DROPPED_TOKENS = """
SELECT coalesce(sum(i.output_tokens), 0) FROM interactions i WHERE i.session_seq IN (
    SELECT seq FROM sessions WHERE drop_reason IS NOT NULL
    UNION
    SELECT s.seq FROM task_groups g JOIN sessions s ON s.group_seq = g.seq WHERE g.dropped_at IS NOT NULL
)
"""
_RECORDED_TOKENS = """
SELECT coalesce(sum(output_tokens), 0) - (
    SELECT coalesce(sum(i.output_tokens), 0)
    FROM sessions s JOIN interactions i ON i.session_seq = s.seq WHERE s.group_seq IS NULL
) FROM interactions
"""
_TRAINED, _MASKED = "sum(tokens) FILTER (WHERE reason = '')", "sum(tokens) FILTER (WHERE reason <> '')"
_ACCOUNTED_TOKENS = f"SELECT coalesce({_TRAINED}, 0), coalesce({_MASKED}, 0) FROM token_accounts"
_NOT_CONSUMED_YET = f"""
{_ACCOUNTED_TOKENS} WHERE session_seq IN (
    SELECT s.seq FROM task_groups g JOIN sessions s ON s.group_seq = g.seq WHERE {groups.RUNNING}
    UNION ALL
    SELECT s.seq FROM task_groups g JOIN sessions s ON s.group_seq = g.seq WHERE {groups.WAITING}
)
"""


def read(connection: Connection) -> Counts:
    """All counts on one snapshot."""
    running, waiting = groups.occupancy(connection)
    limits = groups.read_limits(connection)
    dropped = connection.execute(
        "SELECT drop_reason, count(*) FROM task_groups WHERE dropped_at IS NOT NULL GROUP BY drop_reason"
    )
    trained, masked = connection.execute(_ACCOUNTED_TOKENS).fetchone()
    trained_early, masked_early = connection.execute(_NOT_CONSUMED_YET).fetchone()
    return Counts(
        running=running,
        accepted=waiting,
        consumed=_number(connection, "SELECT count(*) FROM task_groups WHERE consumed_step IS NOT NULL"),
        dropped=dict(dropped.fetchall()),
        running_sessions=_number(connection, "SELECT count(*) FROM sessions WHERE ending IS NULL"),
        awaiting_reward=_number(
            connection,
            "SELECT count(*) FROM sessions WHERE awaits_reward_since IS NOT NULL AND group_seq IS NOT NULL",
        ),
        free_slots=free_groups(limits, running, waiting) if limits is not None else 0,
        recorded_tokens=_number(connection, _RECORDED_TOKENS),
        trained_tokens=trained - trained_early,
        masked_tokens=masked - masked_early,
        dropped_tokens=_number(connection, _DROPPED_TOKENS),
    )


def _number(connection: Connection, query: str) -> int:
    return int(connection.execute(query).fetchone()[0])
