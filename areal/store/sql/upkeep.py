"""Retention: what was said in sessions that nothing can train any more is deleted when its time is up (`Upkeep`).

    await upkeep.forget(Retention(steps=100), safe_step=120)

Only content goes (messages, token ids, log-probs); sessions, interactions' facts, rewards, accounts and consumption stay, so every sum
holds. A session may lose its content once it has ended and is out of training's reach: trained by a step that every recovery state
holds, dropped, or an evaluation; what waits for its reward is still read. Portions of a few sessions per transaction, oldest first, so that nobody waits behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from areal.store.base import Retention
from areal.store.sql.database import Database
from areal.store.sql.engine import Connection
from areal.store.sql.training import served_version

PORTION = 50  # sessions per transaction

_OUT_OF_REACH = (
    "s.ending IS NOT NULL AND s.deleted_at IS NULL AND s.awaits_reward_since IS NULL AND (s.group_seq IS NULL OR s.drop_reason IS NOT NULL "
    "OR g.dropped_at IS NOT NULL OR g.consumed_step <= :safe)"
)
_DUE = "(g.consumed_step <= :step OR (g.consumed_step IS NULL AND s.ended_at <= :beside) OR s.ended_at <= :time)"
_FROM = "FROM sessions s LEFT JOIN task_groups g ON g.seq = s.group_seq"


class SqlUpkeep:
    """Upkeep. `clock` returns seconds since the epoch."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    async def forget(self, keep: Retention, safe_step: int) -> int:
        total = 0
        while count := await self._database.write(lambda connection: self._some(connection, keep, safe_step)):
            total += count
        if total:
            await self._database.scrub()
        return total

    def _some(self, connection: Connection, keep: Retention, safe_step: int) -> int:
        """One portion; 0 when nothing is due any more."""
        engine, now = self._database.engine, self._clock()
        too_large = keep.used_bytes is not None and engine.used_bytes(connection) > keep.used_bytes
        found = connection.execute(
            f"SELECT s.seq, {_DUE} AS due {_FROM} WHERE {_OUT_OF_REACH} AND ({_DUE} OR :too_large = 1) ORDER BY s.seq LIMIT {PORTION}",
            {**_cutoffs(connection, keep, safe_step, now), "too_large": int(too_large)},
        ).fetchall()
        count = 0
        for row in found:
            if not row["due"] and engine.used_bytes(connection) <= (keep.used_bytes or 0):
                continue
            connection.execute(
                "DELETE FROM recordings WHERE seq IN (SELECT seq FROM interactions WHERE session_seq = ?)",
                (row["seq"],),
            )
            connection.execute("UPDATE sessions SET deleted_at = ? WHERE seq = ?", (now, row["seq"]))
            count += 1
        return count


def _cutoffs(connection: Connection, keep: Retention, safe_step: int, now: float) -> dict[str, float]:
    """step: the newest step whose sessions are too old. beside: when the last of them ended. time: ended before this is too old."""
    step, beside = -1, -math.inf
    if keep.steps is not None:
        served = served_version(connection)  # not the highest step: a resume may have gone back behind it
        step = min(safe_step, (served.step if served else 0) - keep.steps)
        ended = connection.execute(f"SELECT max(s.ended_at) {_FROM} WHERE g.consumed_step = ?", (step,)).fetchone()[0]
        beside = -math.inf if ended is None else ended
    time = -math.inf if keep.seconds is None else now - keep.seconds
    return {"safe": safe_step, "step": step, "beside": beside, "time": time}
