"""The Responses dialect as a pure translation."""

from __future__ import annotations

import inspect
import json
import math
from typing import Any

import pytest
from openai.resources.responses import Responses
from openai.types.responses import Response

from areal.base.errors import BackendError, BadRequest
from areal.base.types import Message, ModelCall, Tool, ToolCall
from areal.chat.deltas import CallDelta
from areal.proxy.dialects import openai_responses
from areal.proxy.dialects.base import (
    Answer,
    Choice,
    ChoiceEnded,
    Done,
    Event,
    Failed,
    Piece,
    Started,
    TokenLogprob,
)
from areal.proxy.dialects.openai_chat import OpenAIChat
from areal.proxy.dialects.openai_responses import OpenAIResponses

CALL = {"type": "function_call", "call_id": "c1", "name": "w", "arguments": '{"c": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "7"}


def parse(_input: Any = "hi", **more: Any) -> ModelCall:
    return OpenAIResponses().parse({"input": _input, **more}, {})


def messages(*items: Any, **more: Any) -> tuple[Message, ...]:
    return parse(list(items), **more).messages


def refusal(**more: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        OpenAIResponses().parse({"input": "hi", **more}, {})
    return caught.value


def test_T036_an_input_of_typed_parts_is_the_same_conversation_as_in_chat() -> None:
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "yo", "annotations": []}],
        },
        {"role": "user", "content": "again"},
    ]
    assert messages(*items) == (Message("user", "hi"), Message("assistant", "yo"), Message("user", "again"))
    assert parse("hi").messages == OpenAIChat().parse({"messages": [{"role": "user", "content": "hi"}]}, {}).messages
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages({"role": "user", "content": parts}) == (Message("user", "a\nb"),)


def test_roles_developer_and_system_are_one_and_instructions_come_first() -> None:
    assert messages({"role": "developer", "content": "d"}, {"role": "user", "content": "u"}, instructions="i") == (
        Message("system", "i", instructions=True),
        Message("system", "d"),
        Message("user", "u"),
    )


@pytest.mark.parametrize("extra", [{}, {"id": "fc_1", "status": "completed"}])
@pytest.mark.parametrize("output", ["7", [{"type": "input_text", "text": "7"}], [{"type": "output_text", "text": "7"}]])
def test_calls_and_their_outputs_are_read_with_or_without_ids(extra: dict[str, Any], output: Any) -> None:
    found = messages({"role": "user", "content": "u"}, {**CALL, **extra}, {**RESULT, **extra, "output": output})
    assert found[1:] == (
        Message("assistant", tool_calls=(ToolCall("c1", "w", '{"c": 1}'),)),
        Message("tool", "7", tool_call_id="c1"),
    )


def test_neighbouring_items_of_the_assistant_are_one_turn() -> None:
    found = messages(
        {"role": "user", "content": "u"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "a"},
        CALL,
        {**CALL, "call_id": "c2"},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "another turn"},
        RESULT,
    )
    first, second = (ToolCall(name, "w", '{"c": 1}') for name in ("c1", "c2"))
    assert found[1:] == (
        Message("assistant", "ab", reasoning="hm", tool_calls=(first, second)),
        Message("assistant", "another turn"),
        Message("tool", "7", tool_call_id="c1"),
    )


def test_reasoning_is_read_from_its_summary_too_and_encrypted_reasoning_says_nothing() -> None:
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}], "encrypted_content": "x"}
    assert messages({"role": "user", "content": "u"}, summary, CALL)[1].reasoning == "short"
    bare = {"type": "reasoning", "id": "rs", "summary": [], "content": None, "encrypted_content": "x"}
    assert messages({"role": "user", "content": "u"}, bare, CALL)[1].reasoning == ""


