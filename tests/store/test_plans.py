"""No statement on a request's path, or of a training step, walks through a table that only grows."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from areal.base.types import Completion, Interaction, Limits, Message, SessionRequest, Share, Version
from areal.store.sql import adding, rewards, sessions, training
from areal.store.sql.database import Database
from areal.store.sql.groups import overdue, settle_overdue
from areal.store.sql.training import SqlTraining
from areal.store.sqlite import SqliteEngine


@pytest.fixture
def statements() -> set[str]:
    return set()


@pytest.fixture
async def connection(tmp_path: Path, statements: set[str]) -> sqlite3.Connection:
    database = Database(SqliteEngine(tmp_path / "d.sqlite"))
    await SqlTraining(database, lambda: 0.0).set_limits(Limits(4, 0, 4, scored=True))
    await database.close()
    connection = sqlite3.connect(tmp_path / "d.sqlite", isolation_level=None)
    connection.row_factory = sqlite3.Row
    connection.set_trace_callback(statements.add)
    yield connection
    connection.close()


def begin(connection: sqlite3.Connection) -> tuple[int, list[tuple[str, str]]]:
    """Begin a session of the task "old" under the key "old"; (instructions that SQLite ran for it, its SELECTs with their plans)."""
    instructions, selects = 0, []

    def count() -> int:
        nonlocal instructions
        instructions += 1
        return 0

    connection.set_trace_callback(selects.append)
    connection.set_progress_handler(count, 1)
    sessions._begin(connection, SessionRequest("old", "old", "w"), 1.0)
    connection.set_progress_handler(None, 0)
    connection.set_trace_callback(None)
    planned = [each for each in selects if each.startswith("SELECT")]
    return instructions, [
        (each, str(row["detail"])) for each in planned for row in connection.execute(f"EXPLAIN QUERY PLAN {each}")
    ]


def grow(connection: sqlite3.Connection, numbers: range) -> None:
    """Trained sessions of one task, that had one key after the other, as one client leaves them that names neither."""
    for n in numbers:
        connection.execute(
            "INSERT INTO task_groups (seq, task_id, n_samples, opened_at, deadline, accepted_at, consumed_step, consumed_incarnation, "
            "last_attempt) VALUES (?, 'old', 1, 0, 0, 0, 1, 'x', ?)",
            (n, n),
        )
        connection.execute(
            "INSERT INTO sessions (seq, id, task_id, suffix, group_seq, sample, key_hash, worker, purpose, tags, started_at, "
            "last_active_at, ending, ended_at, attempt) VALUES (?, ?, 'old', ?, ?, 0, 'old', 'w', 'train', '{}', 0, 0, 'ended', 0, ?)",
            (n, f"old-{n}", n, n, n),
        )


def test_a_session_of_a_task_and_a_key_with_many_old_ones_begins_like_the_first(connection: sqlite3.Connection) -> None:
    grow(connection, range(1, 3))
    connection.execute("SAVEPOINT few")
    few, _ = begin(connection)
    connection.execute("ROLLBACK TO few")
    grow(connection, range(3, 1000))
    many, plans = begin(connection)
    assert many <= few + 50, plans  # 11 each for a session that was looked at
    [plan] = [plan for statement, plan in plans if "max(last_attempt)" in statement]
    assert plan == "SEARCH task_groups USING INDEX groups_tried (task_id=?)"
    assert connection.execute("SELECT max(attempt) FROM sessions").fetchone()[0] == 1000


def test_hot_statements_search(connection: sqlite3.Connection, statements: set[str]) -> None:
    ids, floats = np.zeros(1, np.int32), np.zeros(1, np.float32)
    record = Interaction("i", "t", 0, ids, Completion(ids, floats, ids, floats, 1.0, "stop"), (), Message("assistant"))
    sessions._begin(connection, SessionRequest("t", "k", "w", request_id="r"), 1.0)
    sessions._begin(connection, SessionRequest("t", "k2", "w"), 1.0)
    adding.add(connection, adding.Addition.of(record, 1.0))
    sessions._reward(connection, "t", 1.0, None, 1.0)
    connection.execute("UPDATE interactions SET reward = NULL WHERE id = 'i'")
    sessions._end(connection, "t", "ended", 1.0)
    assert [one.session.id for one in rewards._waiting(connection, 1.0)] == ["t"]
    rewards._write(connection, {"t": {None: 1.0}}, 1.0)
    sessions._idle(connection, 5.0, set(), "w")
    sessions._one(connection, sessions._NEWEST_OF_KEY, "k")
    sessions.read_interactions(connection, "t")
    sessions._of_answer(connection, "i")
    settle_overdue(connection, 5.0)
    assert overdue(connection, 5.0) == []
    [group] = training.ended_groups(connection, training._READY)
    training._account(connection, "t", {"": Share(1, 1)})
    training._advance(connection, Version(1, 1, "x"), [group.id])
    training._take(connection, Version(2, 2, "x"), {}, 1.0)
    training._release_after(connection, 0, "y", 1.0)
    connection.set_trace_callback(None)
    assert len(statements) > 25
    partial = (
        "sessions_awaiting",
        "groups_running",
        "groups_waiting",
        "groups_consumed",
        "groups_taken",
        "sessions_idle",
    )
    for statement in statements:
        if re.match(r"SELECT|UPDATE|DELETE", statement):
            for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}"):
                step = str(row["detail"])
                assert not step.startswith("SCAN") or step.endswith((*partial, "CONSTANT ROW")), (statement, step)
