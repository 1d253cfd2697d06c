"""Rewards that come after the end of a session, from the run's own reward source (`RewardStore`).

A session that ends well under `Limits.scored` without a reward waits (`sessions.awaits_reward_since`, set by the transaction that ends it);
its group runs until none of it waits. The rewards of one session, or of all that were judged together, are written by one transaction that
also settles their groups: after a crash each of them either waits still or is done, and what is done is not written again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from areal.base.errors import BadRequest
from areal.store.base import LARGEST_REWARD, Unrewarded
from areal.store.sql import groups
from areal.store.sql.database import Database
from areal.store.sql.engine import Connection, Row
from areal.store.sql.sessions import SESSION, pay, to_session

FAILED = "reward_failed"

Rewards = Mapping[str | None, float]


class SqlRewards:
    """RewardStore. `clock` returns seconds since the epoch."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    async def waiting(self) -> tuple[Unrewarded, ...]:
        return await self._database.read(lambda connection: _waiting(connection, self._clock()))

    async def write(self, verdicts: Mapping[str, Rewards | None]) -> tuple[str, ...]:
        for session_id, rewards in verdicts.items():
            for reward in (rewards or {}).values():
                if not abs(reward) <= LARGEST_REWARD:  # NaN is not either
                    raise BadRequest(
                        f"the reward of session {session_id!r} is {reward:g}; it must be a finite number from "
                        f"-{LARGEST_REWARD:g} to {LARGEST_REWARD:g}"
                    )
        # The controller alone writes here, and there is nobody who would try again: a full disk must not end a run.
        return await self._database.write(
            lambda connection: _write(connection, verdicts, self._clock()), patience_s=math.inf
        )


def _waiting(connection: Connection, now: float) -> tuple[Unrewarded, ...]:
    rows = connection.execute(
        f"{SESSION} WHERE s.awaits_reward_since IS NOT NULL ORDER BY s.awaits_reward_since, s.seq"
    ).fetchall()
    closed: dict[int | None, bool] = {None: True}
    for group_seq in {row["group_seq"] for row in rows} - {None}:
        group = groups.standing(connection, group_seq, now)
        closed[group_seq] = group is None or group.closed
    return tuple(Unrewarded(to_session(row), closed[row["group_seq"]]) for row in rows)


def _write(connection: Connection, verdicts: Mapping[str, Rewards | None], now: float) -> tuple[str, ...]:
    taken: dict[str, int | None] = {}
    for session_id, rewards in verdicts.items():
        row = connection.execute(
            "SELECT * FROM sessions WHERE id = ? AND awaits_reward_since IS NOT NULL", (session_id,)
        ).fetchone()
        if row is None:
            continue
        for interaction_id, reward in (rewards or {}).items():
            named = pay(connection, row, float(reward), interaction_id)
            if interaction_id is None and "#" in named:
                pay(connection, row, float(reward), named.partition("#")[0])
        connection.execute(
            "UPDATE sessions SET awaits_reward_since = NULL, drop_reason = ? WHERE seq = ?",
            (_why_dropped(row, rewards), row["seq"]),
        )
        taken[session_id] = row["group_seq"]
    for group_seq in dict.fromkeys(taken.values()):
        if group_seq is not None:
            groups.settle(connection, group_seq, now)
    return tuple(taken)


def _why_dropped(session: Row, rewards: Rewards | None) -> str | None:
    return FAILED if rewards is None and session["purpose"] == "train" else None  # never late: its group waits for it
