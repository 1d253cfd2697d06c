"""Sessions that are taken out of training by request, and what is left of a deleted one (settled 18)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from areal.base.types import Version

SLOW = {"pieces": ["a", "b", "c", "<|im_end|>"], "delay_ms": 60_000}


async def exclude(service: Any, key: str | None = None, **body: Any) -> tuple[int, Any]:
    status, answer, _ = await service.post("/rl/exclude_session", body, *([key] if key else []))
    return status, answer


async def test_a_running_session_ends_and_is_not_trained(make_service: Any) -> None:
    service = await make_service()
    key = await service.start("task", tags={"user": "Ada", "split": "train", "agent": "coder"})
    await service.chat(key, "Hello")
    assert (await service.store.sessions.get("task")).tags == {"user": "Ada", "split": "train", "agent": "coder"}
    status, answer = await exclude(service, session_id="task", reason="a test account")
    assert (status, answer["fate"]) == (200, "dropped (excluded)")
    assert (await service.store.sessions.get("task")).excluded_because == "a test account"
    status, body, _ = await service.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "?"}]}, key)
    assert status == 401
    assert "excluded" in body["error"]["message"]
    assert service.proxy.sessions.counts()["sessions"] == 0
    assert (await service.store.training.counts()).dropped == {"excluded": 1}
    assert await exclude(service, session_id="task") == (200, answer)


async def test_deleting_cuts_calls_in_flight_and_leaves_the_sums(make_service: Any, eventually: Any) -> None:
    service = await make_service([{"pieces": ["Hi", "<|im_end|>"]}, SLOW])
    key = await service.start("task", tags={"user": "Ada"})
    await service.chat(key, "My name is Ada")
    call = asyncio.create_task(
        service.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "?"}]}, key)
    )
    await eventually(lambda: service.proxy.sessions.counts()["calls"])
    assert await exclude(service, session_id="task", delete=True) == (
        200,
        {"message": "success", "session_id": "task", "fate": "dropped (excluded), content deleted"},
    )
    assert (await call)[0] == 401
    assert await service.store.sessions.interactions("task") == ()
    status, body, _ = await service.post("/rl/export_trajectories", {"session_id": "task"})
    assert status == 404
    assert "was deleted" in body["error"]["message"]
    _, body, _ = await service.post("/rl/session", {}, key)
    assert (body["tokens"]["recorded"], body["tokens"]["dropped"], body["fate"]) == (
        2,
        {"excluded": 2},
        "dropped (excluded), content deleted",
    )
    summary = await service.store.reading.session("task")
    assert (summary.recorded_tokens, dict(summary.session.tags)) == (2, {})


async def test_another_worker_lets_go_of_it(make_service: Any, eventually: Any) -> None:
    here, there = await make_service([SLOW]), await make_service([SLOW], parts={"worker": "w1"})
    key = await there.start("task")
    call = asyncio.create_task(
        there.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "?"}]}, key)
    )
    await eventually(lambda: there.proxy.sessions.counts()["calls"])
    assert (await exclude(here, session_id="task", delete=True))[0] == 200
    await there.proxy.sessions.expire_idle()
    assert (await call)[0] == 401
    assert there.proxy.sessions.counts() == {"sessions": 0, "calls": 0}


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 400, "session_id"),
        ({"session_id": "nobody"}, 404, "no session 'nobody'"),
        ({"session_id": "task", "delete": "yes"}, 400, "delete must be true or false"),
        ({"session_id": "task", "reason": 7}, 400, "reason"),
        ({"session_id": "task", "tags": {"user": "ada"}}, 400, "either the session_id, or the tags"),
        ({"tags": {"user": 1}}, 400, "tags.user"),
        ({"tags": {}}, 400, "session_id"),
    ],
)
async def test_what_is_refused(make_service: Any, body: dict[str, Any], status: int, words: str) -> None:
    service = await make_service()
    await service.start("task")
    said = await exclude(service, **body)
    assert said[0] == status
    assert words in said[1]["error"]["message"]


async def test_all_sessions_of_a_person_are_forgotten_at_once(make_service: Any) -> None:
    service = await make_service()
    for number, user in enumerate(("ada", "ben", "ada", "a'd\"a")):
        key = await service.start(f"t{number}", tags={"user": user, "split": "train"})
        await service.chat(key, "Hello")
        if number == 0:
            await service.end(key)
    [group] = await service.store.training.ready()
    assert await service.store.training.take(Version(1, 1, "x"), {group.id: ["t0"]})
    asked = {"user": "ada", "split": "train"}
    status, answer = await exclude(service, tags=asked)
    assert (status, answer["sessions"]) == (200, {"t0": "in step 1", "t2": "dropped (excluded)"})
    status, answer = await exclude(service, tags=asked, delete=True)
    assert answer["sessions"] == {"t0": "in step 1, content deleted", "t2": "dropped (excluded), content deleted"}
    assert await exclude(service, tags=asked, delete=True) == (200, {"message": "success", "sessions": {}})
    assert (await exclude(service, tags={"user": "a'd\"a"}))[1]["sessions"] == {"t3": "dropped (excluded)"}
    assert len(await service.store.sessions.interactions("t1")) == 1


async def test_only_the_admin_key_excludes(make_service: Any) -> None:
    service = await make_service()
    key = await service.start("task")
    assert (await exclude(service, key, session_id="task"))[0] == 403
    assert (await exclude(service, "sk-sess-w0.forged.mac", session_id="task"))[0] == 401
