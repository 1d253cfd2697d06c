"""One session spoken to in three protocols, over real sockets: the same prompts, errors, streams and records."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from areal.web.sse import SseDecoder

OK = {"pieces": ["He", "y", "<|im_end|>"]}
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
DIALECTS = list(PATHS)


def body_of(dialect: str, text: str = "hi", **more: Any) -> dict[str, Any]:
    sent: dict[str, Any] = {"input": text} if dialect == "responses" else {"messages": [user(text)]}
    return {"model": "default", **sent, **({"max_tokens": 50} if dialect == "messages" else {}), **more}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def stream_of(service: Any, key: str, dialect: str, **more: Any) -> list[tuple[str, Any]]:
    """(event name, decoded data or the text [DONE]) of each event."""
    decoder, found = SseDecoder(), []
    body = body_of(dialect, stream=True, **more)
    async with service.http.post(service.url + PATHS[dialect], json=body, headers={"x-api-key": key}) as response:
        assert response.status == 200, await response.text()
        async for chunk in response.content.iter_any():
            found += [(one.name, one.data) for one in decoder.feed(chunk)]
    return [(name, data.decode() if data == b"[DONE]" else json.loads(data)) for name, data in found]


def text_of(dialect: str, answer: Any) -> str:
    if dialect == "chat":
        return str(answer["choices"][0]["message"]["content"])
    if dialect == "messages":
        return "".join(block.get("text", "") for block in answer["content"])
    return "".join(part["text"] for item in answer["output"] for part in item.get("content", ()))


@pytest.mark.parametrize("prefix", ["", "/v1", "/v1/v1", "/gateway", "/gateway/v1", "/gateway/v1/v1"])
@pytest.mark.parametrize("route", ["/responses", "/messages", "/chat/completions"])
async def test_every_spelling_of_every_route_answers_whatever_the_query(
    make_service: Any, prefix: str, route: str
) -> None:
    service = await make_service([OK])
    dialect = next(name for name, path in PATHS.items() if path.endswith(route))
    status, answer, headers = await service.post(f"{prefix}{route}?beta=true", body_of(dialect), await service.start())
    assert status == 200, answer
    assert text_of(dialect, answer) == "Hey"
    assert headers["request-id"] == headers["x-request-id"]


async def test_one_prompt_one_record_whatever_the_protocol(make_service: Any) -> None:
    service = await make_service([OK])
    key = await service.start()
    ids = []
    for dialect in DIALECTS:
        for stream in (False, True):
            if stream:
                await stream_of(service, key, dialect)
            else:
                _, answer, _ = await service.post(PATHS[dialect], body_of(dialect), key)
                ids.append(answer["id"])
    done = await service.recorded(key)
    assert len({tuple(one.prompt_ids.tolist()) for one in done}) == 1
    assert len({tuple(one.completion.token_ids.tolist()) for one in done}) == 1
    assert [name.partition("-")[0].partition("_")[0] for name in ids] == ["chatcmpl", "resp", "msg"]
    for number, name in enumerate(ids):
        assert name.replace("-", "").replace("_", "").isalnum()
        status, body, _ = await service.reward(key, float(number), name)
        assert (status, body["interaction_id"]) == (200, name)
    assert {one.id: one.reward for one in await service.recorded(key) if one.reward is not None} == {
        name: float(number) for number, name in enumerate(ids)
    }


async def test_T021_cache_control_and_lists_change_no_token(make_service: Any) -> None:
    service = await make_service([OK])
    key = await service.start()
    cached = {"cache_control": {"type": "ephemeral"}}
    parts = [{"type": "text", "text": "Be terse.", **cached}, {"type": "text", "text": "Use SI units."}]
    content = [{"type": "text", "text": "hi", **cached}]
    more = {"messages": [{"role": "user", "content": content}], "system": parts}
    assert (await service.post(PATHS["messages"], body_of("messages", **more), key))[0] == 200
    plain = body_of("messages", system="Be terse.\nUse SI units.")
    assert (await service.post(PATHS["messages"], plain, key))[0] == 200
    one, two = await service.prompts(key)
    assert one == two
    assert one.startswith("<|im_start|>system\nBe terse.\nUse SI units.<|im_end|>")


async def test_T024_either_header_opens_the_same_session(make_service: Any) -> None:
    service = await make_service([OK])
    key = await service.start()
    body = body_of("messages")
    version = {"anthropic-version": "2023-06-01"}
    assert (await service.post(PATHS["messages"], body, None, **{"x-api-key": key}, **version))[0] == 200
    assert (await service.post(PATHS["messages"], body, key))[0] == 200
    status, answer, headers = await service.post(PATHS["messages"], body, None)
    assert (status, answer["type"], answer["error"]["type"]) == (401, "error", "authentication_error")
    assert answer["request_id"] == headers["request-id"]
    assert headers["x-should-retry"] == "false"
    basic = {"Authorization": "Basic abc", "x-api-key": key}
    assert (await service.post(PATHS["messages"], body, None, **basic))[0] == 200
    assert len(await service.recorded(key)) == 3


async def test_T025_stop_reasons_of_real_runs(make_service: Any) -> None:
    service = await make_service([{"pieces": ["one ", "EN", "D", " two", "<|im_end|>"]}])
    key = await service.start()
    for more, reason, sequence, text in (
        ({}, "end_turn", None, "one END two"),
        ({"max_tokens": 2}, "max_tokens", None, "one EN"),
        ({"stop_sequences": ["END"]}, "stop_sequence", "END", "one "),
    ):
        _, answer, _ = await service.post(PATHS["messages"], body_of("messages", **more), key)
        assert (answer["stop_reason"], answer["stop_sequence"], text_of("messages", answer)) == (reason, sequence, text)
        events = await stream_of(service, key, "messages", **more)
        assert events[-2][1]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
        streamed = "".join(data["delta"].get("text", "") for name, data in events if name == "content_block_delta")
        assert streamed == text


@pytest.mark.parametrize("turns", [1, 2])
async def test_T026_count_tokens_says_what_the_call_will_use_and_records_nothing(make_service: Any, turns: int) -> None:
    service = await make_service([OK])
    key = await service.start()
    tool = {"name": "w", "description": "weather", "input_schema": {"type": "object", "properties": {}}}
    messages: list[Any] = [user("hi")]
    for turn in range(turns):
        body = body_of("messages", messages=messages, tools=[tool], system=[{"type": "text", "text": "Be terse."}])
        without = {name: value for name, value in body.items() if name != "max_tokens"}
        status, counted, _ = await service.post("/v1/messages/count_tokens?beta=true", without, key)
        assert (status, list(counted)) == (200, ["input_tokens"])
        assert len(await service.recorded(key)) == turn
        _, answer, _ = await service.post(PATHS["messages"], body, key)
        assert counted["input_tokens"] == answer["usage"]["input_tokens"] > 40
        assert answer["usage"]["output_tokens"] == 3
        messages += [{"role": "assistant", "content": answer["content"]}, user("more")]
    assert (await service.recorded(key))[-1].token_parent is not None or turns == 1


async def test_T026_counting_is_for_sessions_and_no_prompt_is_too_long_for_it(make_service: Any) -> None:
    service = await make_service([{"settings": {"max_context": 100}}, OK])
    key = await service.start()
    many = body_of("messages", "x" * 500)
    status, counted, _ = await service.post("/v1/messages/count_tokens", many, key)
    assert (status, counted["input_tokens"] > 500) == (200, True)
    status, answer, _ = await service.post(PATHS["messages"], many, key)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert f"prompt is too long: {counted['input_tokens']} tokens > 100 maximum" in answer["error"]["message"]
    assert (await service.post("/v1/messages/count_tokens", many, None))[0] == 401
    both = await asyncio.gather(*(service.post("/v1/messages/count_tokens", many, key) for _ in range(10)))
    assert {body["input_tokens"] for _, body, _ in both} == {counted["input_tokens"]}
    status, other, _ = await service.post("/v1/responses/input_tokens", {"input": "x" * 500}, key)
    assert (status, other["input_tokens"]) == (200, counted["input_tokens"])
    assert await service.recorded(key) == ()


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [True, False])
async def test_T028_a_backends_400_stays_a_400_with_its_words(make_service: Any, dialect: str, stream: bool) -> None:
    service = await make_service([{"pieces": [], "fail": {"at": 0, "status": 400, "message": "too long for me"}}])
    key = await service.start()
    status, answer, headers = await service.post(PATHS[dialect], body_of(dialect, stream=stream), key)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert "too long for me" in answer["error"]["message"]
    assert (answer.get("type") == "error") == (dialect == "messages")
    assert headers["content-type"].startswith("application/json")
    assert headers["x-should-retry"] == "false"
    assert await service.recorded(key) == ()


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_T019_a_failure_before_the_first_token_has_its_status_and_a_time_to_retry(
    make_service: Any, dialect: str
) -> None:
    service = await make_service([{"pieces": ["a"], "fail": {"at": 0, "status": 503, "message": "cold"}}])
    key = await service.start()
    status, answer, headers = await service.post(PATHS[dialect], body_of(dialect, stream=True), key)
    assert status == 503
    assert 1 <= int(headers["retry-after"]) <= 30
    assert headers["x-should-retry"] == "true"
    assert answer["error"]["type"] == ("overloaded_error" if dialect == "messages" else "server_error")


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_T019_a_failure_in_mid_stream_is_said_in_the_protocols_own_event(make_service: Any, dialect: str) -> None:
    service = await make_service([{"pieces": ["a", "b", "c"], "fail": {"at": 2, "message": "out of memory"}}])
    key = await service.start()
    events = await stream_of(service, key, dialect)
    name, last = events[-1]
    if dialect == "chat":
        message = last["error"]["message"]
    elif dialect == "messages":
        assert (name, last["type"], last["error"]["type"]) == ("error", "error", "api_error")
        message = last["error"]["message"]
    else:
        assert (name, last["response"]["status"]) == ("response.failed", "failed")
        message = last["response"]["error"]["message"]
    assert "out of memory" in message
    assert not {"message_stop", "response.completed"} & {name for name, _ in events}
    (one,) = await service.recorded(key)
    assert (one.tags, len(one.completion.token_ids)) == (("aborted",), 2)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_tokens_arrive_as_they_are_sampled_in_every_protocol(make_service: Any, dialect: str) -> None:
    service = await make_service([{"pieces": ["a", "b", "c", "d", "<|im_end|>"], "delay_ms": 50}])
    key = await service.start()
    body, seen = body_of(dialect, stream=True), []
    async with service.http.post(service.url + PATHS[dialect], json=body, headers={"x-api-key": key}) as response:
        async for raw in response.content:
            line = raw.decode()
            if line.startswith("data: {") and ('"delta":"' in line or '"text_delta"' in line or '"content":"' in line):
                seen.append(service.calls()["calls"][0]["sent"])
    assert len(seen) >= 4
    assert seen[0] < 5  # the first text was here before the last token was sampled


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_keep_alive_in_the_protocols_own_way(make_service: Any, dialect: str) -> None:
    service = await make_service([{"pieces": ["late"], "delay_ms": 400}], parts={"hold_s": 0.1, "ping_s": 0.1})
    key = await service.start()
    body = body_of(dialect, stream=True)
    async with service.http.post(service.url + PATHS[dialect], json=body, headers={"x-api-key": key}) as response:
        wire = (await response.read()).decode()
    assert wire.count("event: ping\n" if dialect == "messages" else ": ping\n") >= 2
    assert "late" in wire


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_T018_hanging_up_aborts_whatever_the_protocol(make_service: Any, eventually: Any, dialect: str) -> None:
    service = await make_service([{"pieces": ["x"] * 500, "delay_ms": 20}])
    key = await service.start()
    body = body_of(dialect, stream=True, **({"max_tokens": 500} if dialect == "messages" else {}))
    async with service.http.post(service.url + PATHS[dialect], json=body, headers={"x-api-key": key}) as response:
        await response.content.readany()
        response.close()
    await eventually(lambda: service.calls()["aborted"] == 1)
    await eventually(lambda: service.recorded(key))
    assert [one.tags for one in await service.recorded(key)] == [("aborted",)]


async def test_models_named_like_a_judge_are_404_in_each_shape(make_service: Any) -> None:
    service = await make_service([OK])
    key = await service.start()
    for dialect in DIALECTS:
        status, answer, _ = await service.post(PATHS[dialect], {**body_of(dialect), "model": "judge-model"}, key)
        assert (status, answer["error"]["type"]) == (404, "not_found_error")
        assert (answer.get("type") == "error") == (dialect == "messages")


async def test_a_body_that_is_no_json_is_400_in_each_shape(make_service: Any) -> None:
    service = await make_service([OK])
    key = await service.start()
    for dialect in DIALECTS:
        status, answer, _ = await service.post(PATHS[dialect], "{", key)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert (answer.get("type") == "error") == (dialect == "messages")


async def test_T029_T033_thinking_stands_once_in_its_markers_and_a_lost_call_breaks_nothing(make_service: Any) -> None:
    service = await make_service([OK])
    key = await service.start()
    blocks = [
        {"type": "thinking", "thinking": "add them", "signature": "somebody's"},
        {"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1, "b": 1}},
    ]
    result = [{"type": "tool_result", "tool_use_id": "t", "content": "2", "is_error": False}]
    history = [user("1+1?"), {"role": "assistant", "content": blocks}, {"role": "user", "content": result}]
    assert (await service.post(PATHS["messages"], body_of("messages", messages=history), key))[0] == 200
    gone = [{"type": "tool_result", "tool_use_id": "gone", "content": "lost and found"}]
    lost = body_of("messages", messages=[{"role": "user", "content": gone}])
    assert (await service.post(PATHS["messages"], lost, key))[0] == 200
    one, two = await service.prompts(key)
    assert one.count("add them") == one.count("<think>\nadd them\n</think>") == 1
    assert one.index("add them") < one.index('"name": "add"') < one.index("<tool_response>\n2")
    assert "lost and found" in two
