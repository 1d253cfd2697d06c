"""Sessions and what they recorded (`SessionStore`).

Every method that writes is one operation of Database.write: committed when it returns, undone alone when it raises. The
functions below the class run inside the transaction; those of groups.py decide when a group is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from areal.base.errors import BadRequest, Conflict, NotFound
from areal.base.types import Ending, Interaction, Session, SessionRequest, Tag
from areal.store import codec
from areal.store.base import LARGEST_REWARD
from areal.store.sql import exclusion, groups
from areal.store.sql.adding import Addition, add, add_all, running, touch
from areal.store.sql.database import Database, Many
from areal.store.sql.engine import Connection, Row

ANSWER_PATIENCE_S = 30.0  # how long a sampled answer waits for room on a full disk before its client hears of it
LATE = "late"  # its group went on without it
LONGEST_ID = 512  # characters of a task or request id; ids are data, never paths

SESSION = (
    "SELECT s.*, (SELECT count(*) FROM interactions i WHERE i.session_seq = s.seq) AS interaction_count FROM sessions s"
)
# A key has at most one running session, and that one is its newest.
_NEWEST_OF_KEY = "WHERE s.key_hash = ? ORDER BY s.seq DESC LIMIT 1"
# Not what a null interaction_id means (settled 10).
_NOT_THE_LAST = frozenset({"side_request", "superseded", "aborted"})


class SqlSessions:
    """SessionStore. `clock` returns seconds since the epoch."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    async def begin(self, request: SessionRequest) -> Session:
        _check_id("task_id", request.task_id)
        if request.request_id is not None:
            _check_id("request_id", request.request_id)
        self._database.engine.check_room()
        return await self._database.write(
            lambda connection: _begin(connection, request, self._clock()), once=request.request_id is None
        )

    async def live(self, key_hash: str) -> Session | None:
        return await self._database.read(lambda connection: _one(connection, _NEWEST_OF_KEY, key_hash))

    async def get(self, session_id: str) -> Session | None:
        return await self._database.read(lambda connection: _one(connection, "WHERE s.id = ?", session_id))

    async def of_answer(self, interaction_id: str) -> Session | None:
        return await self._database.read(lambda connection: _of_answer(connection, interaction_id))

    async def add(self, interaction: Interaction) -> None:
        # The caller's thread pays for the encoding, not the writer's.
        addition = Addition.of(interaction, self._clock())
        await self._database.write(
            lambda connection: add(connection, addition), patience_s=ANSWER_PATIENCE_S, many=Many(add_all, addition)
        )

    async def tag(self, interaction_id: str, tag: Tag) -> None:
        await self._database.write(lambda connection: _tag(connection, interaction_id, tag))

    async def reward(self, session_id: str, reward: float, interaction_id: str | None) -> str:
        if not abs(reward) <= LARGEST_REWARD:  # NaN is not either
            raise BadRequest(
                f"reward is {reward:g}; it must be a finite number from -{LARGEST_REWARD:g} to {LARGEST_REWARD:g}",
                param="reward",
            )
        return await self._database.write(
            lambda connection: _reward(connection, session_id, float(reward), interaction_id, self._clock())
        )

    async def end(self, session_id: str, ending: Ending) -> Session:
        return await self._database.write(lambda connection: _end(connection, session_id, ending, self._clock()))

    async def exclude(self, session_id: str, because: str = "", *, delete: bool = False) -> Session:
        session = await self._database.write(
            lambda connection: _exclude(connection, session_id, because, delete, self._clock())
        )
        if delete:
            await self._database.scrub()
        return session

    async def interactions(self, session_id: str) -> tuple[Interaction, ...]:
        return await self._database.read(lambda connection: read_interactions(connection, session_id))

    async def touch(self, session_id: str) -> None:
        def touched(connection: Connection) -> None:
            touch(connection, [running(connection, session_id)["seq"]], self._clock())

        await self._database.write(touched)

    async def expire(
        self, idle_since: float, busy: Sequence[str] = (), worker: str | None = None
    ) -> tuple[Session, ...]:
        idle = await self._database.read(lambda connection: _idle(connection, idle_since, set(busy), worker))
        if not idle:
            return ()

        def expire(connection: Connection) -> tuple[Session, ...]:
            # Once more under the lock: a call may have touched one of them since the look above.
            still = _idle(connection, idle_since, set(busy), worker)
            return tuple(_end(connection, session_id, "expired", self._clock()) for session_id in still)

        return await self._database.write(expire, once=True)  # the sessions that it ended are told once


# -- inside the transaction ------------------------------------------------------------------------


