"""One request id on the whole way: the client's own, or one that is made here, in the answer and in the stored interaction."""

from __future__ import annotations

from typing import Any


async def test_the_request_id_is_in_the_answer_the_store_and_the_export(make_service: Any) -> None:
    service = await make_service()
    key = await service.start("t")
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 2}
    status, _, headers = await service.post("/v1/chat/completions", body, key, **{"x-request-id": "agent-77"})
    assert (status, headers["x-request-id"]) == (200, "agent-77")
    _, _, own = await service.post("/v1/chat/completions", {**body, "n": 1}, key)
    recorded = await service.recorded(key)
    assert [one.request_id for one in recorded] == ["agent-77", "agent-77", own["x-request-id"]]
    assert own["x-request-id"].startswith("req_")
    _, exported, _ = await service.post("/rl/export_trajectories", {"session_id": "t"})
    assert [one["request_id"] for one in exported["interactions"]] == [one.request_id for one in recorded]
