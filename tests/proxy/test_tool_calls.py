"""Tool calls and reasoning through the whole proxy, with the OpenAI SDK: what agents get, and what is recorded of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from areal.chat import ChatTemplate, JinjaRenderer, scripted_renderer

STRIPPING = Path(__file__).parents[1] / "chat" / "templates" / "thinking_stripped.jinja"
NUMBER = {"type": "integer"}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}}},
    },
    {"type": "function", "function": {"name": "write_file", "parameters": {"type": "object", "properties": {}}}},
]
END = "<|im_end|>"
HI = [{"role": "user", "content": "2+2?"}]


def tokens(text: str, width: int = 3) -> list[str]:
    """A text as tokens of a few characters, and its end."""
    return [*(text[k : k + width] for k in range(0, len(text), width)), END]


def spoken(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def asked(client: Any, stream: bool, messages: Sequence[Any] = HI, **more: Any) -> Any:
    """One answer as (message, finish_reason), folded from the stream's chunks by the client's own rules if it streams."""
    sent = {"model": "default", "messages": list(messages), "tools": TOOLS, **more}
    if not stream:
        choice = (await client.chat.completions.create(**sent)).choices[0]
        return choice.message, choice.finish_reason
    async with client.chat.completions.stream(**sent) as events:
        async for _ in events:
            pass
        choice = (await events.get_final_completion()).choices[0]
    return choice.message, choice.finish_reason


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


BOTH = pytest.mark.parametrize("stream", [False, True])
T017 = '{"path":"n.md","content":"see </tool_call> here"}'


@BOTH
async def test_T017_T020_one_call_whole_or_streamed_is_recorded_alike(
    make_service: Any, tmp_path: Any, stream: bool
) -> None:
    text = f'<tool_call>\n{{"name":"write_file","arguments":{T017}}}\n</tool_call>'
    service = await make_service([{"pieces": ["<tool_call>", *tokens(text.removeprefix("<tool_call>"))]}])
    async with service.sdk(await service.start()) as client:
        message, finish = await asked(client, stream)
        assert (message.content or "", calls_of(message), finish) == ("", [("write_file", T017)], "tool_calls")
        assert json.loads(message.tool_calls[0].function.arguments)["content"] == "see </tool_call> here"
        await asked(client, not stream)
        one, two = await service.recorded(client.api_key)
    assert one.completion.token_ids.tolist() == two.completion.token_ids.tolist()
    assert one.completion.logprobs.tolist() == two.completion.logprobs.tolist()
    tokenizer = scripted_renderer(tmp_path / "script.jsonl").tokenizer
    sampled = tokenizer.decode(one.completion.token_ids.tolist(), skip_special=False)
    assert sampled == text + END  # markers and the end stay in the ids


@BOTH
async def test_T016_parallel_calls_and_text_before_them(make_service: Any, stream: bool) -> None:
    text = "I look.\n" + spoken("add", '{"a":2,"b":2}') + "\n" + spoken("write_file", '{"city":"Oslo"}')
    service = await make_service([{"pieces": tokens(text)}])
    async with service.sdk(await service.start()) as client:
        message, finish = await asked(client, stream)
    assert (message.content, finish) == ("I look.", "tool_calls")
    assert calls_of(message) == [("add", '{"a":2,"b":2}'), ("write_file", '{"city":"Oslo"}')]
    ids = [call.id for call in message.tool_calls]
    assert len(set(ids)) == 2
    assert all(one.isalnum() and len(one) <= 40 for one in ids)


async def test_T010_parsers_of_several_choices_share_nothing(make_service: Any) -> None:
    lines = [{"pieces": tokens(spoken("add", f'{{"x":{k}}}'), 2), "delay_ms": 1} for k in (1, 2)]
    service = await make_service(lines)
    async with service.sdk(await service.start()) as client:
        folded: dict[int, str] = {}
        finishes = {}
        stream = await client.chat.completions.create(
            model="default", messages=HI, tools=TOOLS, n=2, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            for choice in chunk.choices:
                for call in choice.delta.tool_calls or ():
                    assert call.index == 0
                    folded[choice.index] = folded.get(choice.index, "") + (call.function.arguments or "")
                finishes[choice.index] = choice.finish_reason or finishes.get(choice.index)
            usage = chunk.usage
        recorded = await service.recorded(client.api_key)
    assert sorted(folded.values()) == ['{"x":1}', '{"x":2}']
    assert finishes == {0: "tool_calls", 1: "tool_calls"}
    assert usage.completion_tokens == sum(len(one.completion.token_ids) for one in recorded)
    assert recorded[0].prompt_ids.tolist() == recorded[1].prompt_ids.tolist()


@BOTH
@pytest.mark.parametrize(
    ("text", "limit", "finish", "calls"),
    [
        (spoken("add", '{"a": 1}'), None, "tool_calls", [("add", '{"a": 1}')]),
        ("hi", None, "stop", []),
        (spoken("add", '{"a": 1}'), 16, "length", [("add", '{"a": 1')]),
        (spoken("add", '{"a": 1}'), 5, "length", []),
    ],
)
async def test_T011_finish_reason_says_what_the_message_holds(
    make_service: Any, stream: bool, text: str, limit: int | None, finish: str, calls: list[tuple[str, str]]
) -> None:
    service = await make_service([{"pieces": tokens(text)}])
    key = await service.start()
    body = {"messages": HI, "tools": TOOLS, **({"max_tokens": limit} if limit else {})}
    if stream:
        async with service.http.post(
            f"{service.url}/v1/chat/completions",
            json={**body, "stream": True},
            headers={"Authorization": f"Bearer {key}"},
        ) as response:
            lines = [line.removeprefix("data: ") for line in (await response.text()).split("\n\n") if line]
        choices = [json.loads(line)["choices"][0] for line in lines if line != "[DONE]"]
        deltas = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
        got = (
            [(deltas[0]["function"]["name"], "".join(call["function"]["arguments"] for call in deltas))]
            if deltas
            else []
        )
        content = "".join(choice["delta"].get("content") or "" for choice in choices)
        said = choices[-1]["finish_reason"]
    else:
        _, answer, _ = await service.post("/v1/chat/completions", body, key)
        message, said = answer["choices"][0]["message"], answer["choices"][0]["finish_reason"]
        got = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        content = message["content"] or ""
    assert (said, got) == (finish, calls)
    assert content == ("" if calls else "".join(tokens(text)[:-1][:limit]))  # what is no call yet is text


async def test_calls_are_read_only_where_there_are_tools(make_service: Any) -> None:
    text = spoken("add", "{}")
    service = await make_service([{"pieces": tokens(text)}])
    async with service.sdk(await service.start()) as client:
        for more in ({"tools": []}, {"tool_choice": "none"}):
            message, finish = await asked(client, False, **more)
            assert (message.content, message.tool_calls, finish) == (text, None, "stop")
        status, body, _ = await service.post(
            "/v1/chat/completions", {"messages": HI, "tool_choice": "required"}, client.api_key
        )
    assert (status, body["error"]["param"]) == (400, "tool_choice")


LOOP = [
    {"when": r"2\+2\?<\|im_end\|>\n<\|im_start\|>assistant\n$", "pieces": tokens(
        "<think>\nadd them\n</think>\n\nSure. " + spoken("add", '{"b":2, "a":"\\u00e9"}') + "\n" + spoken("add", "{}"))},
    {"when": r"</tool_response><\|im_end\|>\n<\|im_start\|>assistant\n$", "pieces": tokens("<think>\n4\n</think>\n\nIt is 4.")},
    {"when": r"thanks<\|im_end\|>\n<\|im_start\|>assistant\n$", "pieces": tokens("Bye.")},
]  # fmt: skip


@BOTH
@pytest.mark.parametrize("echo", ["verbatim", "re-serialised", "results swapped"])
async def test_T055_a_tool_loop_is_one_row_and_nothing_is_tokenised_twice(
    make_service: Any, stream: bool, echo: str
) -> None:
    service = await make_service(LOOP)
    async with service.sdk(await service.start()) as client:
        first, finish = await asked(client, stream)
        assert (first.reasoning_content, first.content, finish) == ("add them", "Sure.", "tool_calls")
        assert calls_of(first) == [("add", '{"b":2, "a":"\\u00e9"}'), ("add", "{}")]
        arguments = [call.function.arguments for call in first.tool_calls]
        if echo == "re-serialised":
            arguments = ['{"a": "é", "b": 2}', "{ }"]
        turn = {
            "role": "assistant",
            "content": first.content,
            "tool_calls": [
                {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": text}}
                for call, text in zip(first.tool_calls, arguments, strict=True)
            ],
        }
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": str(k)} for k, call in enumerate(first.tool_calls)
        ]
        if echo == "results swapped":
            results.reverse()
        history = [*HI, turn, *results]
        second, finish = await asked(client, stream, history)
        assert (second.reasoning_content, second.content, finish) == ("4", "It is 4.", "stop")
        results.reverse()  # and now the other way round
        again = [
            *HI,
            turn,
            *results,
            {"role": "assistant", "content": "It is 4."},
            {"role": "user", "content": "thanks"},
        ]
        third, _ = await asked(client, stream, again)
        assert third.content == "Bye."
        recorded = await service.recorded(client.api_key)
        _, summary, _ = await service.post("/rl/session", {}, client.api_key)
    assert (summary["merge_rate"], summary["branches"]) == (1.0, {})
    status, body, _ = await service.post("/rl/export_trajectories", {"session_id": "task", "style": "concat"})
    assert status == 200
    (row,) = body["trajectories"]
    sampled = [one.completion.token_ids.tolist() for one in recorded]
    assert sum(row["loss_mask"]) == sum(map(len, sampled)) == body["tokens"]["trained"]
    for span, ids in zip(row["spans"], sampled, strict=True):
        assert row["token_ids"][span["start"] : span["end"]] == ids


async def test_T055_other_arguments_under_the_same_id_are_a_branch_with_its_reason(make_service: Any) -> None:
    service = await make_service([{"pieces": tokens(spoken("add", '{"a": 1}'))}])
    async with service.sdk(await service.start()) as client:
        first, _ = await asked(client, False)
        turn = first.model_dump(exclude_none=True)
        turn["tool_calls"][0]["function"]["arguments"] = '{"a": 2}'
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "3"}
        await asked(client, False, [*HI, turn, result])
        _, two = await service.recorded(client.api_key)
    assert (two.token_parent, two.branch_reason) == (None, "answer_changed")
    assert two.messages[1].tool_calls[0].arguments == '{"a": 2}'


@BOTH
async def test_malformed_arguments_reach_the_client_and_come_back_without_an_error(
    make_service: Any, stream: bool
) -> None:
    broken = spoken("add", '{"a": "x"y"}')
    service = await make_service([{"when": "tool_response", "pieces": tokens("Sorry.")}, {"pieces": tokens(broken)}])
    key = await service.start()
    async with service.sdk(key) as client:
        if stream:
            text = ""
            async for chunk in await client.chat.completions.create(
                model="default", messages=HI, tools=TOOLS, stream=True
            ):
                for call in chunk.choices[0].delta.tool_calls or ():
                    text += call.function.arguments or ""
            (one,) = await service.recorded(key)
            assert one.reply.tool_calls[0].arguments == text
        else:
            message, _ = await asked(client, stream)
            text = message.tool_calls[0].function.arguments
        assert text == '{"a": "x"y"}}'
        (one,) = await service.recorded(key)
        call = {"id": one.reply.tool_calls[0].id, "type": "function", "function": {"name": "add", "arguments": text}}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "invalid arguments"}
        answer, _ = await asked(
            client, False, [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
        )
        assert answer.content == "Sorry."
        _, two = await service.recorded(key)
    assert two.token_parent == one.id


@BOTH
async def test_reasoning_is_no_content_whoever_opens_the_block(make_service: Any, stream: bool) -> None:
    service = await make_service([{"pieces": tokens("<think>\n\u00e9 adds\n</think>\n\n4 ")}])
    async with service.sdk(await service.start()) as client:
        message, finish = await asked(client, stream, tools=[])
    assert (message.reasoning_content, message.content, finish) == ("é adds", "4 ", "stop")


async def test_another_format_by_name(make_service: Any, tmp_path: Any) -> None:
    line = {"pieces": tokens('[TOOL_CALLS]add[ARGS]{"a": 1}')}
    (tmp_path / "script.jsonl").write_text(json.dumps(line) + "\n")
    renderer = scripted_renderer(tmp_path / "script.jsonl", tool_call_parser="mistral")
    service = await make_service([line], parts={"renderer": renderer})
    async with service.sdk(await service.start()) as client:
        message, finish = await asked(client, True)
    assert (calls_of(message), finish, len(message.tool_calls[0].id)) == ([("add", '{"a": 1}')], "tool_calls", 9)


@pytest.mark.parametrize(("template", "rows"), [("stripping", 2), ("keeping", 1)])
async def test_T051_reasoning_templates_of_both_kinds(
    make_service: Any, tmp_path: Any, template: str, rows: int
) -> None:
    lines = [
        {"when": "3.3", "pieces": tokens("<think>\nagain\n</think>\n\n6")},
        {"pieces": tokens("<think>\nadd\n</think>\n\n4")},
    ]
    (tmp_path / "script.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    renderer = scripted_renderer(tmp_path / "script.jsonl")
    if template == "stripping":
        renderer = JinjaRenderer(renderer.tokenizer, ChatTemplate(STRIPPING.read_text("utf-8")))
    service = await make_service(lines, parts={"renderer": renderer})
    async with service.sdk(await service.start()) as client:
        first, _ = await asked(client, True, tools=[])
        assert (first.content, first.reasoning_content) == ("4", "add")
        turns = [*HI, {"role": "assistant", "content": "4"}, {"role": "user", "content": "and 3+3?"}]
        second, _ = await asked(client, False, turns, tools=[])
        assert (second.content, second.reasoning_content) == ("6", "again")
        one, two = await service.recorded(client.api_key)
    prompt = renderer.tokenizer.decode(two.prompt_ids.tolist(), skip_special=False)
    assert prompt.count("add") == (1 if template == "keeping" else 0)
    assert two.credit_parent == one.id
    expected = "" if template == "keeping" else "reasoning_stripped"
    assert two.branch_reason == expected
    for style, count in (("individual", 2), ("concat", rows)):
        _, body, _ = await service.post("/rl/export_trajectories", {"session_id": "task", "style": style})
        assert len(body["trajectories"]) == count
        trained = sum(sum(row["loss_mask"]) for row in body["trajectories"])
        assert trained == len(one.completion.token_ids) + len(two.completion.token_ids)
