"""Lifecycle over HTTP: start, refresh, end, expire, take over; who may do what; rewards."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from areal.base.errors import StoreUnready
from areal.base.types import Limits, Version
from areal.web.auth import SessionKeys

LONG = {"when": "long", "pieces": ["x"] * 40, "delay_ms": 20}
SHORT = {"pieces": ["ok", "<|im_end|>"]}


async def test_T041_calls_land_in_the_session_of_their_key(make_service: Any) -> None:
    service = await make_service([{"when": "one", "pieces": ["1"]}, {"when": "two", "pieces": ["2"]}])
    keys = {"one": await service.start("t1"), "two": await service.start("t2")}
    await asyncio.gather(*(service.chat(keys[name], f"{name} {k}") for k in range(50) for name in keys))
    for name, reward in (("one", 1.0), ("two", 0.0)):
        assert (await service.reward(keys[name], reward))[0] == 200
        assert (await service.end(keys[name]))["interaction_count"] == 50
    for name, task, reward, digit in (("one", "t1", 1.0, "1"), ("two", "t2", 0.0, "2")):
        _, body, _ = await service.post("/export_trajectories", {"session_id": task})
        assert len(body["interactions"]) == 50
        assert {one["reply"]["content"] for one in body["interactions"]} == {digit}
        assert all(name in one["messages"][0]["content"] for one in body["interactions"])
        assert [one["reward"] for one in body["interactions"] if one["reward"] is not None] == [reward]
        assert sorted(one["index"] for one in body["interactions"]) == list(range(50))


async def test_T042_a_session_without_interactions_cannot_be_rewarded_and_frees_its_slot(make_service: Any) -> None:
    service = await make_service(limits=Limits(max_concurrent=1, max_lag=4, batch_groups=1))
    key = await service.start()
    status, body, _ = await service.reward(key, 1.0)
    assert status == 400
    assert "interaction" in body["error"]["message"]
    assert (await service.end(key))["interaction_count"] == 0
    await service.start("next")
    counts = await service.store.training.counts()
    assert counts.accepted == 0


REFUSED = ["NaN", "Infinity", "-Infinity", "1e999", "1e308", "-1000001", '"1.0"', "null", "true", "[1]", "{}"]


async def test_T043_what_is_no_finite_number_is_no_reward_and_the_earlier_one_stays(make_service: Any) -> None:
    service = await make_service()
    key = await service.start()
    await service.chat(key, "hi")
    assert (await service.reward(key, 0.5))[0] == 200
    for text in (*(f'{{"reward": {value}}}' for value in REFUSED), "{}", "[]", "reward=1", ""):
        status, body, headers = await service.post("/rl/set_reward", text, key)
        assert status == 400, text
        assert headers["content-type"] == "application/json"
        assert body["error"]["type"] == "invalid_request_error"
    assert [one.reward for one in await service.recorded(key)] == [0.5]


async def test_what_a_control_route_does_not_know_is_said_once(
    make_service: Any, caplog: pytest.LogCaptureFixture
) -> None:
    service = await make_service()
    key = await service.start()
    said = await service.chat(key, "hi")
    with caplog.at_level(logging.WARNING, "areal.proxy"):
        for _ in range(2):
            status, body, _ = await service.post("/rl/set_reward", {"reward": 0.5, "interactionid": "x"}, key)
            assert (status, body["interaction_id"]) == (200, said["id"])
    assert [one.getMessage() for one in caplog.records] == [
        "set_reward: unknown field 'interactionid' is ignored (said once)"
    ]


async def test_T044_T045_rewards_by_id_and_the_null_id_means_the_last_finished_one(make_service: Any) -> None:
    service = await make_service([{"pieces": [str(k), "<|im_end|>"]} for k in range(3)], agent={"turn_discount": 0.5})
    key = await service.start()
    first = await service.chat(key, "a")
    await service.chat(key, "a", "0", "b")
    await service.chat(key, "a", "0", "b", "1", "c")
    assert (await service.reward(key, -0.2, first["id"]))[0] == 200
    assert (await service.reward(key, 1.0))[0] == 200
    status, body, _ = await service.reward(key, 1.0, "chatcmpl-nope")
    assert status == 404
    assert body["error"]["message"]
    await service.end(key)
    for _ in range(2):
        _, body, _ = await service.post("/rl/export_trajectories", {"session_id": "task"})
        assert [one["reward"] for one in body["interactions"]] == [-0.2, None, 1.0]
        assert [one["discounted_reward"] for one in body["interactions"]] == pytest.approx([0.05, 0.5, 1.0])
    _, body, _ = await service.post("/rl/export_trajectories", {"session_id": "task", "discount": 0})
    assert [one["discounted_reward"] for one in body["interactions"]] == [-0.2, 0.0, 1.0]


async def test_ended_sessions_refuse_calls_and_rewards_with_the_reason_and_end_again_quietly(make_service: Any) -> None:
    service = await make_service()
    key = await service.start()
    await service.chat(key, "hi")
    assert await service.end(key) == await service.end(key)
    status, body, headers = await service.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, key
    )
    assert status == 401
    assert "ended" in body["error"]["message"]
    assert headers["x-should-retry"] == "false"
    status, body, _ = await service.reward(key, 1.0)
    assert status == 401
    assert "before end_session" in body["error"]["message"]


async def test_ending_lets_calls_in_flight_finish(make_service: Any, eventually: Any) -> None:
    service = await make_service([LONG, SHORT])
    key = await service.start()
    call = asyncio.create_task(service.chat(key, "long"))
    await eventually(lambda: service.calls()["running"] == 1)
    assert (await service.end(key))["interaction_count"] == 1
    assert (await call)["choices"][0]["message"]["content"] == "x" * 40


@pytest.mark.parametrize("stream", [False, True])
async def test_ending_cuts_what_does_not_finish_in_time_and_masks_it(
    make_service: Any, eventually: Any, stream: bool
) -> None:
    endless = {"when": "long", "pieces": ["x"] * 2000, "delay_ms": 20}
    service = await make_service([endless, SHORT], parts={"closing_bound_s": 0.1})
    key = await service.start()
    body = {"messages": [{"role": "user", "content": "long"}], "stream": stream}

    async def call() -> tuple[int, str]:
        headers = {"x-api-key": key}
        async with service.http.post(f"{service.url}/v1/chat/completions", json=body, headers=headers) as answer:
            return answer.status, await answer.text()

    running = asyncio.create_task(call())
    await eventually(lambda: service.calls()["calls"] and service.calls()["calls"][0]["sent"] > 1)
    assert (await service.end(key))["interaction_count"] == 1
    status, text = await running
    assert status == (200 if stream else 401)
    assert "session ended while this call was running" in text
    assert "[DONE]" not in text
    (one,) = await service.recorded(key)
    assert one.tags == ("aborted",)
    await eventually(lambda: service.calls()["aborted"] == 1)


async def test_late_rewards_are_taken_within_the_grace(make_service: Any, eventually: Any) -> None:
    service = await make_service(agent={"reward_grace_seconds": 4})
    key = await service.start()
    await service.chat(key, "hi")
    assert (await service.end(key))["interaction_count"] == 1
    assert (await service.reward(key, 1.0))[0] == 200
    body = {"messages": [{"role": "user", "content": "x"}]}
    assert (await service.post("/v1/chat/completions", body, key))[0] == 401

    async def ended() -> bool:
        session = await service.store.sessions.get("task")
        return bool(session and session.ending == "ended")

    await eventually(ended)
    assert (await service.reward(key, 0.0))[0] == 401
    assert [one.reward for one in await service.recorded(key)] == [1.0]


class Clock:
    """Seconds since the epoch, moved by the test."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


