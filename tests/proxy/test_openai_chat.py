"""The Chat Completions dialect as a pure translation: every field is honoured, ignored for a reason, or refused."""

from __future__ import annotations

import inspect
import json
import math
from typing import Any, get_args

import pytest
from openai.resources.chat.completions import Completions
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from areal.base.errors import BackendError, BadRequest
from areal.base.types import Message, ModelCall, ToolCall
from areal.chat.deltas import CallDelta
from areal.proxy.dialects import dialects, openai_chat
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

HI = [{"role": "user", "content": "hi"}]


def parse(_messages: Any = None, **more: Any) -> ModelCall:
    return OpenAIChat().parse({"messages": HI if _messages is None else _messages, **more}, {})


def refusal(**more: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        OpenAIChat().parse({"messages": HI, **more}, {})
    return caught.value


def test_T001_text_parts_are_another_spelling_of_a_string() -> None:
    parts = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "2+2?"}, {"type": "text", "text": "Now."}]},
    ]
    assert parse(parts).messages == (Message("system", "Be brief."), Message("user", "2+2?\nNow."))


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": []}, {"content": ""}])
def test_T002_an_assistant_turn_without_content_keeps_its_calls(content: dict[str, Any]) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_n", "arguments": "{}"}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call], **content}]
    messages.append({"role": "tool", "tool_call_id": "c1", "content": "42"})
    assert parse(messages).messages[1:] == (
        Message("assistant", tool_calls=(ToolCall("c1", "get_n", "{}"),)),
        Message("tool", "42", tool_call_id="c1"),
    )


def test_T003_echoed_empty_keys_mean_nothing() -> None:
    echoed = {"tool_calls": [], "function_call": None, "refusal": None, "audio": None, "annotations": []}
    with_keys = parse([*HI, {"role": "assistant", "content": "hello", **echoed}, *HI])
    assert with_keys == parse([*HI, {"role": "assistant", "content": "hello"}, *HI])


def test_T004_argument_text_is_kept_as_sent() -> None:
    text = '{ "a": 3,  "b": 18}'
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    assert parse([*HI, {"role": "assistant", "tool_calls": [call]}]).messages[1].tool_calls[0].arguments == text


def test_T006_an_empty_tool_list_is_no_tool_list() -> None:
    assert parse(tools=[], tool_choice="auto") == parse()
    tool = {"type": "function", "function": {"name": "f"}}
    assert parse(tools=[tool]).tools[0].name == "f"
    assert parse(tools=[tool], tool_choice="none").tools == ()


def test_T007_null_means_absent_everywhere() -> None:
    fields = sorted(openai_chat.KNOWN - {"messages"})
    assert parse(**dict.fromkeys(fields)) == parse()


def test_of_two_limits_the_smaller_one_holds() -> None:
    assert parse(max_tokens=5, max_completion_tokens=9).sampling.max_tokens == 5
    assert parse(max_completion_tokens=9).sampling.max_tokens == 9


def test_developer_is_system_and_names_are_kept() -> None:
    messages = parse([{"role": "developer", "content": "A"}, {"role": "user", "content": "x", "name": "bob"}]).messages
    assert messages == (Message("system", "A"), Message("user", "x", name="bob"))


def test_the_old_function_call_is_read_as_a_call() -> None:
    old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    assert parse([*HI, old]).messages[1].tool_calls == (ToolCall("", "f", "{}"),)


