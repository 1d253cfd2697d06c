"""Chat calls through a real socket: what the client sees, and what is recorded for training."""

from __future__ import annotations

from typing import Any

import numpy as np

SPOKEN = {"pieces": ["Hel", "lo", "<|im_end|>"], "logprobs": [-0.5, -0.25, -0.125]}


async def test_one_call_is_answered_and_recorded_as_sampled(make_service: Any) -> None:
    service = await make_service([SPOKEN])
    key = await service.start("my-task-0")
    answer = await service.chat(key, "hi")
    assert answer["id"].startswith("chatcmpl-")
    assert answer["id"].removeprefix("chatcmpl-").isalnum()
    assert len(answer["id"]) >= 9 + 24
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["logprobs"]) == ("Hello", "stop", None)
    (one,) = await service.recorded(key)
    assert one.id == answer["id"]
    assert one.completion.logprobs.tolist() == [-0.5, -0.25, -0.125]
    assert one.completion.versions.tolist() == [3, 3, 3]
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["usage"]["prompt_tokens"] == len(one.prompt_ids)
    assert (await service.end(key))["interaction_count"] == 1


async def test_a_continued_conversation_keeps_the_sampled_ids(make_service: Any) -> None:
    service = await make_service([SPOKEN, {"pieces": ["Fine", "<|im_end|>"]}])
    key = await service.start()
    first = await service.chat(key, "hi")
    await service.chat(key, "hi", "Hello", "how are you?")
    one, two = await service.recorded(key)
    joined = np.concatenate([one.prompt_ids, one.completion.token_ids])
    assert two.prompt_ids[: len(joined)].tolist() == joined.tolist()
    assert (two.token_parent, two.credit_parent, two.branch_reason) == (first["id"], first["id"], "")
    status, body, _ = await service.post("/rl/export_trajectories", {"session_id": "task", "style": "concat"})
    assert status == 200
    assert len(body["trajectories"]) == 1
    assert sum(body["trajectories"][0]["loss_mask"]) == body["tokens"]["trained"] == 5
