"""No statement on a request's path, or of a training step, walks through a table that only grows."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from areal.base.types import Completion, Interaction, Limits, Message, SessionRequest, Share, Version
from areal.store.sql import sessions, training
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
    await SqlTraining(database, lambda: 0.0).set_limits(Limits(4, 0, 4))
    await database.close()
    connection = sqlite3.connect(tmp_path / "d.sqlite", isolation_level=None)
    connection.row_factory = sqlite3.Row
    connection.set_trace_callback(statements.add)
    yield connection
    connection.close()


def test_hot_statements_search(connection: sqlite3.Connection, statements: set[str]) -> None:
    ids, floats = np.zeros(1, np.int32), np.zeros(1, np.float32)
    record = Interaction("i", "t", 0, ids, Completion(ids, floats, ids, floats, 1.0, "stop"), (), Message("assistant"))
    sessions._begin(connection, SessionRequest("t", "k", "w", request_id="r"), 1.0)
    sessions._begin(connection, SessionRequest("t", "k2", "w"), 1.0)
    sessions._add(connection, "t", *sessions.codec.encode(record), 1.0)
    sessions._reward(connection, "t", 1.0, None, 1.0)
    sessions._end(connection, "t", "ended", 1.0)
    sessions._idle(connection, 5.0, set(), "w")
    sessions._one(connection, "WHERE s.key_hash = ? ORDER BY s.seq DESC LIMIT 1", "k")
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
    partial = ("groups_running", "groups_waiting", "groups_consumed", "groups_taken", "sessions_idle")
    for statement in statements:
        if re.match(r"SELECT|UPDATE|DELETE", statement):
            for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}"):
                step = str(row["detail"])
                assert not step.startswith("SCAN") or step.endswith((*partial, "CONSTANT ROW")), (statement, step)