async def test_T046_a_session_expires_when_it_is_idle_and_not_while_it_works(
    make_service: Any, eventually: Any
) -> None:
    clock = Clock()
    service = await make_service([SHORT], agent={"session_timeout_seconds": 100}, parts={"clock": clock})
    key = await service.start()
    for _ in range(3):  # lives longer than the time-out, and is never idle for so long
        clock.now += 75
        await service.chat(key, "hi")
        assert await service.proxy.sessions.expire_idle() == ()
    await service.engine.pause()
    call = asyncio.create_task(service.chat(key, "hi"))
    await eventually(lambda: service.calls()["running"] == 1)
    clock.now += 250
    assert await service.proxy.sessions.expire_idle() == ()
    await service.engine.resume()
    await call
    clock.now += 101
    assert [row.id for row in await service.proxy.sessions.expire_idle()] == ["task"]
    status, body, _ = await service.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, key)
    assert status == 401
    assert "expired" in body["error"]["message"]
    assert (await service.store.training.counts()).running_sessions == 0
    assert len(await service.recorded(key)) == 4


async def test_T046_expiry_runs_by_itself(make_service: Any, eventually: Any) -> None:
    service = await make_service(agent={"session_timeout_seconds": 0.3})
    await service.start()

    async def expired() -> bool:
        return (await service.store.sessions.get("task")).ending == "expired"

    await eventually(expired)


