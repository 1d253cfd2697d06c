"""Streams: order of arrival, stop texts, in-band failures, true statuses, keep-alive, hang-ups."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

SLOW = {"pieces": ["a", "b", "c", "d", "<|im_end|>"], "delay_ms": 50}


async def events_of(service: Any, key: str, **more: Any) -> list[tuple[float, Any]]:
    """(seconds since the request, decoded data) of each event; comments as text."""
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, **more}
    found: list[tuple[float, Any]] = []
    loop = asyncio.get_running_loop()
    started = loop.time()
    async with service.http.post(f"{service.url}/chat/completions", json=body, headers={"x-api-key": key}) as response:
        assert response.status == 200, await response.text()
        assert response.headers["content-type"].startswith("text/event-stream")
        async for raw in response.content:
            line = raw.decode().strip()
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                found.append((loop.time() - started, data if data == "[DONE]" else json.loads(data)))
            elif line:
                found.append((loop.time() - started, line))
    return found


def text_of(events: list[tuple[float, Any]]) -> str:
    return "".join(
        body["choices"][0]["delta"].get("content") or ""
        for _, body in events
        if isinstance(body, dict) and body["choices"]
    )


async def test_tokens_arrive_as_they_are_sampled(make_service: Any) -> None:
    service = await make_service([SLOW])
    key = await service.start()
    async with service.http.post(
        f"{service.url}/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "hi"}], "stream": True},
        headers={"Authorization": f"bearer {key}"},
    ) as response:
        seen = []
        async for raw in response.content:
            line = raw.decode()
            if '"content":"' in line and '"content":""' not in line:
                sent = service.calls()["calls"][0]["sent"]
                seen.append((json.loads(line[6:])["choices"][0]["delta"]["content"], sent))
    assert [text for text, _ in seen] == ["a", "b", "c", "d"]
    assert seen[0][1] < 5  # the first text was here before the last token was sampled


async def test_the_stream_is_role_first_finish_and_done_last_under_one_id(make_service: Any) -> None:
    service = await make_service([SLOW])
    key = await service.start()
    events = await events_of(service, key, stream_options={"include_usage": True})
    bodies = [body for _, body in events]
    assert bodies[0]["choices"][0]["delta"]["role"] == "assistant"
    assert bodies[-3]["choices"][0]["finish_reason"] == "stop"
    assert bodies[-2]["choices"] == []
    assert bodies[-1] == "[DONE]"
    assert len({body["id"] for body in bodies[:-1]}) == 1
    (one,) = await service.recorded(key)
    assert bodies[-2]["usage"]["completion_tokens"] == len(one.completion.token_ids) == 5
    assert one.id == bodies[0]["id"]


@pytest.mark.parametrize(
    ("pieces", "visible", "kept"),
    [(["one ", "tw", "o thr", "ee four", "x"], "one ", 4), (["one ", "tw", "ist"], "one twist", 3)],
)
async def test_T014_stop_texts_across_tokens_are_cut_from_the_text_and_not_from_the_ids(
    make_service: Any, eventually: Any, pieces: list[str], visible: str, kept: int
) -> None:
    service = await make_service([{"pieces": pieces}])
    key = await service.start()
    events = await events_of(service, key, stop=["two three"])
    assert text_of(events) == visible
    assert events[-2][1]["choices"][0]["finish_reason"] == "stop"
    whole = await service.chat(key, "hi", stop="two three")
    assert whole["choices"][0]["message"]["content"] == visible
    for one in await service.recorded(key):
        assert len(one.completion.token_ids) == len(one.completion.logprobs) == kept
        assert one.completion.finish_reason == "stop"
    await eventually(lambda: service.calls()["running"] == 0)


async def test_T013_no_chunk_holds_half_a_character(make_service: Any) -> None:
    raw = "👩‍💻".encode()
    service = await make_service([{"pieces": [{"hex": f"{byte:02x}"} for byte in raw]}])
    key = await service.start()
    assert text_of(await events_of(service, key)) == "👩‍💻"
    (one,) = await service.recorded(key)
    assert len(one.completion.token_ids) == len(raw)


async def test_T019_a_failure_before_the_first_token_keeps_its_status(make_service: Any) -> None:
    service = await make_service([{"pieces": ["a"], "fail": {"at": 0, "status": 503, "message": "cold"}}])
    key = await service.start()
    for stream in (True, False):
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream}
        status, answer, headers = await service.post("/v1/chat/completions", body, key)
        assert status == 502 or status == 503
        assert answer["error"]["message"]
        assert headers["x-should-retry"] == "true"
    assert await service.recorded(key) == ()


async def test_T019_a_failure_in_mid_stream_is_said_in_band_and_never_trained(make_service: Any) -> None:
    service = await make_service([{"pieces": ["a", "b", "c"], "fail": {"at": 2, "message": "out of memory"}}])
    key = await service.start()
    events = await events_of(service, key)
    assert "out of memory" in events[-1][1]["error"]["message"]
    assert all(body["choices"][0]["finish_reason"] is None for _, body in events[:-1])
    (one,) = await service.recorded(key)
    assert (one.tags, one.completion.finish_reason, len(one.completion.token_ids)) == (("aborted",), "error", 2)
    status, _, _ = await service.reward(key, 1.0)
    assert status == 400  # there is no finished interaction


async def test_keep_alive_comments_while_nothing_is_sampled(make_service: Any) -> None:
    service = await make_service([{"pieces": ["late"]}], parts={"hold_s": 0.1, "ping_s": 0.1})
    key, body = await service.start(), {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    await service.engine.pause()
    async with service.http.post(
        f"{service.url}/v1/chat/completions", json=body, headers={"x-api-key": key}
    ) as response:
        for _ in range(2):
            while await response.content.readline() != b": ping\n":
                assert not response.content.at_eof()
        await service.engine.resume()
        assert b'"late"' in await response.read()


@pytest.mark.parametrize("stream", [True, False])
async def test_T018_hanging_up_aborts_the_backend_and_is_not_a_turn(
    make_service: Any, eventually: Any, stream: bool
) -> None:
    endless = {"when": "long", "pieces": ["x"] * 500, "delay_ms": 20}
    service = await make_service([endless, {"pieces": ["ok", "<|im_end|>"]}])
    key = await service.start()
    await service.chat(key, "hi")
    body = {"messages": [{"role": "user", "content": "long"}], "stream": stream}

    async def hang_up() -> None:
        async with aiohttp.ClientSession() as http:
            async with http.post(f"{service.url}/v1/chat/completions", json=body, headers={"x-api-key": key}) as answer:
                await answer.read()

    call = asyncio.create_task(hang_up())
    await eventually(lambda: any(one["sent"] > 2 for one in service.calls()["calls"][1:]))
    call.cancel()
    await asyncio.wait([call])
    await eventually(lambda: service.calls()["aborted"] == 1)
    await service.chat(key, "hi", "ok", "next")
    done = await service.recorded(key)
    assert [one.tags for one in done] == [(), ("aborted",), ()]
    assert done[1].completion.finish_reason == "abort"
    assert done[2].token_parent == done[0].id
    assert (await service.reward(key, 1.0))[1]["interaction_id"] == done[2].id
    status, exported, _ = await service.post("/rl/export_trajectories", {"session_id": "task", "style": "concat"})
    assert status == 200
    aborted = len(done[1].completion.token_ids)
    assert exported["tokens"]["masked"] == {"aborted": aborted}
    assert sum(map(sum, (row["loss_mask"] for row in exported["trajectories"]))) == exported["tokens"]["trained"] == 4


async def test_T020_streamed_and_whole_answers_record_the_same(make_service: Any) -> None:
    service = await make_service([{"pieces": ["<tool_call>", "{}", "</tool_call>", "<|im_end|>"]}])
    key = await service.start()
    await events_of(service, key)
    await service.chat(key, "hi")
    one, two = await service.recorded(key)
    assert one.completion.token_ids.tolist() == two.completion.token_ids.tolist()
    assert one.completion.logprobs.tolist() == two.completion.logprobs.tolist()
    assert len(one.completion.token_ids) == 4


async def test_T010_choices_of_one_stream_are_kept_apart(make_service: Any) -> None:
    service = await make_service(
        [{"pieces": ["a", "b", "<|im_end|>"], "delay_ms": 10}, {"pieces": ["x", "y", "<|im_end|>"], "delay_ms": 10}]
    )
    key = await service.start()
    events = await events_of(service, key, n=2, stream_options={"include_usage": True})
    texts: dict[int, str] = {0: "", 1: ""}
    finishes = {}
    for _, body in events[:-2]:
        choice = body["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content") or ""
        if choice["finish_reason"]:
            finishes[choice["index"]] = choice["finish_reason"]
    assert sorted(texts.values()) == ["ab", "xy"]
    assert finishes == {0: "stop", 1: "stop"}
    assert events[-2][1]["usage"]["completion_tokens"] == 6
    call_id = events[0][1]["id"]
    done = await service.recorded(key)
    assert {one.id for one in done} == {f"{call_id}#0", f"{call_id}#1"}
    assert done[0].prompt_ids.tolist() == done[1].prompt_ids.tolist()
    assert (await service.reward(key, 0.5, f"{call_id}#1"))[0] == 200
    assert {one.id[-1]: one.reward for one in await service.recorded(key)} == {"0": None, "1": 0.5}
    assert (await service.reward(key, 1.0, call_id))[0] == 200
    assert [one.reward for one in await service.recorded(key)] == [1.0, 1.0]
    assert (await service.reward(key, 0.0))[0] == 200
    assert [one.reward for one in await service.recorded(key)] == [0.0, 0.0]
