"""The Messages dialect as a pure translation."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
from anthropic.resources.beta.messages import Messages as BetaMessages
from anthropic.resources.messages import Messages
from anthropic.types import Message as SdkMessage

from areal.base.errors import BackendError, BadRequest, InvalidKey, NoCapacity
from areal.base.types import Message, ModelCall, Tool, ToolCall
from areal.chat.deltas import CallDelta
from areal.proxy.dialects import anthropic_messages
from areal.proxy.dialects.anthropic_messages import AnthropicMessages
from areal.proxy.dialects.base import Answer, Choice, ChoiceEnded, Done, Event, Failed, Piece, Started
from areal.proxy.dialects.openai_chat import OpenAIChat

TITLE = {"format": {"type": "json_schema", "schema": {"type": "object", "properties": {"title": {"type": "string"}}}}}
HI = [{"role": "user", "content": "hi"}]
CACHED = {"cache_control": {"type": "ephemeral"}}
T021 = {
    "model": "m",
    "max_tokens": 16,
    "system": [
        {"type": "text", "text": "Be terse.", **CACHED},
        {"type": "text", "text": "Use SI units."},
    ],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **CACHED}]}],
}


def parse(_messages: Any = None, **more: Any) -> ModelCall:
    return AnthropicMessages().parse({"max_tokens": 8, "messages": HI if _messages is None else _messages, **more}, {})


def messages(*sent: Any, **more: Any) -> tuple[Message, ...]:
    return parse(list(sent), **more).messages


def refusal(**more: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        AnthropicMessages().parse({"messages": HI, **more}, {})
    return caught.value


def test_T021_system_blocks_are_one_system_turn_and_cache_control_means_nothing() -> None:
    assert parse(T021["messages"], system=T021["system"]).messages == (
        Message("system", "Be terse.\nUse SI units."),
        Message("user", "hi"),
    )
    plain = [{"type": "text", "text": "Be terse."}, {"type": "text", "text": "Use SI units."}]
    assert parse(HI, system=plain) == parse(T021["messages"], system=T021["system"])


def test_the_joiner_is_that_of_the_other_dialects() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = OpenAIChat().parse({"messages": [{"role": "user", "content": parts}]}, {})
    assert parse([{"role": "user", "content": parts}]).messages == chat.messages


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a.txt", "a.txt"),
        ([{"type": "text", "text": "a.txt"}], "a.txt"),
        ([{"type": "text", "text": "a.txt"}, {"type": "text", "text": "b.txt", **CACHED}], "a.txt\nb.txt"),
        (None, ""),
        ([], ""),
    ],
)
@pytest.mark.parametrize("extra", [{}, {"is_error": True}, CACHED])
def test_T022_a_tool_result_is_text_however_it_is_spelled(content: Any, text: str, extra: dict[str, Any]) -> None:
    result = {"type": "tool_result", "tool_use_id": "tu1", **extra}
    if content is not None:
        result["content"] = content
    use = {"type": "tool_use", "id": "tu1", "name": "ls", "input": {"p": "."}}
    assert messages(*HI, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]})[1:] == (
        Message("assistant", tool_calls=(ToolCall("tu1", "ls", '{"p":"."}'),)),
        Message("tool", text, tool_call_id="tu1"),
    )


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_T023_results_stay_next_to_their_calls_and_text_is_a_user_turn(order: tuple[int, ...]) -> None:
    blocks = [
        {"type": "tool_result", "tool_use_id": "tu1", "content": "1"},
        {"type": "tool_result", "tool_use_id": "tu2", "content": "2"},
        {"type": "text", "text": "go on"},
    ]
    assert messages(*HI, {"role": "user", "content": [blocks[k] for k in order]})[1:] == (
        Message("tool", "1", tool_call_id="tu1"),
        Message("tool", "2", tool_call_id="tu2"),
        Message("user", "go on"),
    )


def test_T027_fields_that_agents_add_are_ignored_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    dialect = AnthropicMessages()
    more = {
        "context_management": {"edits": []}, "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"},
        "metadata": {"user_id": "u"}, "service_tier": "auto", "invented_tomorrow": "sk-secret",
    }  # fmt: skip
    for _ in range(3):
        assert dialect.parse({**T021, **more}, {"anthropic-beta": "x-2026-01-01"}) == dialect.parse(T021, {})
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "invented_tomorrow" in said[0]
    assert "sk-secret" not in said[0]


@pytest.mark.parametrize("signature", ["s1", "", None])
def test_T029_thinking_goes_to_the_reasoning_slot_whoever_signed_it(signature: str | None) -> None:
    blocks = [
        {"type": "thinking", "thinking": "add them", "signature": signature},
        {"type": "redacted_thinking", "data": "…"},
        {"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1, "b": 1}},
    ]
    assert messages(*HI, {"role": "assistant", "content": blocks})[1] == Message(
        "assistant", reasoning="add them", tool_calls=(ToolCall("t", "add", '{"a":1,"b":1}'),)
    )


def test_T033_a_result_without_its_call_is_passed_on_as_in_every_dialect() -> None:
    gone = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "gone", "content": "x"}]}
    assert messages(gone) == (Message("tool", "x", tool_call_id="gone"),)


def test_system_messages_in_the_middle_and_consecutive_user_turns_keep_their_place() -> None:
    assert messages(
        {"role": "user", "content": "a"},
        {"role": "system", "content": [{"type": "text", "text": "# Environment", **CACHED}], "output_config": {}},
        {"role": "user", "content": "b"},
        {"role": "user", "content": "c"},
    ) == (Message("user", "a"), Message("system", "# Environment"), Message("user", "b"), Message("user", "c"))


def test_a_turn_split_around_a_call_is_one_text_again() -> None:
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    texts = [{"type": "text", "text": "a"}, call, {"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    assert messages(*HI, {"role": "assistant", "content": texts})[1].content == "ab\nc"


def test_deferred_tools_and_the_providers_own_are_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    schema = {"type": "object", "properties": {}}
    tools = [
        {"name": "ls", "description": "list", "input_schema": schema, **CACHED},
        {"name": "DeferredToolPlaceholder", "description": "x", "input_schema": schema, "defer_loading": True},
        {"name": "web_search", "type": "web_search_20250305"},
        {"name": "sh", "type": "custom", "input_schema": schema},
    ]
    assert parse(tools=tools).tools == (Tool("ls", "list", schema), Tool("sh", "", schema))
    assert "web_search_20250305" in caplog.text
    assert parse(tools=tools, tool_choice={"type": "auto", "disable_parallel_tool_use": True}).tools
    assert parse(tools=tools, tool_choice={"type": "none"}).tools == ()


@pytest.mark.parametrize("raw", ['{"command": "cat /tmp', "", "[1]", '"text"'])
def test_malformed_input_comes_back_as_it_was_sampled(raw: str) -> None:
    call = ToolCall("t", "sh", raw)
    choice = Choice(0, "msg_1", Message("assistant", tool_calls=(call,)), "tool_calls", 3)
    body = AnthropicMessages().format(Answer("msg_1", "m", 1, 1, (choice,)), parse())
    (block,) = SdkMessage.model_validate(body).model_dump(exclude_none=True)["content"]
    echoed = messages(*HI, {"role": "assistant", "content": [block]})[1].tool_calls[0]
    assert echoed.arguments == (raw or "{}")
    wrapped = {**block, "input": {"__unparsedToolInput": {"raw": raw, "len": len(raw)}}}
    assert messages(*HI, {"role": "assistant", "content": [wrapped]})[1].tool_calls[0].arguments == raw


def test_sampling_and_headers() -> None:
    body = {"messages": HI, "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "stop_sequences": ["END"]}
    call = AnthropicMessages().parse({**body, "stream": True}, {"x-stainless-retry-count": "1"})
    sampling = call.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop) == (
        9, 0.5, 0.9, 4, ("END",),
    )  # fmt: skip
    assert (call.stream, call.retry_count, call.n, call.model) == (True, 1, 1, "default")


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("messages", [], "at least one"),
        ("messages", [{"role": "tool", "content": "x"}], "user, assistant or system"),
        ("messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}], "text only"),
        ("messages", [{"role": "user", "content": [{"type": "tool_use", "id": "a"}]}], "cannot stand here"),
        ("messages", [{"role": "user", "content": 5}], "string or a list"),
        ("messages", [{"role": "user", "content": [{"type": "tool_result"}]}], "tool_use_id"),
        ("messages", [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}], ".id must be"),
        ("max_tokens", 0, "at least 1"),
        ("temperature", "hot", "a number"),
        ("stop_sequences", [1], "a string"),
        ("tools", [{"name": ""}], "empty"),
        ("tools", [{"name": "f", "input_schema": 5}], "an object"),
        ("tool_choice", {"type": "some"}, "any"),
        ("tool_choice", {"type": "tool"}, "a string"),
        ("tool_choice", "any", "an object"),
        ("output_config", {"format": {"type": "json_schema"}}, "an object"),
        ("output_format", {"type": "xml"}, "json_schema"),
        ("thread", {"type": "fork"}, "create or continue"),
        ("thread", {"type": "continue"}, "previous_message_id"),
        ("presence_penalty", 1, "own distribution"),
        ("chat_template", "x", "own template"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_field_and_a_sentence(field: str, value: Any, says: str) -> None:
    error = refusal(**{field: value})
    assert (error.param or "").startswith(field)
    assert says in str(error)


def test_a_thread_that_continues_names_its_answer_and_brings_no_setup() -> None:
    thread = {"type": "continue", "previous_message_id": "msg_1"}
    call = parse(thread=thread)
    assert (call.previous, call.inherits_tools, call.messages) == ("msg_1", True, (Message("user", "hi"),))
    assert not parse(thread=thread, tool_choice={"type": "none"}).inherits_tools
    assert parse(thread={"type": "create"}) == parse()
    for key, value in (("system", "x"), ("tools", [{"name": "f", "input_schema": {}}])):
        assert refusal(thread=thread, **{key: value}).param == key


def test_null_means_absent_everywhere() -> None:
    fields = sorted(anthropic_messages.KNOWN - {"messages", "max_tokens"})
    assert parse(**dict.fromkeys(fields)) == parse()


def test_every_field_of_the_sdk_is_known() -> None:
    sdk = {*inspect.signature(Messages.create).parameters, *inspect.signature(BetaMessages.create).parameters}
    transport = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    assert sdk - transport <= anthropic_messages.KNOWN


@pytest.mark.parametrize(
    ("finish", "stop_text", "reason", "sequence"),
    [
        ("stop", None, "end_turn", None),
        ("length", None, "max_tokens", None),
        ("stop", "END", "stop_sequence", "END"),
        ("tool_calls", None, "tool_use", None),
    ],
)
def test_T025_stop_reasons_whole_and_streamed(finish: Any, stop_text: Any, reason: str, sequence: Any) -> None:
    choice = Choice(0, "msg_1", Message("assistant", "He"), finish, 2, stop_text=stop_text)
    answer = Answer("msg_1", "m", 1, 3, (choice,))
    body = AnthropicMessages().format(answer, parse())
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)
    delta = events(Started(answer), Piece(0, "He"), ChoiceEnded(choice), Done(answer))[-2]
    assert delta["type"] == "message_delta"
    assert delta["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


CALLS = (ToolCall("tu1", "sh", '{"c":"ls"}'), ToolCall("tu2", "now", "{}"))
CHOICE = Choice(0, "msg_1", Message("assistant", "He", reasoning="hm", tool_calls=CALLS), "tool_calls", 7)
ANSWER = Answer("msg_1", "m", 5, 12, (CHOICE,))


def events(*sent: Event) -> list[dict[str, Any]]:
    """Decoded frames, each with its `event:` equal to its type."""
    encoder = AnthropicMessages().stream(parse(stream=True))
    wire = b"".join(encoder.encode(event) for event in sent).decode()
    found = []
    for frame in wire.split("\n\n")[:-1]:
        name, data = frame.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        found.append(body)
    return found


def well_ordered(bodies: list[dict[str, Any]]) -> list[str]:
    """Checks T030's order; returns the block types."""
    kinds = [body["type"] for body in bodies]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("message_start") == kinds.count("message_delta") == kinds.count("message_stop") == 1
    blocks: list[str] = []
    open_at: int | None = None
    for body in bodies[1:-2]:
        if body["type"] == "content_block_start":
            assert open_at is None
            assert body["index"] == len(blocks)
            open_at = body["index"]
            blocks.append(body["content_block"]["type"])
        else:
            assert body["index"] == open_at
            if body["type"] == "content_block_stop":
                open_at = None
    assert open_at is None
    return blocks