async def test_refresh_ends_the_old_session_once_and_keeps_the_key(make_service: Any) -> None:
    service = await make_service()
    key = await service.start("t")
    await service.chat(key, "hi")
    status, body, _ = await service.post("/rl/start_session", {"task_id": "t", "api_key": key})
    assert (status, body) == (200, {"session_id": "t-1", "api_key": key})
    old = await service.store.sessions.get("t")
    assert (old.ending, old.interaction_count) == ("refreshed", 1)
    await service.chat(key, "hi")
    assert (await service.end(key))["session_id"] == "t-1"
    status, body, _ = await service.post("/rl/start_session", {"task_id": "t", "api_key": key})
    assert (status, body["session_id"]) == (200, "t-2")  # the key of an ended session starts again


async def test_T048_of_two_refreshes_one_wins_and_a_call_lands_whole_in_one_session(
    make_service: Any, eventually: Any
) -> None:
    service = await make_service([LONG, SHORT])
    key = await service.start("t")
    await service.chat(key, "hi")
    await service.chat(key, "hi", "ok", "more")
    running = asyncio.create_task(service.chat(key, "long"))
    await eventually(lambda: service.calls()["running"] == 1)
    body = {"task_id": "t", "api_key": key}
    refreshes = [asyncio.create_task(service.post("/rl/start_session", body)) for _ in range(2)]
    await eventually(lambda: service.proxy.sessions._refreshing)
    held = asyncio.create_task(service.chat(key, "hi"))
    answers = [await refresh for refresh in refreshes]
    assert sorted(status for status, _, _ in answers) == [200, 409]
    loser = next(headers for status, _, headers in answers if status == 409)
    assert loser["x-should-retry"] == "false"
    await asyncio.gather(running, held)
    old, new = await service.store.sessions.get("t"), await service.store.sessions.get("t-1")
    assert (old.ending, old.interaction_count) == ("refreshed", 3)
    assert (new.ending, new.interaction_count) == (None, 1)
    assert await service.store.sessions.get("t-2") is None


async def test_a_refresh_whose_answer_was_lost_is_said_again_and_ends_nothing(make_service: Any) -> None:
    service = await make_service()
    key = await service.start("first")
    body = {"task_id": "second", "api_key": key, "request_id": "refresh-1"}
    answers = [await service.post("/rl/start_session", body) for _ in range(2)]
    assert [(status, answer) for status, answer, _ in answers] == [(200, {"session_id": "second", "api_key": key})] * 2
    await service.chat(key, "hi")
    assert (await service.end(key))["session_id"] == "second"
    assert (await service.store.sessions.get("first")).ending == "refreshed"
    status, _, _ = await service.post("/rl/start_session", body | {"task_id": "another"})
    assert status == 409


