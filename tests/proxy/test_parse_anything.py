"""Whatever JSON a client sends to whichever protocol: a call that can be answered, or a BadRequest that names a field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.base.errors import BadRequest
from areal.base.types import Message, ToolCall
from areal.chat.deltas import CallDelta
from areal.proxy.dialects import anthropic_messages, dialects, openai_chat, openai_responses
from areal.proxy.dialects.base import Answer, Choice, ChoiceEnded, Dialect, Done, Piece, Started
from areal.proxy.model_routes import decode_json

KNOWN = {
    "openai_chat": openai_chat.KNOWN,
    "openai_responses": openai_responses.KNOWN,
    "anthropic_messages": anthropic_messages.KNOWN,
}
WORDS = [
    "type", "role", "content", "text", "id", "name", "input", "output", "call_id", "tool_use_id", "arguments", "function",
    "tools", "thinking", "summary", "tool_calls", "parameters", "input_schema", "namespace", "format", "previous_message_id",
    "json_schema", "schema", "strict", "mode", "allowed_tools", "disable_parallel_tool_use",
]  # fmt: skip
VALUES = [
    "user", "assistant", "system", "tool", "developer", "text", "input_text", "output_text", "tool_use", "tool_result",
    "thinking", "function", "namespace", "message", "reasoning", "function_call", "function_call_output", "continue", "auto",
    "none", "required", "any", "allowed_tools", "json_object", "json_schema", "custom", "custom_tool_call", "image", "INVALID_JSON",
]  # fmt: skip
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.sampled_from(VALUES)
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)
blocks = st.fixed_dictionaries({"type": st.sampled_from(VALUES)}, optional=dict.fromkeys(WORDS[1:], trees))
turns = st.fixed_dictionaries(
    {"role": st.sampled_from(VALUES[:5])}, optional={"content": trees | st.lists(blocks, max_size=3)}
)
CALL = ToolCall("c1", "f", "{bad")
CHOICE = Choice(0, "x_1", Message("assistant", "hi", reasoning="hm", tool_calls=(CALL,)), "tool_calls", 3)
ANSWER = Answer("x_1", "m", 1, 2, (CHOICE,))
EVENTS = (
    Started(ANSWER), Piece(0, "hi", reasoning="hm"), Piece(0, tools=(CallDelta(0, "c1", "f", "{bad"),)),
    ChoiceEnded(CHOICE), Done(ANSWER),
)  # fmt: skip


@pytest.mark.parametrize("dialect", [pytest.param(one, id=one.name) for one in dialects()])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_body_is_a_call_or_a_bad_request(dialect: Dialect, data: st.DataObject) -> None:
    body: dict[str, Any] = data.draw(st.dictionaries(st.sampled_from(sorted(KNOWN[dialect.name])), trees, max_size=4))
    conversation = "input" if dialect.name == "openai_responses" else "messages"
    body[conversation] = data.draw(trees | st.lists(turns | blocks, min_size=1, max_size=4))
    try:
        call = dialect.parse(decode_json(json.dumps(body).encode()), {})
    except BadRequest:
        return
    assert call.messages or call.previous
    json.dumps(dialect.format(ANSWER, call), allow_nan=False)
    encoder = dialect.stream(call)
    assert b"".join(encoder.encode(event) for event in EVENTS).endswith(b"\n\n")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_what_nests_without_end_is_a_bad_request_or_answered(make_service: Any, path: str) -> None:
    service = await make_service()
    key = await service.start()
    for depth in (100, 248, 252, 400, 5000):
        deep = b'{"a":' * depth + b"1" + b"}" * depth
        use = b'{"type":"tool_use","id":"t","name":"f","input":%b}' % deep
        for sent in (
            b'{"input":"hi","messages":[{"role":"user","content":"hi"}],"metadata":%b}' % deep,
            b'{"input":"hi","messages":[{"role":"user","content":"hi"},{"role":"assistant","content":[%b]}]}' % use,
            b'{"input":"hi","messages":[{"role":"user","content":"hi"}],"tools":[{"type":"function","name":"f","parameters":'
            b'%b,"input_schema":%b,"function":{"name":"f","parameters":%b}}]}' % (deep, deep, deep),
        ):
            status, _, _ = await service.post(path, sent, key)
            assert status in (200, 400)
