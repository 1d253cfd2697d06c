"""Lists and sums for people (`Reading`): dashboard, status and export look here; nothing here is on a request's path."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import groupby

from areal.base.types import Share, Version
from areal.store import codec
from areal.store.balance import Balance, Line, balance
from areal.store.base import EndedGroup, Finished, Loss, SessionSummary
from areal.store.sql import counts
from areal.store.sql.database import Database
from areal.store.sql.engine import Connection, Row
from areal.store.sql.sessions import SESSION, group_id, to_session
from areal.store.sql.training import ended_groups, served_version

_SUMMARY = SESSION.replace(
    "SELECT s.*,",
    """SELECT s.*,
    (SELECT coalesce(sum(output_tokens), 0) FROM interactions i WHERE i.session_seq = s.seq) AS recorded,
    (SELECT sum(reward) FROM interactions i WHERE i.session_seq = s.seq) AS total_reward,
    g.accepted_at AS group_accepted_at, g.drop_reason AS group_drop_reason, g.consumed_step AS group_step,
    g.taken_step AS taken_step,""",
).replace("FROM sessions s", "FROM sessions s LEFT JOIN task_groups g ON g.seq = s.group_seq")
_ACCOUNTS = "SELECT session_seq, reason, tokens FROM token_accounts WHERE session_seq IN"

_LINES = """
SELECT s.id, s.group_seq, s.ending, s.drop_reason, s.awaits_reward_since, g.accepted_at, g.consumed_step, g.drop_reason AS group_drop_reason, v.label,
    coalesce(i.interactions, 0) AS interactions, coalesce(i.tokens, 0) AS tokens, coalesce(i.rewards, 0) AS rewards,
    a.reason, a.tokens AS share_tokens, a.interactions AS share_interactions
FROM sessions s LEFT JOIN task_groups g ON g.seq = s.group_seq
LEFT JOIN versions v ON v.step = g.consumed_step AND v.incarnation = g.consumed_incarnation
LEFT JOIN (
    SELECT session_seq, count(*) AS interactions, sum(output_tokens) AS tokens, count(reward) AS rewards
    FROM interactions GROUP BY session_seq
) i ON i.session_seq = s.seq
LEFT JOIN token_accounts a ON a.session_seq = s.seq
ORDER BY s.group_seq, s.sample, s.seq
"""

_LOSSES = """
SELECT task_id, reason, count(DISTINCT dropped_group) AS lost_groups, count(*) AS lost_sessions, sum(tokens) AS lost_tokens FROM (
    SELECT s.task_id, coalesce(g.drop_reason, s.drop_reason) AS reason,
        CASE WHEN g.dropped_at IS NOT NULL THEN g.seq END AS dropped_group,
        (SELECT coalesce(sum(output_tokens), 0) FROM interactions i WHERE i.session_seq = s.seq) AS tokens
    FROM (
        SELECT seq FROM sessions WHERE drop_reason IS NOT NULL
        UNION
        SELECT s.seq FROM task_groups g JOIN sessions s ON s.group_seq = g.seq WHERE g.dropped_at IS NOT NULL
    ) AS lost JOIN sessions s ON s.seq = lost.seq JOIN task_groups g ON g.seq = s.group_seq
    UNION ALL
    SELECT s.task_id, a.reason, NULL, a.tokens
    FROM token_accounts a JOIN sessions s ON s.seq = a.session_seq JOIN task_groups g ON g.seq = s.group_seq
    WHERE a.reason = 'stale' AND g.consumed_step IS NOT NULL
) AS losses GROUP BY task_id, reason ORDER BY lost_tokens DESC, lost_sessions DESC, task_id, reason LIMIT ?
"""


class SqlReading:
    """Reading."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def recent(self, limit: int = 100, *, running: bool | None = None) -> tuple[SessionSummary, ...]:
        where = {None: "s.seq > 0", True: "s.ending IS NULL", False: "s.ending IS NOT NULL"}[running]
        return await self._database.read(
            lambda connection: _summaries(connection, f"WHERE {where} ORDER BY s.seq DESC LIMIT ?", limit)
        )

    async def session(self, session_id: str) -> SessionSummary | None:
        found = await self._database.read(lambda connection: _summaries(connection, "WHERE s.id = ?", session_id))
        return found[0] if found else None

    async def walk(self, after: str = "", limit: int = 100) -> tuple[SessionSummary, ...]:
        next_ones = "WHERE s.seq > coalesce((SELECT seq FROM sessions WHERE id = ?), 0) ORDER BY s.seq LIMIT ?"
        return await self._database.read(lambda connection: _summaries(connection, next_ones, after, limit))

    async def tagged(self, tags: Mapping[str, str]) -> tuple[str, ...]:
        wanted = tags.items()

        def read(connection: Connection) -> tuple[str, ...]:
            rows = connection.execute("SELECT id, tags FROM sessions WHERE tags <> '{}' ORDER BY seq")
            return tuple(row["id"] for row in rows if wanted <= codec.from_json(row["tags"], dict[str, str]).items())

        return await self._database.read(read) if tags else ()

    async def dropped_sessions(self) -> dict[str, int]:
        return await self._database.read(
            lambda connection: _tally(
                connection,
                "SELECT drop_reason, count(*) FROM sessions WHERE drop_reason IS NOT NULL GROUP BY drop_reason",
            )
        )

    async def masked_tokens(self) -> dict[str, int]:
        return await self._database.read(
            lambda connection: _tally(
                connection,
                "SELECT a.reason, sum(a.tokens) FROM token_accounts a JOIN sessions s ON s.seq = a.session_seq "
                "JOIN task_groups g ON g.seq = s.group_seq WHERE a.reason <> '' AND g.consumed_step IS NOT NULL "
                "GROUP BY a.reason",
            )
        )

    async def consumed(self, version: Version) -> tuple[EndedGroup, ...]:
        which = "consumed_step = ? AND consumed_incarnation = ?"
        return await self._database.read(
            lambda connection: ended_groups(connection, which, version.step, version.incarnation)
        )

    async def balance(self) -> Balance:
        return await self._database.read(lambda connection: balance(_lines(connection), counts.read(connection)))

    async def losses(self, limit: int = 20) -> tuple[Loss, ...]:
        def read(connection: Connection) -> tuple[Loss, ...]:
            rows = connection.execute(_LOSSES, (limit,)).fetchall()
            return tuple(
                Loss(row["task_id"], row["reason"], row["lost_groups"], row["lost_sessions"], int(row["lost_tokens"]))
                for row in rows
            )

        return await self._database.read(read)

    async def finished(self, first: int, count: int) -> Finished:
        return await self._database.read(lambda connection: _finished(connection, first, count))

    async def served(self) -> Version | None:
        return await self._database.read(served_version)