def test_sampling_and_retry_header() -> None:
    body = {"messages": HI, "temperature": 0, "top_p": 0.5, "top_k": -1, "seed": 7, "stop": "X", "n": 2, "stream": True}
    call = OpenAIChat().parse(
        {**body, "stream_options": {"include_usage": True}, "chat_template_kwargs": {"enable_thinking": False}},
        {"x-stainless-retry-count": "2"},
    )
    sampling = call.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed, sampling.stop) == (
        0.0, 0.5, 0, 7, ("X",),
    )  # fmt: skip
    assert (call.n, call.stream, call.include_usage, call.retry_count) == (2, True, True, 2)
    assert call.template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("temperature", "hot", "a number"),
        ("temperature", True, "a number"),
        ("temperature", 3, "at most 2"),
        ("temperature", math.nan, "at least 0"),
        ("top_p", 0, "above 0"),
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", 1.5, "an integer"),
        ("n", 17, "at most 16"),
        ("n", 0, "at least 1"),
        ("stop", [1], "a string"),
        ("stop", {"a": 1}, "a list"),
        ("stream", "yes", "true or false"),
        ("logprobs", 5, "true or false"),
        ("top_logprobs", 3, "logprobs: true"),
        ("model", 4, "a string"),
        ("tools", "f", "a list"),
        ("tools", [{"type": "web_search"}], "function"),
        ("tools", [{"type": "function", "function": {"name": ""}}], "empty"),
        ("presence_penalty", 0.5, "leave presence_penalty out"),
        ("frequency_penalty", -1, "own distribution"),
        ("logit_bias", {"5": 10}, "leave it out"),
        ("response_format", {"type": "xml"}, "json_schema"),
        ("response_format", {"type": "json_schema"}, "an object"),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}, "an object"),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 100_000]}}},
            "smaller schema",
        ),
        ("response_format", "json", "an object"),
        ("tool_choice", "sometimes", "required"),
        ("tool_choice", {"type": "custom"}, "functions in `tools`"),
        ("tool_choice", {"type": "function"}, "a string"),
        ("tool_choice", {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}, "mode required"),
        ("tool_choice", {"type": "allowed_tools", "allowed_tools": {"mode": "required"}}, "empty"),
        ("parallel_tool_calls", 1, "true or false"),
        ("modalities", ["text", "audio"], "text only"),
        ("functions", [{"name": "f"}], "tools"),
        ("chat_template", "{{ x }}", "own template"),
        ("extra_body", {"chat_template": "x"}, "own template"),
        ("stop_token_ids", [-1], "token ids"),
        ("stream_options", "all", "an object"),
    ],
)
def test_T012_what_cannot_be_kept_is_refused_with_the_field_and_a_sentence(field: str, value: Any, says: str) -> None:
    error = refusal(**{field: value})
    assert error.status == 400
    assert (error.param or "").startswith(field.removeprefix("extra_body.")) or field == "extra_body"
    assert says in str(error)
    assert OpenAIChat().error_body(error)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([1], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name"),
        ([{"role": "assistant", "audio": {"id": "a"}}], "messages[0].audio"),
    ],
)
def test_T012_wrong_messages_name_their_path(messages: Any, param: str) -> None:
    assert refusal(messages=messages).param == param


def test_images_are_refused_because_the_model_is_text_only() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:"}}]
    assert "text only" in str(refusal(messages=[{"role": "user", "content": parts}]))


def test_every_field_of_the_openai_sdk_is_known() -> None:
    transport = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    sdk = set(inspect.signature(Completions.create).parameters) - transport
    assert sdk <= openai_chat.KNOWN


def test_unknown_fields_are_ignored_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    dialect = OpenAIChat()
    for _ in range(3):
        assert dialect.parse({"messages": HI, "client_metadata": {"a": "sk-secret"}}, {}) == parse()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "client_metadata" in said[0]
    assert "sk-secret" not in said[0]


TOKENS = (
    TokenLogprob(b"He", -0.5, ((b"He", -0.5), (b"b", -math.inf))),
    TokenLogprob(b"\xc4", math.nan),
)
CHOICE = Choice(0, "chatcmpl-1", Message("assistant", "He"), "stop", 2, TOKENS)
ANSWER = Answer("chatcmpl-1", "default", 5, 7, (CHOICE,))


