"""The one count of what became of a session: rows, merging, branches, tokens, on random sessions and through a service."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.base.types import Fork, Interaction
from areal.proxy import export
from areal.proxy.statistics import OF_ITS_OWN, statistics
from areal.store.base import SessionSummary
from tests.proxy.test_export import SESSION, token_trees, turn

REASONS = st.sampled_from(["new_conversation", "resampled", "history_changed", "system_changed"])


def summary(drop_reason: str = "", purpose: str = "train", **account: int) -> SessionSummary:
    taken = {"" if reason == "trained" else reason: count for reason, count in account.items()}
    return SessionSummary(replace(SESSION, purpose=purpose), 0, None, "accepted", drop_reason, taken)  # type: ignore[arg-type]


@given(token_trees(), st.data())
def test_every_number_adds_up_on_any_session(interactions: list[Interaction], data: st.DataObject) -> None:
    forked = [replace(one, fork=Fork(data.draw(REASONS)) if data.draw(st.booleans()) else None) for one in interactions]
    found = statistics(summary(), forked)
    assert found.merged == found.interactions - found.rows
    assert found.rows == len(found.branches) + bool(interactions)
    assert found.mergeable == found.merged + sum(branch.lost for branch in found.branches)
    assert found.merge_rate is None or 0 <= found.merge_rate <= 1
    assert sum(found.reasons.values()) == len(found.branches)
    rows = export.rows(SESSION, forked, "concat", 1.0)
    assert len(rows) <= found.rows
    assert found.tokens.trained == sum(int(row.trained.sum()) for row in rows)
    assert found.tokens.recorded == found.tokens.trained + sum(found.tokens.masked.values())


def test_what_has_no_row_to_go_on_from_does_not_lower_the_merge_rate() -> None:
    one = turn(0, [1], [2])
    on = turn(1, [1, 2, 3], [4], token=0, credit=0)
    for reason in OF_ITS_OWN:
        found = statistics(summary(), [one, on, replace(turn(2, [7], [8]), fork=Fork(reason))])
        assert (found.merge_rate, found.mergeable, found.reasons) == (1.0, 1, {reason: 1})
    found = statistics(summary(), [one, on, replace(turn(2, [7], [8]), fork=Fork("context_moved"))])
    assert (found.merge_rate, found.rows) == (0.5, 2)
    assert statistics(summary(), [one]).merge_rate is None


def test_a_row_whose_reason_nobody_could_see_is_parallel() -> None:
    found = statistics(summary(), [turn(0, [1], [2]), turn(1, [5], [6])])
    assert found.reasons == {"parallel": 1}


def test_dropped_taken_and_evaluation_sessions_say_where_their_tokens_went() -> None:
    talk = [turn(0, [1], [2, 3]), turn(1, [9], [4], tags=("greedy",))]
    assert statistics(summary("expired"), talk).tokens.dropped == {"expired": 3}
    assert statistics(summary(purpose="eval"), talk).tokens.dropped == {"evaluation": 3}
    taken = statistics(summary(trained=1, greedy=1, stale=1), talk).tokens
    assert (taken.trained, taken.masked, taken.dropped) == (1, {"greedy": 1, "stale": 1}, {})
    waiting = statistics(summary(), talk).tokens
    assert (waiting.trained, waiting.masked, waiting.dropped) == (2, {"greedy": 1}, {})


LINE = [{"pieces": ["ok", "<|im_end|>"]}]


async def test_session_export_and_a_restart_say_the_same(make_service: Any) -> None:
    service = await make_service(LINE)
    key = await service.start()
    await service.chat(key, "Monday")
    await service.chat(key, "Monday", "ok", "more")
    await service.chat(key, "Monday", "no", "more")
    looked = (await service.post("/rl/session", {}, key))[1]
    [fork] = looked["forks"]
    assert looked["branches"] == {"answer_changed": 1}
    assert (looked["rows"], looked["mergeable"], looked["merged"], looked["merge_rate"]) == (2, 2, 1, 0.5)
    assert (fork["index"], fork["reason"]) == (2, "answer_changed")
    assert fork["before"].endswith("assistant\n")
    assert (fork["recorded"].startswith("ok<|im_end|>"), fork["requested"].startswith("no<|im_end|>")) == (True, True)
    _, two, three = await service.recorded(key)
    assert three.prompt_ids[: fork["position"]].tolist() == two.prompt_ids[: fork["position"]].tolist()
    assert three.prompt_ids[fork["position"]] != two.prompt_ids[fork["position"]]
    again = await make_service(LINE)  # another worker on the same store
    for other in ((await again.post("/rl/session", {}, key))[1],
                  (await again.post("/rl/export_trajectories", {"session_id": "task"}))[1]):  # fmt: skip
        for name in ("forks", "branches", "merge_rate", "rows", "tokens", "call_count"):
            assert other[name] == looked[name], name
    await again.end(key)
    exported = (await again.post("/rl/export_trajectories", {"session_id": "task"}))[1]
    assert [each["fork"] for each in exported["interactions"]] == [None, None, {k: v for k, v in fork.items() if k not in ("index", "interaction_id")}]  # fmt: skip
    assert exported["tokens"]["recorded"] == exported["tokens"]["trained"] == 6


async def test_an_expired_session_without_a_reward_says_that_its_tokens_are_dropped(make_service: Any) -> None:
    service = await make_service(LINE)
    key = await service.start()
    await service.chat(key, "hi")
    await service.store.sessions.end("task", "expired")
    exported = (await service.post("/rl/export_trajectories", {"session_id": "task"}))[1]
    tokens = exported["tokens"]
    assert (tokens["recorded"], tokens["trained"], tokens["masked"], tokens["dropped"]) == (2, 0, {}, {"expired": 2})
    assert exported["fate"] == "dropped (expired)"


@pytest.mark.parametrize("n", [2, 3])
async def test_choices_and_calls_at_once_have_rows_of_their_own(make_service: Any, n: int) -> None:
    service = await make_service([{"pieces": ["o", "k", "<|im_end|>"], "delay_ms": 5}])
    key = await service.start()
    await service.chat(key, "hi", n=n)
    looked = (await service.post("/rl/session", {}, key))[1]
    assert (looked["branches"], looked["call_count"], looked["merge_rate"]) == ({"choice": n - 1}, 1, None)
    await asyncio.gather(*(service.chat(key, "hi", "ok", f"more {k}") for k in range(n)))
    looked = (await service.post("/rl/session", {}, key))[1]
    assert sum(looked["branches"].values()) == looked["rows"] - 1
    assert looked["merged"] == looked["interaction_count"] - looked["rows"] >= 1