def _lines(connection: Connection) -> Iterator[Line]:
    for _, rows in groupby(connection.execute(_LINES), key=lambda row: row["id"]):
        yield _line(list(rows))


def _line(rows: list[Row]) -> Line:
    """A session's rows: one for each share of its account, or one alone."""
    row = rows[0]
    return Line(
        session_id=row["id"],
        group_id="" if row["group_seq"] is None else group_id(row["group_seq"]),
        running=row["ending"] is None,
        accepted=row["accepted_at"] is not None,
        consumed_step=row["consumed_step"],
        version=row["label"],
        drop_reason=row["drop_reason"] or row["group_drop_reason"] or "",
        group_drop_reason=row["group_drop_reason"] or "",
        rewarded=row["rewards"] > 0,
        awaits_reward=row["awaits_reward_since"] is not None,
        recorded=Share(row["tokens"], row["interactions"]),
        account={
            each["reason"]: Share(each["share_tokens"], each["share_interactions"])
            for each in rows
            if each["reason"] is not None
        },
    )


def _finished(connection: Connection, first: int, count: int) -> Finished:
    sessions, tokens, reward = connection.execute(
        "SELECT count(*), coalesce(sum(tokens), 0), avg(reward) FILTER (WHERE drop_reason IS NULL) FROM ("
        "SELECT s.drop_reason, sum(i.output_tokens) AS tokens, coalesce(sum(i.reward), 0.0) AS reward "
        "FROM (SELECT seq FROM task_groups WHERE coalesce(accepted_at, dropped_at) IS NOT NULL "
        "ORDER BY coalesce(accepted_at, dropped_at), seq LIMIT ? OFFSET ?) g "
        "JOIN sessions s ON s.group_seq = g.seq LEFT JOIN interactions i ON i.session_seq = s.seq "
        "WHERE s.ending IS NOT NULL GROUP BY s.seq) AS ended",
        (count, first),
    ).fetchone()
    return Finished(sessions, tokens, reward)


def _summaries(connection: Connection, rest: str, *values: str | int) -> tuple[SessionSummary, ...]:
    rows = connection.execute(f"{_SUMMARY} {rest}", values).fetchall()
    accounts: dict[int, dict[str, int]] = defaultdict(dict)
    for row in connection.execute(f"{_ACCOUNTS} (SELECT s.seq FROM sessions s {rest})", values):
        accounts[row["session_seq"]][row["reason"]] = row["tokens"]
    return tuple(
        SessionSummary(
            session=to_session(row),
            recorded_tokens=row["recorded"],
            reward=row["total_reward"],
            fate=_fate(row) + (", content deleted" if row["deleted_at"] is not None else ""),
            drop_reason=_drop_reason(row),
            account=accounts[row["seq"]] if row["group_step"] is not None else {},
        )
        for row in rows
    )


def _fate(row: Row) -> str:
    if row["ending"] is None:
        return "running"
    if row["purpose"] == "eval":
        return "evaluation" if row["awaits_reward_since"] is None else "evaluation, waiting for its reward"
    dropped = _drop_reason(row)
    if dropped:
        return f"dropped ({dropped})"
    if row["group_step"] is not None:
        return f"trained at step {row['group_step']}"
    if row["taken_step"] is not None:
        return f"in step {row['taken_step']}"
    if row["awaits_reward_since"] is not None:
        return "waiting for its reward"
    return "accepted" if row["group_accepted_at"] is not None else "waiting for its group"


def _drop_reason(row: Row) -> str:
    """Of a session that has ended, or whose group was dropped while it ran."""
    return str(row["drop_reason"] or row["group_drop_reason"] or "")


def _tally(connection: Connection, query: str) -> dict[str, int]:
    return dict(connection.execute(query).fetchall())