def test_T030_text_then_call_in_the_protocols_order() -> None:
    bodies = events(
        Started(ANSWER), Piece(0), Piece(0, reasoning="h"), Piece(0, reasoning="m"), Piece(0, "H"), Piece(0, "e"),
        Piece(0, tools=(CallDelta(0, "tu1", "sh"),)), Piece(0, tools=(CallDelta(0, arguments='{"c":"ls"}'),)),
        Piece(0, tools=(CallDelta(1, "tu2", "now", "{}"),)), ChoiceEnded(CHOICE), Done(ANSWER),
    )  # fmt: skip
    assert well_ordered(bodies) == ["thinking", "text", "tool_use", "tool_use"]


def test_the_end_of_a_call_and_the_text_behind_it_may_come_in_one_piece() -> None:
    call = CallDelta(0, "tu1", "sh", '{"c"')
    both = Piece(0, " done", tools=(CallDelta(0, arguments=':"ls"}'), CallDelta(1, "tu2", "now", "{}")))
    bodies = events(Started(ANSWER), Piece(0, tools=(call,)), both, ChoiceEnded(CHOICE), Done(ANSWER))
    assert well_ordered(bodies) == ["tool_use", "text", "tool_use"]
    json_of_0 = [body["delta"]["partial_json"] for body in bodies if body.get("index") == 0 and "delta" in body]
    assert "".join(json_of_0) == '{"c":"ls"}'


