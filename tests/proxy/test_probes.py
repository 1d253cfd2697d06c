"""What clients ask beside model calls, and what the HTTP edge refuses."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from areal.proxy.app import PREFIXES

HI = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_probes_answer_under_every_prefix_and_record_nothing(make_service: Any, prefix: str) -> None:
    service = await make_service()
    key = await service.start()
    for path in (prefix or "/", f"{prefix}/api/hello"):
        for method in ("HEAD", "GET"):
            async with service.http.request(method, service.url + path) as response:
                assert response.status == 200
    async with service.http.get(f"{service.url}{prefix}/models") as response:
        assert response.status == 401
        assert (await response.json())["error"]["message"].startswith("Invalid API key")
    async with service.http.get(f"{service.url}{prefix}/models", headers={"x-api-key": key}) as response:
        body = await response.json()
    assert body["object"] == "list"
    assert body["has_more"] is False
    assert body["first_id"] == body["data"][0]["id"] == "default"
    assert {"object", "created", "owned_by", "type", "display_name", "created_at"} <= set(body["data"][0])
    assert await service.recorded(key) == ()


async def test_health_counts_sessions_live(make_service: Any) -> None:
    service = await make_service()
    await service.chat(await service.start(), "hi")
    async with service.http.get(f"{service.url}/health") as response:
        assert await response.json() == {"status": "ok", "worker": "w0", "sessions": 1, "calls": 0}


async def test_either_header_or_both_carry_the_key_and_query_strings_mean_nothing(make_service: Any) -> None:
    service = await make_service()
    key = await service.start()
    for headers in (
        {"Authorization": f"bearer {key}"},
        {"x-api-key": key},
        {"Authorization": "Bearer placeholder", "x-api-key": key},
    ):
        async with service.http.post(
            f"{service.url}/v1/chat/completions?beta=true", json=HI, headers=headers
        ) as answer:
            assert answer.status == 200


async def test_bodies_are_bounded_also_after_decompression(make_service: Any) -> None:
    service = await make_service(agent={"max_body_bytes": 4096})
    key = await service.start()
    large = json.dumps({"messages": [{"role": "user", "content": "x" * 100_000}]}).encode()
    for data, encoding in ((large, {}), (gzip.compress(large), {"content-encoding": "gzip"})):
        status, body, _ = await service.post("/v1/chat/completions", data, key, **encoding)
        assert status == 413
        assert "max_body_bytes" in body["error"]["message"]
    status, _, _ = await service.post(
        "/v1/chat/completions", gzip.compress(json.dumps(HI).encode()), key, **{"content-encoding": "gzip"}
    )
    assert status == 200


async def test_T108_an_error_that_quotes_the_request_hides_keys(make_service: Any) -> None:
    service = await make_service()
    key = await service.start()
    _, body, _ = await service.post("/v1/chat/completions", {**HI, "model": {"api_key": "sk-live-abcdef123456"}}, key)
    assert body["error"]["param"] == "model"
    assert "abcdef" not in json.dumps(body)


async def test_a_long_prompt_is_rendered_in_another_thread_to_the_same_ids(make_service: Any) -> None:
    service = await make_service([{"settings": {"max_context": 200_000}}, {"pieces": ["ok", "<|im_end|>"]}])
    key = await service.start()
    long = "word " * 8000
    await service.chat(key, long)
    await service.chat(key, long, "ok", "more")
    one, two = await service.recorded(key)
    assert two.token_parent == one.id
    assert two.prompt_ids[: len(one.prompt_ids)].tolist() == one.prompt_ids.tolist()