def test_custom_calls_are_calls_and_hosted_ones_say_nothing() -> None:
    custom = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "*** x"}
    output = {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}
    hosted = {"type": "web_search_call", "id": "ws", "status": "completed"}
    assert messages({"role": "user", "content": "u"}, hosted, custom, output)[1:] == (
        Message("assistant", tool_calls=(ToolCall("c1", "patch", '{"input":"*** x"}'),)),
        Message("tool", "done", tool_call_id="c1"),
    )


def test_tools_of_a_namespace_are_shown_flat_and_answered_apart(caplog: pytest.LogCaptureFixture) -> None:
    inner = {"type": "function", "name": "read", "description": "r", "parameters": {"type": "object"}}
    tools = [
        {"type": "function", "name": "sh", "parameters": {"type": "object"}, "strict": False},
        {"type": "namespace", "name": "mcp__files", "description": "x", "tools": [inner]},
        {"type": "web_search", "external_web_access": False},
        {"type": "custom", "name": "patch", "format": {"type": "grammar"}},
    ]
    call = parse(tools=tools)
    assert call.tools == (Tool("sh", "", {"type": "object"}), Tool("mcp__files__read", "r", {"type": "object"}))
    assert caplog.text.count("web_search") == 1
    made = ToolCall("c1", "mcp__files__read", "{}")
    choice = Choice(0, "resp_1", Message("assistant", tool_calls=(made,)), "tool_calls", 3)
    answer = Answer("resp_1", "m", 1, 1, (choice,))
    (item,) = OpenAIResponses().format(answer, call)["output"]
    assert (item["namespace"], item["name"], item["call_id"]) == ("mcp__files", "read", "c1")
    assert messages({"role": "user", "content": "u"}, item)[1].tool_calls == (made,)
    piece = Piece(0, tools=(CallDelta(0, "c1", "mcp__files__read", "{}"),))
    streamed = events(Started(answer), piece, ChoiceEnded(choice), Done(answer), call=call)
    assert streamed[-1]["response"]["output"] == [item]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("input", [], "at least one item"),
        ("input", None, "at least one item"),
        ("input", 5, "string or a list"),
        ("input", ["x"], "an object"),
        ("input", [{"role": "robot", "content": "x"}], "role must be"),
        ("input", [{"role": "user", "content": [{"type": "input_image"}]}], "text only"),
        ("input", [{"type": "item_reference", "id": "msg_1"}], "send the item itself"),
        ("input", [{"type": "function_call_output", "output": "x"}], "call_id"),
        ("input", [{"type": "function_call", "call_id": "c"}], "name"),
        ("max_output_tokens", 0, "at least 1"),
        ("temperature", "hot", "a number"),
        ("tools", [{"type": "function", "name": ""}], "empty"),
        ("tools", [{"type": "namespace"}], "name must be"),
        ("tool_choice", "sometimes", "required"),
        ("tool_choice", {"type": "web_search_preview"}, "functions in `tools`"),
        ("text", {"format": {"type": "grammar"}}, "json_schema"),
        ("text", {"format": {"type": "json_schema", "name": "x", "schema": []}}, "an object"),
        ("text", {"format": {"type": "json_schema", "name": "x", "schema": {}, "strict": 1}}, "true or false"),
        ("background", True, "leave it out"),
        ("conversation", "conv_1", "previous_response_id"),
        ("prompt", {"id": "p"}, "send `input`"),
        ("previous_response_id", 5, "a string"),
        ("logit_bias", {"1": 5}, "leave it out"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_field_and_a_sentence(field: str, value: Any, says: str) -> None:
    error = refusal(**{field: value})
    assert (error.param or "").startswith(field)
    assert says in str(error)


def test_null_means_absent_everywhere() -> None:
    assert parse(**dict.fromkeys(sorted(openai_responses.KNOWN - {"input"}))) == parse()


def test_every_field_of_the_sdk_is_known() -> None:
    transport = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    assert set(inspect.signature(Responses.create).parameters) - transport <= openai_responses.KNOWN


def test_unknown_fields_are_ignored_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    dialect = OpenAIResponses()
    for _ in range(2):
        assert dialect.parse({"input": "hi", "invented": "sk-secret"}, {}) == parse()
    assert caplog.text.count("invented") == 1
    assert "sk-secret" not in caplog.text


CALLS = (ToolCall("c1", "w", '{"c": 1}'), ToolCall("c2", "now", "{}"))
TOKENS = (TokenLogprob(b"He", -0.5, ((b"He", -0.5), (b"b", -math.inf))), TokenLogprob(b"y", -1.0))
CHOICE = Choice(0, "resp_1", Message("assistant", "Hey"), "stop", 3, TOKENS)
ANSWER = Answer("resp_1", "default", 5, 7, (CHOICE,), cached_tokens=4)


def events(*sent: Event, call: ModelCall | None = None) -> list[dict[str, Any]]:
    encoder = OpenAIResponses().stream(call or parse(stream=True))
    wire = b"".join(encoder.encode(event) for event in sent).decode()
    found = []
    for number, frame in enumerate(wire.split("\n\n")[:-1]):
        name, data = frame.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        assert body["sequence_number"] == number
        found.append(body)
    return found


def test_T037_text_comes_in_the_protocols_order() -> None:
    bodies = events(Started(ANSWER), Piece(0, "He"), Piece(0, "y"), Piece(0), ChoiceEnded(CHOICE), Done(ANSWER))
    assert [body["type"].removeprefix("response.") for body in bodies] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert bodies[6]["text"] == "Hey"
    done = bodies[-1]["response"]
    assert done["output"] == [bodies[-2]["item"]] == OpenAIResponses().format(ANSWER, parse(stream=True))["output"]
    assert done["usage"]["total_tokens"] == 10
    assert {body["item_id"] for body in bodies[3:8]} == {bodies[2]["item"]["id"]}
    Response.model_validate(done)


def test_T037_calls_and_reasoning_have_events_of_their_own() -> None:
    choice = Choice(0, "resp_1", Message("assistant", "Hey", reasoning="hm", tool_calls=CALLS), "tool_calls", 9)
    answer = Answer("resp_1", "m", 5, 7, (choice,))
    bodies = events(
        Started(answer), Piece(0, reasoning="h"), Piece(0, reasoning="m"), Piece(0, "Hey"),
        Piece(0, tools=(CallDelta(0, "c1", "w", '{"c"'),)), Piece(0, tools=(CallDelta(0, arguments=": 1}"),)),
        Piece(0, tools=(CallDelta(1, "c2", "now"), CallDelta(1, arguments="{}"))), ChoiceEnded(choice), Done(answer),
    )  # fmt: skip
    assert [body["type"].removeprefix("response.") for body in bodies[2:-1]] == [
        "output_item.added", "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
    ]  # fmt: skip
    done = bodies[-1]["response"]
    assert [item["type"] for item in done["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert done["output"] == OpenAIResponses().format(answer, parse(stream=True))["output"]
    assert len({item["id"] for item in done["output"]}) == 4
    Response.model_validate(done)
    assert messages({"role": "user", "content": "u"}, *done["output"])[1] == choice.message


def test_the_end_of_a_call_and_the_text_behind_it_may_come_in_one_piece() -> None:
    both = Piece(0, " done", tools=(CallDelta(0, arguments=": 1}"), CallDelta(1, "c2", "now", "{}")))
    begun = Piece(0, tools=(CallDelta(0, "c1", "w", '{"c"'),))
    output = events(Started(ANSWER), begun, both, ChoiceEnded(CHOICE), Done(ANSWER))[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["function_call", "message", "function_call"]
    assert output[0]["arguments"] == '{"c": 1}'
    assert messages({"role": "user", "content": "u"}, *output)[1] == Message("assistant", " done", tool_calls=CALLS)


@pytest.mark.parametrize("message", [Message("assistant"), Message("assistant", reasoning="hm")])
def test_an_answer_without_text_has_a_message_that_says_nothing(message: Message) -> None:
    choice = Choice(0, "resp_1", message, "stop", 1)
    answer = Answer("resp_1", "m", 5, 7, (choice,))
    pieces = [Piece(0, reasoning=message.reasoning)]
    streamed = events(Started(answer), *pieces, ChoiceEnded(choice), Done(answer))[-1]["response"]
    whole = OpenAIResponses().format(answer, parse(stream=True))
    assert streamed["output"] == whole["output"]
    assert Response.model_validate(whole).output_text == ""


def test_a_call_alone_has_no_message() -> None:
    choice = Choice(0, "resp_1", Message("assistant", tool_calls=CALLS[1:]), "tool_calls", 4)
    answer = Answer("resp_1", "m", 5, 7, (choice,))
    piece = Piece(0, tools=(CallDelta(0, "c2", "now", "{}"),))
    streamed = events(Started(answer), piece, ChoiceEnded(choice), Done(answer))[-1]["response"]
    assert [item["type"] for item in streamed["output"]] == ["function_call"]
    assert streamed["output"] == OpenAIResponses().format(answer, parse(stream=True))["output"]


def test_an_answer_that_was_cut_off_is_incomplete() -> None:
    choice = Choice(0, "resp_1", Message("assistant", "Hey"), "length", 3)
    answer = Answer("resp_1", "m", 5, 7, (choice,))
    last = events(Started(answer), Piece(0, "Hey"), ChoiceEnded(choice), Done(answer))[-1]
    assert last["type"] == "response.incomplete"
    whole = OpenAIResponses().format(answer, parse())
    assert whole["status"] == last["response"]["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["output"][0]["status"] == last["response"]["output"][0]["status"] == "incomplete"


def test_the_request_is_echoed() -> None:
    more = {"instructions": "i", "metadata": {"a": "b"}, "max_output_tokens": 5, "previous_response_id": "resp_0"}
    body = OpenAIResponses().format(ANSWER, parse(tools=[{"type": "web_search"}], **more))
    Response.model_validate(body)
    assert {key: body[key] for key in more} == more
    assert body["tools"] == [{"type": "web_search"}]
    assert body["usage"]["input_tokens_details"]["cached_tokens"] == 4


def test_logprobs_are_shown_where_they_are_included() -> None:
    call = parse(include=["message.output_text.logprobs"], top_logprobs=2)
    assert call.sampling.want_logprobs
    part = OpenAIResponses().format(ANSWER, call)["output"][0]["content"][0]
    assert [entry["logprob"] for entry in part["logprobs"]] == [-0.5, -1.0]
    assert part["logprobs"][0]["top_logprobs"][1]["logprob"] == -9999.0
    bodies = events(
        Started(ANSWER), Piece(0, "He", tokens=TOKENS[:1]), Piece(0, "y", tokens=TOKENS[1:]), ChoiceEnded(CHOICE),
        Done(ANSWER), call=call,
    )  # fmt: skip
    deltas = [entry["logprob"] for body in bodies for entry in body.get("logprobs", ()) if "delta" in body]
    assert deltas == [-0.5, -1.0]
    assert bodies[-1]["response"]["output"][0]["content"][0] == part
    assert not parse().sampling.want_logprobs


def test_T019_a_failure_in_mid_stream_is_response_failed() -> None:
    bodies = events(Started(ANSWER), Piece(0, "He"), Failed(BackendError("it broke; try again")))
    assert bodies[-1]["type"] == "response.failed"
    assert bodies[-1]["response"]["status"] == "failed"
    assert bodies[-1]["response"]["error"] == {"code": "server_error", "message": "it broke; try again"}
    Response.model_validate(bodies[-1]["response"])


def test_T019_a_failure_before_anything_was_said_is_an_error_event() -> None:
    (body,) = events(Failed(BackendError("it broke; try again")))
    assert (body["type"], body["message"]) == ("error", "it broke; try again")