@pytest.mark.parametrize("pieces", [[], [Piece(0)], [Piece(0, "He")], [Piece(0, tools=(CallDelta(0, "a", "f"),))]])
def test_T030_the_shortest_answers_are_well_formed(pieces: list[Event]) -> None:
    well_ordered(events(Started(ANSWER), *pieces, ChoiceEnded(CHOICE), Done(ANSWER)))


def test_T031_no_argument_byte_is_lost_when_it_comes_with_the_name() -> None:
    first = Piece(0, tools=(CallDelta(0, "x", "sh", '{"'),))
    bodies = events(Started(ANSWER), first, Piece(0, tools=(CallDelta(0, arguments='c":"ls"}'),)), ChoiceEnded(CHOICE))
    assert bodies[1]["content_block"] == {"type": "tool_use", "id": "x", "name": "sh", "input": {}}
    assert "".join(body["delta"]["partial_json"] for body in bodies[2:-1]) == '{"c":"ls"}'


def test_T032_usage_is_true_at_the_start_and_at_the_end() -> None:
    bodies = events(Started(ANSWER), Piece(0, "He"), ChoiceEnded(CHOICE), Done(ANSWER))
    assert bodies[0]["message"]["usage"]["input_tokens"] == 12
    assert bodies[-2]["usage"]["input_tokens"] == 12
    assert bodies[-2]["usage"]["output_tokens"] == 7
    assert AnthropicMessages().format(ANSWER, parse())["usage"] == bodies[-2]["usage"]