def test_T008_T009_logprobs_are_valid_json_with_a_floor() -> None:
    body = OpenAIChat().format(ANSWER, parse(logprobs=True, top_logprobs=2))
    ChatCompletion.model_validate(body)
    content = json.loads(json.dumps(body, allow_nan=False))["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-0.5, -9999.0]
    assert content[0]["top_logprobs"][1]["logprob"] == -9999.0
    assert content[1]["bytes"] == [0xC4]
    assert content[1]["top_logprobs"] == []
    assert OpenAIChat().format(ANSWER, parse())["choices"][0]["logprobs"] is None


def test_tool_calls_are_formatted_with_null_content() -> None:
    message = Message("assistant", tool_calls=(ToolCall("c1", "f", '{"a": 1}'),))
    choice = Choice(0, "x", message, "tool_calls", 3)
    body = OpenAIChat().format(Answer("x", "m", 1, 1, (choice,)), parse())
    assert body["choices"][0]["message"]["content"] is None
    assert ChatCompletion.model_validate(body).choices[0].message.tool_calls[0].function.arguments == '{"a": 1}'  # type: ignore[union-attr,index]


def chunks(call: ModelCall, *events: Event) -> list[dict[str, Any]]:
    encoder = OpenAIChat().stream(call)
    wire = b"".join(encoder.encode(event) for event in events).decode()
    datas = [line.removeprefix("data: ") for line in wire.split("\n\n") if line]
    assert datas[-1] == "[DONE]" or "error" in datas[-1]
    return [json.loads(data) for data in datas if data != "[DONE]"]


EVENTS: tuple[Event, ...] = (Started(ANSWER), Piece(0, "He"), Piece(0), ChoiceEnded(CHOICE), Done(ANSWER))


def test_T015_usage_comes_only_when_asked_for_and_every_chunk_has_id_and_choices() -> None:
    plain = chunks(parse(stream=True), *EVENTS)
    asked = chunks(parse(stream=True, stream_options={"include_usage": True}), *EVENTS)
    for body in (*plain, *asked):
        ChatCompletionChunk.model_validate(body)
        assert body["id"] == "chatcmpl-1"
    assert all(body["choices"] for body in plain)
    assert [bool(body["choices"]) for body in asked] == [True, True, True, False]
    assert asked[-1]["usage"]["completion_tokens"] == 2
    assert all(body["usage"] is None for body in asked[:-1])
    assert plain[0]["choices"][0]["delta"]["role"] == "assistant"
    assert plain[-1]["choices"][0]["finish_reason"] == "stop"


def test_T016_parallel_calls_are_folded_by_index() -> None:
    tools = (
        Piece(0, tools=(CallDelta(0, "c1", "add"),)),
        Piece(0, tools=(CallDelta(0, arguments='{"a"'), CallDelta(1, "c2", "now", "{"))),
        Piece(0, tools=(CallDelta(0, arguments=":2}"), CallDelta(1, arguments="}"))),
    )
    folded: dict[int, str] = {}
    names: dict[int, list[str]] = {}
    for body in chunks(parse(stream=True), Started(ANSWER), *tools, Done(ANSWER)):
        for call in body["choices"][0]["delta"].get("tool_calls", ()):
            folded[call["index"]] = folded.get(call["index"], "") + call["function"]["arguments"]
            if "id" in call:
                names.setdefault(call["index"], []).append(call["function"]["name"])
    assert folded == {0: '{"a":2}', 1: "{}"}
    assert names == {0: ["add"], 1: ["now"]}


def test_T019_a_failure_in_mid_stream_is_an_error_event() -> None:
    bodies = chunks(parse(stream=True), Started(ANSWER), Piece(0, "He"), Failed(BackendError("it broke; try again")))
    assert bodies[-1]["error"]["code"] == "backend_error"
    assert all("finish_reason" not in body or body["finish_reason"] is None for body in bodies)


def test_the_table_has_distinct_names_prefixes_and_routes() -> None:
    table = dialects()
    for attribute in ("name", "id_prefix"):
        assert len({getattr(one, attribute) for one in table}) == len(table)
    routes = [route for one in table for route in one.routes]
    assert len(routes) == len(set(routes))
    assert set(get_args(Event)) == {Started, Piece, ChoiceEnded, Done, Failed}
