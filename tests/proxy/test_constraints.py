"""What each protocol says of forced calls and JSON formats, as one typed constraint; and what the scripted backend makes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from areal.base.types import Constraint
from areal.proxy.dialects.anthropic_messages import AnthropicMessages
from areal.proxy.dialects.openai_chat import OpenAIChat
from areal.proxy.dialects.openai_responses import OpenAIResponses

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
CHAT_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
FLAT_TOOLS = [{"type": "function", "name": "f", "parameters": SCHEMA}]
MESSAGES_TOOLS = [{"name": "f", "input_schema": SCHEMA}]
HI = [{"role": "user", "content": "hi"}]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        ({}, None),
        ({"tool_choice": "auto", "tools": CHAT_TOOLS, "parallel_tool_calls": False}, None),
        ({"tool_choice": {"type": "auto"}, "tools": CHAT_TOOLS}, None),
        ({"tool_choice": "required", "tools": CHAT_TOOLS}, Constraint(calls=())),
        ({"tool_choice": "required", "parallel_tool_calls": False}, Constraint(calls=(), parallel=False)),
        ({"tool_choice": named("f"), "parallel_tool_calls": None}, Constraint(calls=("f",))),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("f"), named("g")]}}},
            Constraint(calls=("f", "g")),
        ),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Constraint(schema={"type": "object"})),
        ({"response_format": FORMAT}, Constraint(schema=SCHEMA)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": False}}},
            Constraint(schema=SCHEMA, lenient=True),
        ),
        ({"response_format": FORMAT, "tools": CHAT_TOOLS}, Constraint(schema=SCHEMA, calls=())),
        ({"response_format": FORMAT, "tools": CHAT_TOOLS, "tool_choice": "none"}, Constraint(schema=SCHEMA)),
        ({"response_format": FORMAT, "tools": CHAT_TOOLS, "tool_choice": "required"}, Constraint(calls=())),
    ],
)  # fmt: skip
def test_chat_completions(sent: dict[str, Any], wanted: Constraint | None) -> None:
    assert OpenAIChat().parse({"messages": HI, **sent}, {}).sampling.constraint == wanted


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        ({"tool_choice": "required", "tools": FLAT_TOOLS}, Constraint(calls=())),
        ({"tool_choice": {"type": "function", "name": "f"}}, Constraint(calls=("f",))),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": FLAT_TOOLS}},
            Constraint(calls=("f",)),
        ),
        ({"text": {"format": {"type": "text"}}}, None),
        ({"text": {"verbosity": "low"}}, None),
        ({"text": {"format": {"type": "json_object"}}}, Constraint(schema={"type": "object"})),
        ({"text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}}, Constraint(schema=SCHEMA)),
        (
            {"text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}, "tools": FLAT_TOOLS},
            Constraint(schema=SCHEMA, calls=()),
        ),
    ],
)
def test_responses(sent: dict[str, Any], wanted: Constraint | None) -> None:
    assert OpenAIResponses().parse({"input": "hi", **sent}, {}).sampling.constraint == wanted


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "tools": MESSAGES_TOOLS}, None),
        ({"tool_choice": {"type": "any"}, "tools": MESSAGES_TOOLS}, Constraint(calls=())),
        (
            {"tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True}},
            Constraint(calls=("f",), parallel=False),
        ),
        ({"output_config": {"effort": "high"}}, None),
        ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, Constraint(schema=SCHEMA)),
        ({"output_format": {"type": "json_schema", "schema": SCHEMA}}, Constraint(schema=SCHEMA)),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "tools": MESSAGES_TOOLS},
            Constraint(schema=SCHEMA, calls=()),
        ),
    ],
)
def test_messages(sent: dict[str, Any], wanted: Constraint | None) -> None:
    assert AnthropicMessages().parse({"messages": HI, "max_tokens": 9, **sent}, {}).sampling.constraint == wanted


CALLED = ['<tool_call>\n{"name": "f", ', '"arguments": {"x": 1}}\n</tool_call>', "<|im_end|>"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("pieces", "choice", "finish", "calls"),
    [
        (CALLED, "auto", "tool_calls", 1),
        (["hi", "<|im_end|>"], "auto", "stop", 0),
        (CALLED, "required", "tool_calls", 1),
        (CALLED, named("f"), "tool_calls", 1),
        (["hi", "<|im_end|>"], "required", "stop", 0),
        (CALLED, "required", "length", 0),
    ],
)
async def test_t011_finish_reason_is_tool_calls_where_there_is_a_call_whatever_was_forced(
    make_service: Any, pieces: list[str], choice: Any, finish: str, calls: int, stream: bool
) -> None:
    """The scripted backend breaks the rule where its script does; what it said is told as it is, and none of it is trained."""
    service = await make_service([{"pieces": pieces}])
    more = {"max_tokens": 1} if finish == "length" else {}
    async with service.sdk(await service.start()) as client:
        asked = {"model": "default", "messages": HI, "tools": CHAT_TOOLS, "tool_choice": choice, **more}
        if stream:
            found, said = set(), ""
            async for chunk in await client.chat.completions.create(**asked, stream=True):
                found |= {one.index for one in chunk.choices[0].delta.tool_calls or ()}
                said = chunk.choices[0].finish_reason or said
            assert (said, len(found)) == (finish, calls)
        else:
            [answer] = (await client.chat.completions.create(**asked)).choices
            assert (answer.finish_reason, len(answer.message.tool_calls or ())) == (finish, calls)
        [one] = await service.recorded(client.api_key)
        _, session, _ = await service.post("/rl/session", {}, client.api_key)
    forced = choice != "auto"
    assert ("constrained" in one.tags, one.completion.constrained) == (forced, None)
    assert session["tokens"]["masked"] == ({"constrained": len(one.completion.token_ids)} if forced else {})


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        ({"tool_choice": "required"}, "needs `tools`"),
        ({"tool_choice": named("g"), "tools": CHAT_TOOLS}, "the tools of this call are f"),
        ({"tool_choice": named("f"), "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": []}}}]}, "no JSON schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["ö" * 20_000] * 2}}}}, "smaller schemas"),
    ],
)  # fmt: skip
async def test_what_no_grammar_can_be_made_of_is_a_400_before_anything_is_recorded(
    make_service: Any, sent: dict[str, Any], says: str
) -> None:
    service = await make_service()
    key = await service.start()
    status, body, _ = await service.post("/v1/chat/completions", json.dumps({"messages": HI, **sent}), key)
    assert (status, says in body["error"]["message"]) == (400, True), body
    assert len(await service.recorded(key)) == 0
    assert service.calls()["calls"] == []
