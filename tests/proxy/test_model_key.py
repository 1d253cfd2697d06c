"""A key that opens model calls and nothing else, and rewards that are clipped (settled 21)."""

from __future__ import annotations

from typing import Any

import pytest


async def start(service: Any, **more: Any) -> tuple[str, str]:
    """The session's key, and the model-only one."""
    status, body, _ = await service.post("/rl/start_session", {"task_id": "task", "model_key": True, **more})
    assert status == 200, body
    return body["api_key"], body["model_key"]


async def test_it_opens_every_model_route_of_its_session_and_no_other_route(make_service: Any) -> None:
    service = await make_service()
    key, model_key = await start(service)
    await service.chat(model_key, "Hello")
    for path, body in (
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Hello"}]}),
    ):
        assert (await service.post(path, body, model_key))[0] == 200
    async with service.sdk(model_key) as client:
        assert [model.id async for model in await client.models.list()] == ["default"]
    assert len(await service.recorded(key)) == 3
    for path, body in (
        ("/rl/set_reward", {"reward": 1.0}),
        ("/rl/end_session", {}),
        ("/rl/session", {}),
        ("/rl/start_session", {"task_id": "task"}),
        ("/rl/export_trajectories", {"session_id": "task"}),
        ("/rl/exclude_session", {"session_id": "task"}),
    ):
        status, answer, _ = await service.post(path, body, model_key)
        assert status == 403, path
        assert "opens model calls only" in answer["error"]["message"]
    status, answer, _ = await service.post("/rl/start_session", {"task_id": "task", "api_key": model_key})
    assert status == 403
    assert (await service.reward(key, 1.0))[0] == 200
    assert (await service.end(key))["interaction_count"] == 3
    assert (await service.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "?"}]}, model_key))[
        0
    ] == 401


async def test_it_is_the_same_after_a_refresh_and_a_repeated_start(make_service: Any) -> None:
    service = await make_service()
    key, model_key = await start(service, request_id="once")
    assert await start(service, request_id="once") == (key, model_key)
    assert await start(service, api_key=key) == (key, model_key)
    await service.chat(model_key, "Hello")
    assert [one.session_id for one in await service.recorded(key)] == ["task-1"]
    assert "model_key" not in (await service.post("/rl/start_session", {"task_id": "task"}))[1]
    assert (await service.post("/rl/start_session", {"task_id": "task", "model_key": "yes"}))[0] == 400


@pytest.mark.parametrize(("reward", "trained"), [(7.5, 2.0), (-1e6, -2.0), (2.0, 2.0), (0.5, 0.5)])
async def test_a_reward_beyond_the_bound_is_recorded_as_set_and_trained_as_the_bound(
    make_service: Any, reward: float, trained: float
) -> None:
    service = await make_service(agent={"reward_clip": 2.0})
    key = await service.start()
    await service.chat(key, "Hello")
    status, told, _ = await service.reward(key, reward)
    assert (status, told["reward"], told.get("clipped_to", reward)) == (200, reward, trained)
    _, seen, _ = await service.post("/rl/session", {}, key)
    assert (seen["reward_sum"], seen["rewards_clipped"]) == (reward, int(trained != reward))
    await service.end(key)
    _, out, _ = await service.post("/rl/export_trajectories", {"session_id": "task"})
    assert [(one["reward"], one["discounted_reward"]) for one in out["interactions"]] == [(reward, trained)]
    [span] = out["trajectories"][0]["spans"]
    assert (span["raw_reward"], span["reward"], out["reward_clip"]) == (reward, trained, 2.0)