def test_a_whole_answer_reads_back_as_the_turn_that_was_recorded() -> None:
    body = AnthropicMessages().format(ANSWER, parse())
    SdkMessage.model_validate(body)
    assert messages(*HI, {"role": "assistant", "content": body["content"]})[1] == CHOICE.message


def test_an_empty_answer_is_well_formed() -> None:
    choice = Choice(0, "msg_1", Message("assistant"), "stop", 1)
    body = AnthropicMessages().format(Answer("msg_1", "m", 1, 1, (choice,)), parse())
    assert SdkMessage.model_validate(body).content == []


def test_T019_a_failure_in_mid_stream_is_the_protocols_error_event() -> None:
    bodies = events(Started(ANSWER), Piece(0, "He"), Failed(BackendError("it broke; try again")))
    assert bodies[-1] == {"type": "error", "error": {"type": "api_error", "message": "it broke; try again"}}
    assert all(body["type"] not in ("message_delta", "message_stop") for body in bodies)


def test_errors_have_the_protocols_own_types() -> None:
    dialect = AnthropicMessages()
    types = {
        error.status: dialect.error_body(error, "req_1")["error"]["type"]
        for error in (BadRequest("no"), InvalidKey(), NoCapacity(1, 1), BackendError("down"))
    }
    assert types == {
        400: "invalid_request_error",
        401: "authentication_error",
        429: "rate_limit_error",
        502: "api_error",
    }
    assert dialect.error_body(InvalidKey(), "req_1")["request_id"] == "req_1"
    assert "request_id" not in dialect.error_body(InvalidKey())


def test_the_ping_is_the_protocols_own() -> None:
    assert AnthropicMessages().stream(parse()).ping == b'event: ping\ndata: {"type":"ping"}\n\n'


def test_a_title_of_claude_code_is_its_housekeeping() -> None:
    sdk, claude = {"user-agent": "Anthropic/Python 2.14.0"}, {"user-agent": "claude-cli/2.1.197 (external, sdk-cli)"}
    tools = [{"name": "sh", "input_schema": {"type": "object"}}]

    def background(headers: dict[str, str], **more: Any) -> bool:
        return AnthropicMessages().parse({"max_tokens": 9, "messages": HI, **more}, headers).background

    assert background(claude, output_config=TITLE)
    assert not background(claude)
    assert not background(claude, tools=tools)
    assert not background(sdk, output_config=TITLE)
