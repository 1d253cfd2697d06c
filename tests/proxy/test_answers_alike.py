"""The same answer of the model in three protocols, whole and streamed: one text, one record, each protocol's own order of events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.proxy.asking import DIALECTS, PATHS, Said, ask
from tests.proxy.record_checks import check_exports

END = "<|im_end|>"
EACH = pytest.mark.parametrize("dialect", DIALECTS)
BOTH = pytest.mark.parametrize("stream", [False, True])


def tokens(text: str, width: int = 3) -> list[str]:
    return [*(text[k : k + width] for k in range(0, len(text), width)), END]


def spoken(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def raw(*pieces: bytes) -> list[dict[str, str]]:
    return [{"hex": piece.hex()} for piece in pieces]


SPLIT = {
    "ďábelské": raw(b"\xc4", b"\x8f", b"\xc3\xa1", b"belsk", b"\xc3", b"\xa9"),
    "👩‍💻": raw(*(bytes([byte]) for byte in "👩‍💻".encode())),
    "a\u0301 é": raw(b"a\xcc", b"\x81 \xc3", b"\xa9"),
}


@EACH
@BOTH
@pytest.mark.parametrize("text", list(SPLIT))
async def test_T013_no_half_characters_in_any_protocol(
    make_service: Any, dialect: str, stream: bool, text: str
) -> None:
    pieces = SPLIT[text]
    service = await make_service([{"pieces": pieces, "logprobs": [-0.5 - k / 8 for k in range(len(pieces))]}])
    key = await service.start()
    said = await ask(service, key, dialect, stream=stream)
    assert said.text == text
    assert not any("\ufffd" in json.dumps(data, ensure_ascii=False) for _, data in said.events)
    if stream:
        assert "".join(said.texts()) == text
    (one,) = await service.recorded(key)
    assert one.completion.logprobs.tolist() == [-0.5 - k / 8 for k in range(len(pieces))]
    assert b"".join(map(service.renderer.tokenizer.piece, one.completion.token_ids.tolist())) == text.encode()


@EACH
@BOTH
async def test_T013_a_character_cut_off_by_the_limit_is_one_mark_at_the_end(
    make_service: Any, dialect: str, stream: bool
) -> None:
    service = await make_service([{"pieces": ["ok ", *raw(b"\xf0", b"\x9f", b"\x91")], "finish": "length"}])
    key = await service.start()
    said = await ask(service, key, dialect, stream=stream)
    assert (said.text, said.finish) == ("ok \ufffd", "length")
    if stream:
        assert said.texts() == ["ok ", "\ufffd"]


@EACH
@BOTH
@pytest.mark.parametrize(
    ("pieces", "stops", "text", "kept"),
    [
        (["one ", "tw", "o thr", "ee four", "x"], ["two three"], "one ", 4),
        (["one ", "tw", "ist"], ["two three"], "one twist", 3),
        (["one ", "tw"], ["two three"], "one tw", 2),
        (["a", "b", "c", "d"], ["cd", "bc"], "a", 3),
        (["é", "ďá", "bel", "x"], ["ábe"], "éď", 3),
        (["END", "x"], ["END"], "", 1),
    ],
)
async def test_T014_stop_texts_across_tokens_in_any_protocol(
    make_service: Any, dialect: str, stream: bool, pieces: list[str], stops: list[str], text: str, kept: int
) -> None:
    service = await make_service([{"pieces": pieces}])
    key = await service.start()
    said = await ask(service, key, dialect, stream=stream, stop=stops)
    assert (said.text, said.finish) == (text, "stop")
    (one,) = await service.recorded(key)
    assert len(one.completion.token_ids) == len(one.completion.logprobs) == kept
    assert one.completion.finish_reason == "stop"
    if dialect == "messages":
        stopped = kept < len(pieces) or text == "one "
        assert (said.body["stop_reason"] == "stop_sequence") == stopped
        assert (said.body["stop_sequence"] in stops) == stopped


@pytest.mark.parametrize("n", [1, 3])
async def test_T015_the_usage_chunk_comes_last_and_only_when_asked_for(make_service: Any, n: int) -> None:
    service = await make_service([{"pieces": ["He", "y", END]}])
    key = await service.start()
    whole = await ask(service, key, "chat", stream=False, n=n)
    for options in (None, {"include_usage": False}, {"include_usage": True}, {"include_usage": None}, {}):
        more = {} if options is None else {"stream_options": options}
        said = await ask(service, key, "chat", stream=True, n=n, **more)
        chunks = [data for _, data in said.events]
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert all("choices" in chunk for chunk in chunks)
        asked = bool(options and options.get("include_usage"))
        assert [not chunk["choices"] for chunk in chunks] == [False] * (len(chunks) - asked) + [True] * asked
        if asked:
            assert chunks[-1]["usage"] == whole.body["usage"]
            assert chunks[-1]["usage"]["completion_tokens"] == 3 * n
        assert all(chunk.get("usage") is None for chunk in chunks[: len(chunks) - asked])


ARGUMENTS = {
    "plain": '{"a":2,"b":2}',
    "closing marker inside": '{"path":"n.md","content":"see </tool_call> here"}',
    "opening marker inside": '{"content":"<tool_call>{\\"name\\": \\"x\\"}"}',
    "quotes and newlines": '{"c":"say \\"hi\\"\\n\\\\ { } [ ]"}',
    "unicode": '{"c":"ďábel 👩‍💻 \\u00e9"}',
    "nested": '{"a":{"b":[1,{"c":null}]},"d":""}',
}


@EACH
@BOTH
@pytest.mark.parametrize("kind", list(ARGUMENTS))
async def test_T016_T017_T020_T031_two_calls_whatever_stands_in_their_arguments(
    make_service: Any, dialect: str, stream: bool, kind: str
) -> None:
    arguments = ARGUMENTS[kind]
    text = "I look.\n" + spoken("write_file", arguments) + "\n" + spoken("get_weather", '{"city":"Oslo"}')
    service = await make_service([{"pieces": ["I look.\n", "<tool_call>", *tokens(text.partition("<tool_call>")[2])]}])
    key = await service.start()
    said = await ask(service, key, dialect, stream=stream, tools=True)
    assert (said.text, said.finish) == ("I look.", "tool_calls")
    assert [name for name, _ in said.calls] == ["write_file", "get_weather"]
    assert [json.loads(sent) for _, sent in said.calls] == [json.loads(arguments), {"city": "Oslo"}]
    if dialect != "messages" or stream:
        assert _argument_texts(dialect, said) == [arguments, '{"city":"Oslo"}']  # as they were sampled, byte for byte
    ids = [call.id for call in (await service.recorded(key))[0].reply.tool_calls]
    assert len(set(ids)) == 2
    await ask(service, key, dialect, stream=not stream, tools=True)
    one, two = await service.recorded(key)
    assert one.completion.token_ids.tolist() == two.completion.token_ids.tolist()
    assert one.completion.logprobs.tolist() == two.completion.logprobs.tolist()
    assert service.renderer.tokenizer.decode(one.completion.token_ids.tolist(), skip_special=False) == text + END


def _argument_texts(dialect: str, said: Said) -> list[str]:
    if dialect == "messages":
        found: dict[int, str] = {}
        for name, data in said.events:
            if name == "content_block_delta" and "partial_json" in data["delta"]:
                found[data["index"]] = found.get(data["index"], "") + data["delta"]["partial_json"]
        return list(found.values())
    return [sent for _, sent in said.calls]


@pytest.mark.parametrize("n", [2, 4])
async def test_T010_choices_share_no_parser_state_with_reasoning_and_calls(make_service: Any, n: int) -> None:
    lines = [
        {
            "pieces": tokens(f"<think>\nthought {k}\n</think>\n\nsaid {k} " + spoken("f", f'{{"x":{k}}}'), 2),
            "delay_ms": 1,
        }
        for k in range(n)
    ]
    service = await make_service(lines)
    key = await service.start()
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "n": n,
    }
    async with service.http.post(
        service.url + PATHS["chat"],
        json={**body, "stream": True, "stream_options": {"include_usage": True}},
        headers={"x-api-key": key},
    ) as response:
        lines_sent = [line[6:] for line in (await response.text()).split("\n\n") if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines_sent]
    folded = [{"content": "", "reasoning_content": "", "arguments": "", "finish": None} for _ in range(n)]
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        into = folded[choice["index"]]
        for key_of in ("content", "reasoning_content"):
            into[key_of] += choice["delta"].get(key_of) or ""
        for call in choice["delta"].get("tool_calls", ()):
            assert call["index"] == 0
            into["arguments"] += call["function"]["arguments"]
        into["finish"] = choice["finish_reason"] or into["finish"]
    recorded = await service.recorded(key)
    assert sorted(one["arguments"] for one in folded) == [f'{{"x":{k}}}' for k in range(n)]
    for one in folded:
        k = json.loads(one["arguments"])["x"]
        assert (one["reasoning_content"], one["content"].strip(), one["finish"]) == (
            f"thought {k}",
            f"said {k}",
            "tool_calls",
        )
    assert chunks[-1]["usage"]["completion_tokens"] == sum(len(one.completion.token_ids) for one in recorded)
    assert len({tuple(one.prompt_ids.tolist()) for one in recorded}) == 1
    exports = [
        (await service.post("/rl/export_trajectories", {"session_id": "task", "style": style}))[1]
        for style in ("individual", "concat")
    ]
    check_exports(*exports)
    assert all(len(body["trajectories"]) == n for body in exports)


@EACH
@BOTH
@pytest.mark.parametrize(
    ("text", "limit", "finish", "calls"),
    [
        (spoken("add", '{"a": 1}'), None, "tool_calls", 1),
        ("hi", None, "stop", 0),
        (spoken("add", '{"a": 1}'), 16, "length", 1),
        ("hello there", 2, "length", 0),
    ],
)
async def test_T011_T025_the_ending_says_what_the_answer_holds(
    make_service: Any, dialect: str, stream: bool, text: str, limit: int | None, finish: str, calls: int
) -> None:
    service = await make_service([{"pieces": tokens(text)}])
    said = await ask(service, await service.start(), dialect, stream=stream, tools=True, limit=limit)
    assert (said.finish, len(said.calls)) == (finish, calls)


@EACH
@pytest.mark.parametrize("asked", [{"top_logprobs": None}, {}, {"top_logprobs": 0}, {"top_logprobs": 2}])
async def test_T008_T009_logprobs_with_and_without_candidates(make_service: Any, dialect: str, asked: Any) -> None:
    top = [[["He", -0.5], ["x", "-inf"]], [["y", -0.25], ["z", None]]]
    service = await make_service([{"pieces": ["He", "y"], "logprobs": [-0.5, -0.25], "top": top}])
    key = await service.start()
    if dialect != "messages":
        wanted = {"logprobs": True} if dialect == "chat" else {"include": ["message.output_text.logprobs"]}
        for stream in (False, True):
            said = await ask(service, key, dialect, stream=stream, **wanted, **asked)
            if dialect == "responses":
                entries = said.body["output"][0]["content"][0]["logprobs"]
            elif stream:
                choices = [data["choices"][0] for _, data in said.events]
                entries = [one for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]]
            else:
                entries = said.body["choices"][0]["logprobs"]["content"]
            assert [one["logprob"] for one in entries] == [-0.5, -0.25]
            shown = [[one["logprob"] for one in entry["top_logprobs"]] for entry in entries]
            assert shown == ([[-0.5, -9999.0], [-0.25, -9999.0]] if asked.get("top_logprobs") else [[], []])
    plain = await ask(service, key, dialect, stream=False)
    if dialect == "chat":
        assert plain.body["choices"][0]["logprobs"] is None
    for one in await service.recorded(key):
        assert one.completion.logprobs.tolist() == [-0.5, -0.25]
        assert one.tags == ()


@EACH
@BOTH
async def test_T009_a_sampled_token_without_a_number_is_untrainable_and_the_answer_valid_json(
    make_service: Any, dialect: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    service = await make_service([{"pieces": ["He", "y"], "logprobs": [-0.5, "nan"]}])
    key = await service.start()
    wanted: dict[str, Any] = {"logprobs": True} if dialect == "chat" else {}
    if dialect == "responses":
        wanted = {"include": ["message.output_text.logprobs"]}
    said = await ask(service, key, dialect, stream=stream, **wanted)
    json.dumps([said.body, said.events], allow_nan=False)
    (one,) = await service.recorded(key)
    assert (said.text, one.tags) == ("Hey", ("untrainable",))
    assert "not trainable" in caplog.text


ANSWERS = {
    "text": (["He", "y", END], ["text"]),
    "text then call": (["So. ", *tokens(spoken("sh", '{"c":"ls"}'))], ["text", "tool_use"]),
    "call": (tokens(spoken("sh", '{"c":"ls"}')), ["tool_use"]),
    "two calls": (tokens(spoken("sh", '{"c":"ls"}') + "\n" + spoken("f", "{}")), ["tool_use", "tool_use"]),
    "thinking, text, call": (
        tokens("<think>\nhm\n</think>\n\nSo. " + spoken("f", "{}")),
        ["thinking", "text", "tool_use"],
    ),
    "nothing": ([END], []),
    "no token at all": ([], []),
}


@pytest.mark.parametrize("kind", list(ANSWERS))
async def test_T030_T032_messages_come_in_the_protocols_order_with_true_usage(make_service: Any, kind: str) -> None:
    pieces, blocks = ANSWERS[kind]
    service = await make_service([{"pieces": pieces}])
    key = await service.start()
    said = await ask(service, key, "messages", stream=True, tools=True)
    whole = await ask(service, key, "messages", stream=False, tools=True)
    names = [name for name, _ in said.events if name != "ping"]
    assert all(name == data["type"] for name, data in said.events)
    assert (names[0], names[-2:], names.count("message_start")) == (
        "message_start",
        ["message_delta", "message_stop"],
        1,
    )
    open_block, found = None, []
    for name, data in said.events[1:-2]:
        if name == "content_block_start":
            assert open_block is None
            assert data["index"] == len(found)
            open_block = data["index"]
            found.append(data["content_block"]["type"])
            if found[-1] == "tool_use":
                assert data["content_block"]["input"] == {}
        else:
            assert data["index"] == open_block
            if name == "content_block_stop":
                open_block = None
    assert open_block is None
    assert found == blocks == [block["type"] for block in whole.body["content"]]
    recorded = (await service.recorded(key))[0]
    assert said.events[0][1]["message"]["usage"]["input_tokens"] == len(recorded.prompt_ids) > 0
    assert said.usage == whole.usage == (len(recorded.prompt_ids), len(recorded.completion.token_ids))
    assert said.body["stop_reason"] == whole.body["stop_reason"]


async def test_T037_responses_come_in_the_protocols_order(make_service: Any) -> None:
    service = await make_service([{"pieces": ["He", "y"]}, {"pieces": tokens(spoken("f", '{"a":1}'), 12)}])
    key = await service.start()
    said = await ask(service, key, "responses", stream=True)
    assert [name.removeprefix("response.") for name, _ in said.events] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [data["sequence_number"] for _, data in said.events] == list(range(10))
    assert said.events[6][1]["text"] == "Hey"
    done = said.events[-1][1]["response"]
    recorded = (await service.recorded(key))[0]
    assert done["usage"]["total_tokens"] == len(recorded.prompt_ids) + 2
    assert (done["status"], done["output"][0]["content"][0]["text"]) == ("completed", "Hey")
    called = await ask(service, key, "responses", stream=True, tools=True)
    kinds = [name.removeprefix("response.") for name, _ in called.events]
    deltas = kinds.count("function_call_arguments.delta")
    assert kinds == [
        "created", "in_progress", "output_item.added", *["function_call_arguments.delta"] * deltas, "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    assert deltas >= 1
    assert called.events[-1][1]["response"]["output"][0]["arguments"] == '{"a":1}'


@BOTH
async def test_T034_a_chain_through_a_call_that_was_sampled(make_service: Any, stream: bool) -> None:
    lines = [
        {"when": r"weather\?<\|im_end\|>\n<\|im_start\|>assistant\n$", "pieces": tokens(spoken("w", '{"c": "Oslo"}'))},
        {"when": r"thanks<\|im_end\|>\n<\|im_start\|>assistant\n$", "pieces": ["Bye.", END]},
        {"pieces": ["Se", "ven", " degrees.", END]},
    ]
    service = await make_service(lines)
    key = await service.start()
    tool = {"type": "function", "name": "w", "parameters": {"type": "object", "properties": {"c": {"type": "string"}}}}
    for tools in ([tool], []):  # sent again with every call, as the API wants it, or with the first alone, as some do
        first = await ask(
            service,
            key,
            "responses",
            stream=stream,
            input=[{"role": "user", "content": "weather?"}],
            tools=[tool],
            store=True,
        )
        (call,) = [item for item in first.body["output"] if item["type"] == "function_call"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": '{"t":7}'}
        again = {"tools": tools} if tools else {}
        second = await ask(
            service, key, "responses", stream=stream, input=[output], previous_response_id=first.body["id"], **again
        )
        assert second.text == "Seven degrees."
        third = await ask(
            service, key, "responses", stream=stream, input="thanks", previous_response_id=second.body["id"], **again
        )
        assert third.text == "Bye."
        done = {one.id: one for one in await service.recorded(key)}
        one, two, three = (done[each.body["id"]] for each in (first, second, third))
        decode = service.renderer.tokenizer.decode
        for number, (interaction, wanted) in enumerate(
            (
                (two, ["weather?", '"w"', "Oslo", '{"t":7}']),
                (three, ["weather?", "Oslo", '{"t":7}', "Seven degrees.", "thanks"]),
            )
        ):
            prompt = decode(interaction.prompt_ids.tolist(), skip_special=False)
            assert all(word in prompt for word in wanted), (number, prompt)
            assert [prompt.rindex(word) for word in wanted] == sorted(prompt.rindex(word) for word in wanted)
        before = [*two.prompt_ids.tolist(), *two.completion.token_ids.tolist()]
        assert three.prompt_ids[: len(before)].tolist() == before
        assert three.token_parent == two.id
        assert (two.token_parent == one.id) == bool(tools)
        assert two.credit_parent == one.id