async def test_a_refresh_without_a_free_slot_is_429_and_the_key_stays_good(make_service: Any) -> None:
    service = await make_service(
        limits=Limits(max_concurrent=1, max_lag=0, batch_groups=1), agent={"refresh_timeout_seconds": 0.3}
    )
    key = await service.start("t")
    await service.chat(key, "hi")
    for _ in range(2):
        status, body, headers = await service.post("/rl/start_session", {"task_id": "t", "api_key": key})
        assert status == 429
        assert 1 <= int(headers["retry-after"]) <= 30
        assert body["error"]["code"] == "no_capacity"
    assert (await service.store.sessions.get("t")).interaction_count == 1
    await service.store.training.set_limits(Limits(max_concurrent=4, max_lag=4, batch_groups=4))
    status, body, _ = await service.post("/rl/start_session", {"task_id": "t", "api_key": key})
    assert (status, body["session_id"]) == (200, "t-1")


async def test_a_refresh_waits_for_a_slot(make_service: Any, eventually: Any) -> None:
    service = await make_service(limits=Limits(max_concurrent=1, max_lag=0, batch_groups=1))
    key = await service.start("t")
    await service.chat(key, "hi")
    waiting = asyncio.create_task(service.post("/rl/start_session", {"task_id": "t", "api_key": key}))
    await eventually(lambda: service.proxy.sessions._refreshing)
    held = asyncio.create_task(service.chat(key, "hi"))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    assert not held.done()
    await service.store.training.set_limits(Limits(max_concurrent=4, max_lag=4, batch_groups=4))
    assert (await waiting)[0] == 200
    await held
    assert (await service.store.sessions.get("t-1")).interaction_count == 1


async def test_T049_capacity_is_429_with_retry_after_and_slots_come_back(make_service: Any) -> None:
    service = await make_service(limits=Limits(max_concurrent=4, max_lag=1000, batch_groups=4))
    for turn in range(5):
        keys = [await service.start(f"t{turn}-{k}") for k in range(4)]
        status, body, headers = await service.post("/rl/start_session", {"task_id": "more"})
        assert status == 429
        assert int(headers["retry-after"]) >= 1
        assert "retry" in body["error"]["message"]
        await service.end(keys.pop())
        keys.append(await service.start(f"again-{turn}"))
        await asyncio.gather(*(service.end(key) for key in keys))
    counts = await service.store.training.counts()
    assert (counts.running, counts.running_sessions) == (0, 0)


async def test_T049_a_full_queue_is_429_until_a_step_has_trained(make_service: Any) -> None:
    service = await make_service(limits=Limits(max_concurrent=9, max_lag=9, batch_groups=2, queue_size=2))
    for task in ("a", "b"):
        key = await service.start(task)
        await service.chat(key, "hi")
        await service.end(key)
    status, body, headers = await service.post("/rl/start_session", {"task_id": "c"})
    assert (status, "2 of 2" in body["error"]["message"]) == (429, True)
    assert int(headers["retry-after"]) >= 1
    training = service.store.training
    await training.advance(Version(1, 1, "x"), [group.id for group in await training.ready()])
    await service.start("c")


async def test_the_same_request_id_gives_the_same_session_and_key(make_service: Any) -> None:
    service = await make_service()
    body = {"task_id": "t", "request_id": "r-1"}
    answers = [(await service.post("/rl/start_session", body))[1] for _ in range(2)]
    assert answers[0] == answers[1]
    await service.chat(answers[1]["api_key"], "hi")
    assert await service.start("t") != answers[0]["api_key"]


async def test_T047_another_process_takes_a_session_over_with_its_history(make_service: Any) -> None:
    first = await make_service([SHORT])
    key = await first.start()
    one = await first.chat(key, "hi")
    second = await make_service([SHORT], parts={"worker": "w0"})
    await second.chat(key, "hi", "ok", "more")
    recorded = await second.recorded(key)
    assert recorded[1].token_parent == one["id"]
    await first.chat(key, "hi", "ok", "more", "ok", "and more")  # back again: the other's turn is known here too
    assert (await first.recorded(key))[2].token_parent == recorded[1].id
    assert (await first.end(key))["interaction_count"] == 3
    assert (await second.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, key))[0] == 401


