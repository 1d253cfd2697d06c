"""A store of an earlier release is brought up to date when it is opened, and keeps what it holds."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from areal.base.errors import StoreError
from areal.base.types import Completion, Fork, Interaction, Limits, Message, SessionRequest
from areal.store import codec, open_store, store_url
from areal.store.balance import Amounts
from areal.store.sql.schema import MIGRATIONS, VERSION
from areal.store.sqlite import APPLICATION_ID


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
    del facts["request_id"], recording["fork"], recording["packed"], recording["texts"]
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


async def test_a_run_that_was_accounted_for_in_tokens_alone_still_adds_up(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    old = sqlite3.connect(path)
    for script in MIGRATIONS[:5]:
        old.executescript(script)
    old.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    old.execute("PRAGMA user_version = 5")
    old.execute(
        "INSERT INTO task_groups (task_id, n_samples, opened_at, deadline, accepted_at, consumed_step, consumed_incarnation) "
        "VALUES ('t', 2, 1, 2, 1, 1, 'x')"
    )
    for seq, account in enumerate(({"": 1, "greedy": 5}, {"": 0, "greedy": 2, "stale": 4}), 1):
        old.execute(
            "INSERT INTO sessions (id, task_id, suffix, group_seq, sample, key_hash, worker, purpose, tags, started_at, "
            "last_active_at, ending) VALUES (?, 't', 0, 1, ?, 'k', 'w0', 'train', '{}', 1, 1, 'ended')",
            (f"s{seq}", seq),
        )
        for name in (f"a{seq}", f"b{seq}"):
            facts, _ = codec.encode(interaction("", name))
            row = facts | {"session_seq": seq}
            names = ", ".join(row)
            old.execute(f"INSERT INTO interactions ({names}) VALUES ({', '.join('?' * len(row))})", tuple(row.values()))
        old.executemany("INSERT INTO token_accounts VALUES (?, ?, ?)", [(seq, *each) for each in account.items()])
    old.commit()
    old.close()
    with pytest.raises(StoreError, match=f"schema version 5, this release reads {VERSION}"):
        await open_store(store_url(path), read_only=True)
    async with await open_store(store_url(path)) as store:
        books = await store.reading.balance()
    assert books.faults == ()
    assert books.recorded == Amounts(tokens=12, interactions=4, sessions=2, groups=1)
    assert (books.trained.interactions, books.masked["stale"].interactions) == (2, 2)


async def test_what_ended_before_rewards_came_from_the_run_waits_for_none(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    old = sqlite3.connect(path)
    for script in MIGRATIONS[:9]:
        old.executescript(script)
    old.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    old.execute("PRAGMA user_version = 9")
    old.execute(
        "INSERT INTO task_groups (task_id, n_samples, opened_at, deadline, accepted_at) VALUES ('t', 2, 1, 9e9, NULL)"
    )
    for sample, ending in enumerate(("ended", None)):
        old.execute(
            "INSERT INTO sessions (id, task_id, suffix, group_seq, sample, key_hash, worker, purpose, tags, started_at, "
            "last_active_at, ending) VALUES (?, 't', ?, 1, ?, ?, 'w0', 'train', '{}', 1, 1, ?)",
            (f"t-{sample}", sample, sample, f"k{sample}", ending),
        )
    # Limits as an earlier release wrote them.
    old.execute('INSERT INTO settings VALUES (\'limits\', \'{"max_concurrent":4,"max_lag":0,"batch_groups":4}\')')
    old.commit()
    old.close()
    async with await open_store(store_url(path)) as store:
        assert (await store.training.limits()) == Limits(4, 0, 4)
        assert await store.rewards.waiting() == ()
        await store.training.set_limits(Limits(4, 0, 4, n_samples=2, scored=True))
        await store.sessions.add(interaction("t-1", "chatcmpl-new"))
        await store.sessions.end("t-1", "ended")
        [waiting] = await store.rewards.waiting()
        assert (waiting.session.id, waiting.closed) == ("t-1", True)


async def test_the_tries_of_a_task_are_counted_on(tmp_path: Path) -> None:
    """Where they were counted from the sessions alone; a dropped group's tries come again."""
    path = tmp_path / "store.sqlite"
    old = sqlite3.connect(path)
    for script in MIGRATIONS[:7]:
        old.executescript(script)
    old.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    old.execute("PRAGMA user_version = 7")
    old.executemany(
        "INSERT INTO task_groups (task_id, n_samples, opened_at, deadline, accepted_at, dropped_at, drop_reason) "
        "VALUES ('t', 2, 1, 2, ?, ?, ?)",
        [(1, None, None), (1, None, None), (None, 1, "too_old")],
    )
    for attempt, group in enumerate((1, 1, 2, 2, 3, 3)):
        old.execute(
            "INSERT INTO sessions (id, task_id, suffix, group_seq, sample, key_hash, worker, purpose, tags, started_at, "
            "last_active_at, ending, attempt) VALUES (?, 't', ?, ?, ?, 'k', 'w0', 'train', '{}', 1, 1, 'ended', ?)",
            (f"t-{attempt}", attempt, group, attempt % 2, attempt),
        )
    old.commit()
    old.close()
    async with await open_store(store_url(path)) as store:
        await store.training.set_limits(Limits(4, 0, 4, n_samples=2))
        begun = [await store.sessions.begin(SessionRequest("t", f"k{n}", "w0")) for n in range(3)]
    assert [session.attempt for session in begun] == [4, 5, 6]