def _begin(connection: Connection, request: SessionRequest, now: float) -> Session:
    if request.request_id is not None:
        again = _one(connection, "WHERE s.request_id = ?", request.request_id)
        if again is not None:
            if again.task_id != request.task_id:
                raise Conflict(
                    f"request_id {request.request_id!r} already started a session of task {again.task_id!r}; "
                    "use a new request_id"
                )
            return again
    limits = groups.open_limits(connection, request.purpose)
    taken = _one(connection, _NEWEST_OF_KEY, request.key_hash)
    if taken is not None and taken.ending is None:
        raise Conflict(f"this key already has the running session {taken.id!r}; end or refresh it first")
    groups.settle_overdue(connection, now)
    place = None if request.purpose == "eval" else groups.join(connection, request.task_id, limits, now)
    session_id, suffix = _free_id(connection, request.task_id)
    connection.execute(
        "INSERT INTO sessions (id, task_id, suffix, group_seq, sample, key_hash, worker, purpose, tags, request_id, "
        "started_at, last_active_at, attempt) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            session_id,
            request.task_id,
            suffix,
            place.group_seq if place else None,
            place.sample if place else 0,
            request.key_hash,
            request.worker,
            request.purpose,
            codec.to_json(request.tags),
            request.request_id,
            now,
            now,
            place.attempt if place else 0,
        ),
    )
    return _must_get(connection, session_id)


def _free_id(connection: Connection, task_id: str) -> tuple[str, int]:
    """The task id, else it with the next suffix that no session has ("a-1" may be another task's own name)."""
    newest = connection.execute("SELECT max(suffix) FROM sessions WHERE task_id = ?", (task_id,)).fetchone()[0]
    suffix = 0 if newest is None else newest + 1
    while True:
        session_id = f"{task_id}-{suffix}" if suffix else task_id
        if connection.execute("SELECT 1 FROM sessions WHERE id = ?", (session_id,)).fetchone() is None:
            return session_id, suffix
        suffix += 1


def _tag(connection: Connection, interaction_id: str, tag: Tag) -> None:
    row = connection.execute("SELECT seq, tags FROM interactions WHERE id = ?", (interaction_id,)).fetchone()
    if row is None:
        raise NotFound(f"no interaction {interaction_id!r}; use the id of an answer")
    tags = codec.from_json(row["tags"], list[str])
    if tag not in tags:
        connection.execute("UPDATE interactions SET tags = ? WHERE seq = ?", (codec.to_json([*tags, tag]), row["seq"]))


def _reward(connection: Connection, session_id: str, reward: float, interaction_id: str | None, now: float) -> str:
    session = running(connection, session_id)
    name = pay(connection, session, reward, interaction_id)
    touch(connection, [session["seq"]], now)
    return name


def pay(connection: Connection, session: Row, reward: float, interaction_id: str | None) -> str:
    """Write the reward of an answer, see SessionStore.reward; returns its id."""
    session_id = session["id"]
    rows = connection.execute(
        "SELECT seq, id, tags FROM interactions WHERE session_seq = ? ORDER BY seq DESC", (session["seq"],)
    )
    if interaction_id is None:
        last = next((row for row in rows if not _NOT_THE_LAST & set(codec.from_json(row["tags"], list[str]))), None)
        if last is None:
            raise BadRequest(
                f"session {session_id!r} has no finished interaction yet; reward it after its first answer",
                param="interaction_id",
            )
        chosen, name = [last], str(last["id"])
    else:
        # The bare id of a call with n > 1 choices means all of them; choice k is "<id>#k" (settled 15).
        name = interaction_id
        chosen = [row for row in rows if row["id"] == name or row["id"].startswith(f"{name}#")]
        if not chosen:
            raise NotFound(f"session {session_id!r} has no interaction {name!r}; use the id of one of its answers")
    for row in chosen:
        connection.execute("UPDATE interactions SET reward = ? WHERE seq = ?", (reward, row["seq"]))
    return name


def _end(connection: Connection, session_id: str, ending: Ending, now: float) -> Session:
    session = _must_get(connection, session_id)
    if session.ending is not None:
        return session
    row = running(connection, session_id)
    drop_reason, awaits = _outcome(connection, row, ending)
    connection.execute(
        "UPDATE sessions SET ending = ?, ended_at = ?, drop_reason = ?, awaits_reward_since = ? WHERE seq = ?",
        (ending, now, drop_reason, now if awaits else None, row["seq"]),
    )
    if row["group_seq"] is not None:
        groups.settle(connection, row["group_seq"], now)
    return _must_get(connection, session_id)


