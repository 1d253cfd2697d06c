"""One conversation in many spellings: whatever a client leaves out, sends as null or in parts, the model sees the same tokens.

Through the whole proxy, in every protocol: what counts is the recorded prompt.
"""

from __future__ import annotations

from typing import Any

import pytest

OK = {"pieces": ["He", "y", "<|im_end|>"]}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}


def chat(*messages: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": list(messages), **more}


def responses(*items: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return RESPONSES, {"input": list(items), **more}


def messages(*sent: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return MESSAGES, {"messages": list(sent), "max_tokens": 50, **more}


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def part(text: str, kind: str = "text", **more: Any) -> dict[str, Any]:
    return {"type": kind, "text": text, **more}


async def prompts_of(service: Any, calls: list[tuple[str, dict[str, Any]]]) -> list[list[int]]:
    """The prompt ids of each call, all of one session, whole and streamed in turn."""
    key = await service.start()
    for number, (path, body) in enumerate(calls):
        stream = number % 2 == 1
        async with service.http.post(
            service.url + path, json={**body, "stream": stream}, headers={"x-api-key": key}
        ) as response:
            assert response.status == 200, (body, await response.text())
            await response.read()
    return [one.prompt_ids.tolist() for one in await service.recorded(key)]


async def assert_same(service: Any, calls: list[tuple[str, dict[str, Any]]], *wanted: str) -> str:
    """All prompts are equal; the text of it, which holds the wanted words in their order."""
    found = await prompts_of(service, calls)
    assert len(found) == len(calls)
    for number, ids in enumerate(found):
        assert ids == found[0], calls[number]
    text: str = service.renderer.tokenizer.decode(found[0], skip_special=False)
    at = -1
    for word in wanted:
        at = text.find(word, at + 1)
        assert at >= 0, (word, text)
    return text


async def test_T001_T021_T036_parts_are_another_spelling_of_a_text_in_every_protocol(make_service: Any) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    history = [said("user", "2+2?"), said("assistant", "4"), said("user", "again")]
    calls = [
        chat(said("system", "Be brief."), *history),
        chat(said("developer", [part("Be brief.")]), *(said(one["role"], [part(one["content"])]) for one in history)),
        responses(*history, instructions="Be brief."),
        responses(
            said("system", [part("Be brief.", "input_text")], type="message"),
            said("user", [part("2+2?", "input_text")], type="message"),
            said("assistant", [part("4", "output_text", annotations=[], logprobs=[])], type="message", id="msg_1", status="completed"),
            said("user", "again"),
        ),
        messages(*history, system="Be brief."),
        messages(*(said(one["role"], [part(one["content"], **cached)]) for one in history), system=[part("Be brief.", **cached)]),
    ]  # fmt: skip
    await assert_same(await make_service([OK]), calls, "system\nBe brief.", "user\n2+2?", "assistant\n4", "user\nagain")


async def test_T001_two_parts_have_one_joiner_everywhere(make_service: Any) -> None:
    one, two = "Be terse.", "Use SI units. ďábelské 👩‍💻"
    calls = [
        chat(said("system", f"{one}\n{two}"), said("user", f"{one}\n{two}")),
        chat(said("system", [part(one), part(two)]), said("user", [part(one), part(two)])),
        responses(
            said("user", [part(one, "input_text"), part(two, "input_text")]),
            instructions=f"{one}\n{two}",
        ),
        responses(said("developer", [part(one, "input_text"), part(two, "input_text")]), said("user", f"{one}\n{two}")),
        messages(said("user", [part(one), part(two)]), system=[part(one), part(two)]),
    ]
    await assert_same(await make_service([OK]), calls, "system\nBe terse.\nUse SI", "user\nBe terse.\nUse SI", "👩‍💻")


CALL = {"id": "c1", "type": "function", "function": {"name": "get_n", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "42"}
CHAT_TOOLS = [{"type": "function", "function": {"name": "get_n", "parameters": SCHEMA}}]
RESPONSES_TOOLS = [{"type": "function", "name": "get_n", "parameters": SCHEMA}]
MESSAGES_TOOLS = [{"name": "get_n", "input_schema": SCHEMA}]


async def test_T002_T003_T022_a_call_without_text_and_its_result_in_every_spelling(make_service: Any) -> None:
    asked = said("user", "secret?")
    echoed = {"function_call": None, "refusal": None, "audio": None, "annotations": [], "reasoning_content": None}
    turns: list[dict[str, Any]] = [
        {"content": None}, {}, {"content": []}, {"content": ""}, {"content": [part("")]}, {"content": None, **echoed},
    ]  # fmt: skip
    results: list[Any] = ["42", [part("42")]]
    calls = [
        chat(asked, {"role": "assistant", "tool_calls": [CALL], **turn}, {**RESULT, "content": result}, tools=CHAT_TOOLS)
        for turn in turns
        for result in results
    ]  # fmt: skip
    item = {"type": "function_call", "call_id": "c1", "name": "get_n", "arguments": "{}"}
    for output in ("42", [part("42", "input_text")]):
        answer = {"type": "function_call_output", "call_id": "c1", "output": output}
        calls.append(responses(asked, {**item, "id": "fc_1", "status": "completed"}, answer, tools=RESPONSES_TOOLS))
    use = {"type": "tool_use", "id": "c1", "name": "get_n", "input": {}}
    for content in ("42", [part("42")], ["42"]):
        block = {"type": "tool_result", "tool_use_id": "c1", "content": content}
        calls.append(messages(asked, said("assistant", [use]), said("user", [block]), tools=MESSAGES_TOOLS))
    text = await assert_same(await make_service([OK]), calls, "secret?", "get_n", "42")
    assert "None" not in text
    assert "[{" not in text.partition("</tools>")[2]


async def test_T022_two_blocks_of_a_result_and_none_at_all(make_service: Any) -> None:
    asked = said("user", "ls?")
    use = {"type": "tool_use", "id": "c1", "name": "get_n", "input": {}}
    item = {"type": "function_call", "call_id": "c1", "name": "get_n", "arguments": "{}"}
    turn = {"role": "assistant", "content": None, "tool_calls": [CALL]}

    def result(**more: Any) -> dict[str, Any]:
        return said("user", [{"type": "tool_result", "tool_use_id": "c1", **more}])

    two = [part("a.txt"), part("b.txt")]
    calls = [
        chat(asked, turn, {**RESULT, "content": two}, tools=CHAT_TOOLS),
        responses(
            asked,
            item,
            {"type": "function_call_output", "call_id": "c1", "output": [part(one["text"], "input_text") for one in two]},
            tools=RESPONSES_TOOLS,
        ),
        messages(asked, said("assistant", [use]), result(content=two), tools=MESSAGES_TOOLS),
    ]  # fmt: skip
    text = await assert_same(await make_service([OK]), calls, "ls?", "a.txt\nb.txt")
    assert "[{'type'" not in text
    nothing = [
        chat(asked, turn, {"role": "tool", "tool_call_id": "c1"}, tools=CHAT_TOOLS),
        chat(asked, turn, {**RESULT, "content": None}, tools=CHAT_TOOLS),
        responses(asked, item, {"type": "function_call_output", "call_id": "c1"}, tools=RESPONSES_TOOLS),
        messages(asked, said("assistant", [use]), result(), tools=MESSAGES_TOOLS),
        messages(asked, said("assistant", [use]), result(content=None, is_error=True), tools=MESSAGES_TOOLS),
        messages(asked, said("assistant", [use]), result(content=[]), tools=MESSAGES_TOOLS),
    ]
    text = await assert_same(await make_service([OK]), nothing, "ls?", "get_n", "<tool_response>")
    assert "None" not in text


async def test_T003_empty_keys_of_a_plain_answer_mean_nothing(make_service: Any) -> None:
    empty: list[dict[str, Any]] = [
        {}, {"tool_calls": []}, {"tool_calls": None}, {"function_call": None, "refusal": None, "audio": None, "annotations": []},
        {"refusal": ""}, {"name": None, "reasoning_content": ""}, {"reasoning": None}, {"reasoning": {"effort": "low"}}, {"tool_call_id": None},
    ]  # fmt: skip
    calls = [chat(said("user", "hi"), said("assistant", "hello", **more), said("user", "again")) for more in empty]
    await assert_same(await make_service([OK]), calls, "user\nhi", "assistant\nhello", "user\nagain")


async def test_T005_any_order_of_roles_keeps_every_text(make_service: Any) -> None:
    calls = [
        chat(said("system", "A"), said("system", "B"), said("user", "x"), said("user", "y")),
        responses(said("system", "A"), said("developer", "B"), said("user", "x"), said("user", "y")),
        messages(said("system", "B"), said("user", "x"), said("user", "y"), system="A"),
    ]
    await assert_same(await make_service([OK]), calls, "A", "B", "x", "y")


async def test_T006_no_tools_however_they_are_not_there(make_service: Any) -> None:
    hi = said("user", "hi")
    calls = [chat(hi, **more) for more in ({}, {"tools": []}, {"tools": None}, {"tools": [], "tool_choice": "auto"})]
    calls += [chat(hi, tools=[], tool_choice="none"), chat(hi, tools=None, tool_choice=None)]
    calls += [responses(hi, **more) for more in ({}, {"tools": []}, {"tools": [], "tool_choice": "auto"})]
    calls += [messages(hi, **more) for more in ({}, {"tools": []}, {"tools": None, "tool_choice": {"type": "auto"}})]
    await assert_same(await make_service([OK]), calls, "user\nhi")


@pytest.mark.parametrize("stream", [False, True])
async def test_T007_a_null_limit_is_no_limit(make_service: Any, stream: bool) -> None:
    service = await make_service([{"pieces": ["x"] * 39 + ["<|im_end|>"]}])
    key = await service.start()
    hi = said("user", "count to 30")
    calls = [chat(hi), chat(hi, max_tokens=None), chat(hi, max_completion_tokens=None, max_tokens=None)]
    calls += [responses(hi), responses(hi, max_output_tokens=None), messages(hi, max_tokens=None)]
    for path, body in calls:
        async with service.http.post(
            service.url + path, json={**body, "stream": stream}, headers={"x-api-key": key}
        ) as response:
            assert response.status == 200
            await response.read()
    for one in await service.recorded(key):
        assert (len(one.completion.token_ids), one.completion.finish_reason) == (40, "stop")


async def test_T023_results_stay_with_their_calls_and_the_text_behind_them_is_a_turn(make_service: Any) -> None:
    asked = said("user", "both?")
    uses = [{"type": "tool_use", "id": f"tu{k}", "name": "get_n", "input": {}} for k in (1, 2)]
    results = [{"type": "tool_result", "tool_use_id": f"tu{k}", "content": str(k)} for k in (1, 2)]
    chat_calls = [{**CALL, "id": f"tu{k}"} for k in (1, 2)]
    chat_results = [{**RESULT, "tool_call_id": f"tu{k}", "content": str(k)} for k in (1, 2)]
    turn = {"role": "assistant", "tool_calls": chat_calls}
    calls = [
        messages(asked, said("assistant", uses), said("user", [*results, part("go on")]), tools=MESSAGES_TOOLS),
        messages(asked, said("assistant", uses), said("user", [part("go on"), *results]), tools=MESSAGES_TOOLS),
        messages(
            asked, said("assistant", uses), said("user", results), said("user", [part("go on")]), tools=MESSAGES_TOOLS
        ),
        chat(asked, turn, *chat_results, said("user", "go on"), tools=CHAT_TOOLS),
    ]
    text = await assert_same(await make_service([OK]), calls, "both?", "get_n", "get_n", "<tool_response>\n1\n")
    assert text.index("<tool_response>\n1\n") < text.index("<tool_response>\n2\n") < text.index("user\ngo on")


UNKNOWN = {
    "context_management": {"edits": []},
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "metadata": {"user_id": "u"},
    "service_tier": "auto",
    "safeguards": [{"type": "x"}],
    "never_heard_of": {"a": [1, None]},
}


async def test_T027_fields_that_nobody_knows_change_nothing_in_any_protocol(make_service: Any) -> None:
    service = await make_service([OK])
    hi = said("user", "hi")
    calls = [chat(hi), chat(hi, **UNKNOWN), responses(hi, **UNKNOWN), messages(hi, **UNKNOWN)]
    calls += [(f"{path}?beta=true&x={{}}", body) for path, body in calls]
    await assert_same(service, calls, "user\nhi")
    for call in service.calls()["calls"]:
        assert set(call) == {"request_id", "session_id", "prompt_tokens", "line", "sent", "state"}
    key = await service.start("headers")
    status, _, _ = await service.post(calls[3][0], calls[3][1], key, **{"anthropic-beta": "x-2026-01-01"})
    assert status == 200


async def test_T029_reasoning_of_the_history_stands_once_in_its_markers(make_service: Any) -> None:
    asked, result = said("user", "1+1?"), "2"
    thinking = {"type": "thinking", "thinking": "add them", "signature": "s1"}
    use = {"type": "tool_use", "id": "c1", "name": "get_n", "input": {}}
    block = {"type": "tool_result", "tool_use_id": "c1", "content": result}
    turn = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "add them"}
    item = {"type": "function_call", "call_id": "c1", "name": "get_n", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": result}
    reasoning = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "add them"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "add them"}], "encrypted_content": "zzz"},
    ]
    calls = [
        messages(asked, said("assistant", [thinking, use]), said("user", [block]), tools=MESSAGES_TOOLS),
        messages(asked, said("assistant", [{**thinking, "signature": ""}, use]), said("user", [block]), tools=MESSAGES_TOOLS),
        messages(
            asked,
            said("assistant", [{"type": "redacted_thinking", "data": "x"}, thinking, use]),
            said("user", [block]),
            tools=MESSAGES_TOOLS,
        ),
        chat(asked, turn, {**RESULT, "content": result}, tools=CHAT_TOOLS),
        *(responses(asked, one, item, output, tools=RESPONSES_TOOLS) for one in reasoning),
    ]  # fmt: skip
    text = await assert_same(
        await make_service([OK]), calls, "<think>\nadd them\n</think>", "get_n", "<tool_response>\n2"
    )
    assert text.count("add them") == 1


