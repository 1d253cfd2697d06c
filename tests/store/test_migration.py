"""A store of an earlier release is brought up to date when it is opened, and keeps what it holds."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np

from areal.base.types import Completion, Fork, Interaction, Limits, Message, SessionRequest
from areal.store import codec, open_store, store_url
from areal.store.sqlite.schema import APPLICATION_ID, MIGRATIONS, VERSION


def interaction(session_id: str, name: str, request_id: str = "") -> Interaction:
    ids, floats = np.arange(3, dtype=np.int32), np.full(3, -0.5, np.float32)
    return Interaction(
        name, session_id, 0, ids, Completion(ids, floats, ids, floats, 1.0, "stop"), (), Message("assistant"),
        request_id=request_id,
    )  # fmt: skip


async def test_a_store_of_the_first_schema_is_read_and_written_on(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    old = sqlite3.connect(path)
    old.executescript(MIGRATIONS[0])
    old.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    old.execute("PRAGMA user_version = 1")
    old.execute(
        "INSERT INTO sessions (id, task_id, suffix, sample, key_hash, worker, purpose, tags, started_at, last_active_at) "
        "VALUES ('old', 'old', 0, 0, 'k', 'w0', 'eval', '{}', 1, 1)"
    )
    facts, recording = codec.encode(interaction("old", "chatcmpl-old"))
    facts |= {"session_seq": 1}
    del facts["request_id"], recording["fork"]
    facts["branch_reason"] = "the template leaves out the answer"  # what a reason was then
    for table, row in (("interactions", facts), ("recordings", recording | {"seq": 1})):
        names = ", ".join(row)
        old.execute(f"INSERT INTO {table} ({names}) VALUES ({', '.join('?' * len(row))})", tuple(row.values()))
    old.commit()
    old.close()
    async with await open_store(store_url(path)) as store:
        [kept] = await store.sessions.interactions("old")
        assert kept.fork == Fork("template_rewrites", detail="the template leaves out the answer")
        assert (kept.id, kept.request_id, kept.completion.token_ids.tolist()) == ("chatcmpl-old", "", [0, 1, 2])
        await store.training.set_limits(Limits(4, 0, 4))
        await store.sessions.begin(SessionRequest("new", "k2", "w0"))
        await store.sessions.add(interaction("new", "chatcmpl-new", "req_7"))
        assert [one.request_id for one in await store.sessions.interactions("new")] == ["req_7"]
    new = sqlite3.connect(path)
    assert new.execute("PRAGMA user_version").fetchone() == (VERSION,)
    new.close()