def _outcome(connection: Connection, session: Row, ending: Ending) -> tuple[str | None, bool]:
    """Of a session that ends like this: why it is never trained, None for one that may be (settled 9), and whether its reward is yet to
    come from the run's reward source. What somebody has rewarded is not asked about."""
    if ending in ("reward_failed", "excluded"):
        return (None if session["purpose"] == "eval" else ending), False
    total, rewarded = connection.execute(
        "SELECT count(*), count(reward) FROM interactions WHERE session_seq = ?", (session["seq"],)
    ).fetchone()
    limits = groups.read_limits(connection)
    awaits = limits is not None and limits.scored and total > 0 and rewarded == 0
    if session["purpose"] == "eval":
        return None, awaits  # never a candidate for training, so never dropped from it
    if total == 0:
        return "empty", False
    if ending == "expired" and rewarded == 0 and not awaits:
        return "expired", False
    return (LATE, False) if went_on(connection, session["group_seq"]) else (None, awaits)


def went_on(connection: Connection, group_seq: int) -> bool:
    """Whether a group has been settled without those that had not ended well by then."""
    where = f"WHERE seq = ? AND NOT ({groups.RUNNING})"
    return connection.execute(f"SELECT 1 FROM task_groups {where}", (group_seq,)).fetchone() is not None


def _exclude(connection: Connection, session_id: str, because: str, delete: bool, now: float) -> Session:
    if _must_get(connection, session_id).ending is None:
        _end(connection, session_id, "excluded", now)
    exclusion.exclude(connection, session_id, because, now, delete=delete)
    return _must_get(connection, session_id)


def _idle(connection: Connection, idle_since: float, busy: set[str], worker: str | None) -> list[str]:
    rows = connection.execute(
        "SELECT id FROM sessions WHERE ending IS NULL AND last_active_at < ? AND coalesce(?, worker) = worker "
        "ORDER BY last_active_at",
        (idle_since, worker),
    )
    return [row["id"] for row in rows.fetchall() if row["id"] not in busy]


# -- rows to nouns ---------------------------------------------------------------------------------


def _one(connection: Connection, where: str, value: str | int) -> Session | None:
    row = connection.execute(f"{SESSION} {where}", (value,)).fetchone()
    return None if row is None else to_session(row)


def _of_answer(connection: Connection, interaction_id: str) -> Session | None:
    # Choice k of an answer is "<id>#k", and "$" is what follows "#".
    row = connection.execute(
        "SELECT session_seq FROM interactions WHERE id = ? OR (id > ? AND id < ?) LIMIT 1",
        (interaction_id, f"{interaction_id}#", f"{interaction_id}$"),
    ).fetchone()
    return None if row is None else _one(connection, "WHERE s.seq = ?", row["session_seq"])


def _must_get(connection: Connection, session_id: str) -> Session:
    session = _one(connection, "WHERE s.id = ?", session_id)
    if session is None:
        raise NotFound(f"no session {session_id!r}; start one with POST /rl/start_session")
    return session


def to_session(row: Row) -> Session:
    """A row of the SESSION query."""
    return Session(
        id=row["id"],
        task_id=row["task_id"],
        group_id="" if row["group_seq"] is None else group_id(row["group_seq"]),
        sample=row["sample"],
        key_hash=row["key_hash"],
        worker=row["worker"],
        purpose=row["purpose"],
        tags=codec.from_json(row["tags"], dict[str, str]),
        started_at=row["started_at"],
        last_active_at=row["last_active_at"],
        ending=row["ending"],
        ended_at=row["ended_at"],
        interaction_count=row["interaction_count"],
        attempt=row["attempt"],
        excluded_because=row["excluded_because"],
        deleted_at=row["deleted_at"],
        request_id=row["request_id"],
        awaits_reward_since=row["awaits_reward_since"],
    )


def read_interactions(connection: Connection, session_id: str) -> tuple[Interaction, ...]:
    """In start order (`index`), then in the order in which they finished."""
    rows = connection.execute(
        "SELECT i.*, r.* FROM sessions s JOIN interactions i ON i.session_seq = s.seq JOIN recordings r ON r.seq = i.seq "
        "WHERE s.id = ? ORDER BY i.idx, i.seq",
        (session_id,),
    )
    return tuple(codec.decode(row, session_id) for row in rows.fetchall())


def group_id(group_seq: int) -> str:
    """The public id of a group's row number."""
    return f"g{group_seq}"


def _check_id(name: str, value: str) -> None:
    if not value or len(value) > LONGEST_ID or "\0" in value:
        raise BadRequest(
            f"{name} has {len(value)} characters{' and a NUL' * (chr(0) in value)}; "
            f"it must have 1 to {LONGEST_ID} and no NUL character",
            param=name,
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"{name} is not valid Unicode text (a lone surrogate); send UTF-8", param=name) from error