async def test_T109_keys_open_only_what_is_theirs(make_service: Any) -> None:
    service = await make_service()
    key = await service.start()
    foreign = SessionKeys(b"x" * 32).mint("w0")
    chat = {"messages": [{"role": "user", "content": "x"}]}
    expected = [
        ("/rl/start_session", {"task_id": "t"}, key, 403),
        ("/rl/export_trajectories", {"session_id": "task"}, key, 403),
        ("/rl/start_session", {"task_id": "t"}, foreign, 401),
        ("/rl/start_session", {"task_id": "t", "api_key": foreign}, "admin", 401),
        ("/rl/start_session", {"task_id": "t"}, None, 401),
        ("/rl/start_session", {"task_id": "t"}, "", 401),
        ("/chat/completions", chat, "admin", 401),
        ("/chat/completions", chat, foreign, 401),
        ("/chat/completions", chat, None, 401),
        ("/rl/set_reward", {"reward": 1}, foreign, 401),
        ("/rl/end_session", {}, "admin", 401),
        ("/rl/export_trajectories", {"session_id": "nope"}, "admin", 404),
    ]
    for path, body, presented, wanted in expected:
        more = {} if presented == "admin" else {"key": presented}
        status, answer, headers = await service.post(path, body, **more)
        assert status == wanted, (path, answer)
        assert answer["error"]["message"]
        assert headers["x-should-retry"] == "false"
        if wanted == 401:
            assert answer["error"]["message"].startswith("Invalid API key")


async def test_a_session_key_may_not_reward_itself_where_the_admin_rewards(make_service: Any) -> None:
    service = await make_service(agent={"reward_key": "admin"})
    key = await service.start()
    await service.chat(key, "hi")
    assert (await service.reward(key, 1.0))[0] == 403
    status, body, _ = await service.post("/rl/set_reward", {"reward": 1.0})
    assert (status, body["error"]["param"]) == (400, "session_id")
    assert (await service.post("/rl/set_reward", {"reward": 1.0, "session_id": "task"}))[0] == 200
    assert [one.reward for one in await service.recorded(key)] == [1.0]


async def test_T111_task_ids_are_data(make_service: Any, tmp_path: Any) -> None:
    service = await make_service()
    before = sorted(tmp_path.parent.rglob("*"))
    for task_id in ("../../x", "a/b", "...", "🤖", "x" * 512, "'; drop table sessions; --"):
        key = await service.start(task_id)
        await service.chat(key, "hi")
        await service.start(task_id)
        await service.end(key)
        status, body, _ = await service.post("/rl/export_trajectories", {"session_id": task_id})
        assert status == 200
        assert body["task_id"] == task_id
    assert sorted(tmp_path.parent.rglob("*")) == before


NO_START_BODIES: list[Any] = [
    {},
    {"task_id": None},
    {"task_id": ""},
    {"task_id": 5},
    {"task_id": "x" * 5000},
    {"task_id": "a\0b"},
    {"task_id": "t", "purpose": "fun"},
    {"task_id": "t", "tags": ["a"]},
    {"task_id": "t", "tags": {"a": 1}},
    {"task_id": "t", "tags": {str(k): "x" for k in range(40)}},
    {"task_id": "t", "request_id": 1},
    [],
    "not json",
    '{"task_id": "\\ud800"}',
]


async def test_T111_start_session_refuses_what_it_cannot_keep(make_service: Any) -> None:
    service = await make_service()
    for body in NO_START_BODIES:
        status, answer, _ = await service.post("/rl/start_session", body)
        assert status == 400, body
        assert answer["error"]["message"]
    assert (await service.store.training.counts()).running_sessions == 0