async def test_T033_a_result_without_its_call_and_a_call_without_its_result(make_service: Any) -> None:
    service = await make_service([OK])
    key = await service.start()
    gone = {"type": "tool_result", "tool_use_id": "gone", "content": "lost and found"}
    use = {"type": "tool_use", "id": "c1", "name": "get_n", "input": {}}
    item = {"type": "function_call", "call_id": "c1", "name": "get_n", "arguments": "{}"}
    calls = [
        messages(said("user", [gone])),
        messages(said("user", "x"), said("assistant", [use]), said("user", "well?"), tools=MESSAGES_TOOLS),
        chat({**RESULT, "content": "lost and found"}),
        chat(said("user", "x"), {"role": "assistant", "tool_calls": [CALL]}, said("user", "well?"), tools=CHAT_TOOLS),
        responses({"type": "function_call_output", "call_id": "gone", "output": "lost and found"}),
        responses(said("user", "x"), item, said("user", "well?"), tools=RESPONSES_TOOLS),
    ]
    for path, body in calls:
        status, answer, _ = await service.post(path, body, key)
        assert status == 200, answer
    prompts = await service.prompts(key)
    assert all("lost and found" in prompt or "well?" in prompt for prompt in prompts)
    assert prompts[1] == prompts[3] == prompts[5]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_T012_what_is_no_request_is_a_json_400_in_each_shape_and_records_nothing(
    make_service: Any, path: str
) -> None:
    service = await make_service([OK])
    key = await service.start()
    what = "input" if path == RESPONSES else "messages"
    good: Any = "hi" if path == RESPONSES else [said("user", "hi")]
    bodies: list[Any] = [
        "", "not json", "[1]", "null", '"x"', '{"a":', "\ufeff{}", {what: []}, {what: None}, {what: 5}, {what: [1]}, {}, {what: [{"role": "robot", "content": "x"}]},
        {what: good, "temperature": "hot"}, {what: good, "temperature": -1}, {what: good, "top_p": 2}, {what: good, "stream": "yes"},
        {what: good, "model": 5}, {what: good, "tools": "f"}, {what: good, "seed": 1.5}, {what: good, "stop_token_ids": ["a"]},
        f'{{"{what}":"hi","temperature":NaN}}', f'{{"{what}":"\\ud800"}}',
    ]  # fmt: skip
    for body in bodies:
        for kind in ("application/json", "text/plain"):
            status, answer, headers = await service.post(path, body, key, **{"content-type": kind})
            assert (status, headers["content-type"], headers["x-should-retry"]) == (400, "application/json", "false"), (
                body
            )
            assert answer["error"]["type"] == "invalid_request_error"
            assert answer["error"]["message"]
            assert (answer.get("type") == "error") == (path == MESSAGES)
            if path != MESSAGES:
                assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert await service.recorded(key) == ()
    assert service.calls()["calls"] == []