async def test_T108_secrets_are_in_no_log_and_no_answer(
    make_service: Any, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    service = await make_service()
    key = await service.start()
    await service.chat(key, "hi")
    wrong = "sk-sess-WRONG123.secretpart.macmacmac"
    status, body, _ = await service.post("/v1/chat/completions", {"messages": []}, wrong)
    assert status == 401
    await service.post("/rl/start_session", {"task_id": "t"}, "sk-admin-guess-99")
    await service.end(key)
    _, exported, _ = await service.post("/rl/export_trajectories", {"session_id": "task"})
    said = caplog.text + str(body) + str(exported) + "".join(capfd.readouterr())
    for secret in (key, wrong, "secretpart", "sk-admin-guess-99", "sk-admin-for-tests"):
        assert secret not in said


async def test_rl_session_says_where_the_tokens_are(make_service: Any) -> None:
    service = await make_service([SHORT])
    key = await service.start("t", tags={"user": "ada"})
    await service.chat(key, "hi")
    await service.chat(key, "hi", "ok", "more")
    await service.chat(key, "another start")
    await service.chat(key, "hi", temperature=0)
    async with service.http.get(f"{service.url}/rl/session", headers={"x-api-key": key}) as response:
        body = await response.json()
    assert (body["session_id"], body["tags"], body["interaction_tags"]) == ("t", {"user": "ada"}, {"greedy": 1})
    assert body["branches"] == {"new_conversation": 1, "resampled": 1}
    assert (body["mergeable"], body["merge_rate"], body["in_flight"]) == (1, 1.0, 0)
    assert body["tokens"] == {
        "recorded": 8,
        "trained": 6,
        "masked": {"greedy": 2},
        "dropped": {},
        "empty_interactions": 1,
    }


async def test_a_session_whose_grace_is_over_ends_once_the_store_can_write_again(
    make_service: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("areal.proxy.sessions.AGAIN_S", 0.02)
    service = await make_service(agent={"reward_grace_seconds": 0.1})
    key = await service.start()
    await service.chat(key, "hi")
    ending = service.store.sessions.end
    full = True

    async def end(*args: Any) -> Any:
        if full:
            raise StoreUnready("the disk is full")
        return await ending(*args)

    monkeypatch.setattr(service.store.sessions, "end", end)
    await service.end(key)

    async def said() -> bool:
        return "is ended as soon as it can be written: the disk is full" in caplog.text

    await eventually(said)
    assert (await service.reward(key, 1.0))[0] == 200, "it is open as long as it has not ended"
    full = False

    async def ended() -> bool:
        session = await service.store.sessions.get("task")
        return bool(session and session.ending == "ended")

    await eventually(ended)
    assert not service.proxy.sessions.broken.is_set()


async def test_a_worker_that_cannot_end_idle_sessions_any_more_says_so_to_its_process(
    make_service: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await make_service(agent={"session_timeout_seconds": 0.2})

    async def broken() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(service.proxy.sessions, "expire_idle", broken)
    await eventually(service.proxy.sessions.broken.is_set)
    assert isinstance(service.proxy.sessions.failure, ZeroDivisionError)


async def test_leaving_ends_every_session_that_waits_for_late_rewards(make_service: Any) -> None:
    """Also where one of them was excluded meanwhile, from outside of this worker."""
    service = await make_service(agent={"reward_grace_seconds": 1000})
    sessions, keys = service.proxy.sessions, [await service.start(f"task-{number}") for number in range(2)]
    for key in keys:
        await service.chat(key, "hi")
        await service.end(key)
    await service.store.sessions.exclude("task-0", "wrong", delete=False)
    body = {"messages": [{"role": "user", "content": "x"}]}
    assert (await service.post("/v1/chat/completions", body, keys[0]))[0] == 401
    async with sessions.serving():
        pass
    rows = [await service.store.sessions.get(f"task-{number}") for number in range(2)]
    assert [row.ending for row in rows if row] == ["excluded", "ended"]
