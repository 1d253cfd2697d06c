"""Messages and tools of the OpenAI Chat Completions schema -> canonical Message and Tool.

    messages = parse_messages({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]})

content null, absent, "" and [] are the same; a list of text parts is joined with a newline; `developer` is system;
tool_calls null and [] mean none; echoed refusal, audio, annotations, function_call that are null mean nothing (T001-T006).
Argument text is kept exactly as sent. The old `function` role and `function_call` are read as a tool message and call.
Errors: BadRequest with the path of the field (`messages[2].content`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from areal.base.errors import BadRequest
from areal.base.types import Message, Role, Tool, ToolCall
from areal.proxy.dialects import fields
from areal.proxy.dialects.base import TEXT_JOINER
from areal.proxy.dialects.fields import JsonObject

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def parse_messages(body: JsonObject) -> tuple[Message, ...]:
    """All messages, in order. Raises BadRequest where there is none."""
    sent = fields.items(body, "messages")
    if not sent:
        raise BadRequest("messages must hold at least one message", param="messages", code="empty_messages")
    return tuple(_message(fields.as_object(one, f"messages[{k}]"), f"messages[{k}]") for k, one in enumerate(sent))


def parse_tools(body: JsonObject) -> tuple[Tool, ...]:
    """The functions the model may call; an empty list is the same as none."""
    return tuple(
        _tool(fields.as_object(one, f"tools[{k}]"), f"tools[{k}]") for k, one in enumerate(fields.items(body, "tools"))
    )


def join_text(content: Any, param: str) -> str:
    """A string, a list of text parts, or nothing. Raises BadRequest for images, audio and files."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise fields.wrong_type(param, "a string or a list of text parts", content)
    parts = enumerate(fields.bounded(content, param))
    return TEXT_JOINER.join(_part_text(part, f"{param}[{index}]") for index, part in parts)


def _part_text(part: Any, param: str) -> str:
    if isinstance(part, str):
        return part
    kind = fields.as_object(part, param).get("type", "text")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise BadRequest(
            f"{param} is of type {fields.shown(kind)}, but this model reads text only; send {{'type': 'text', 'text': ...}}",
            param=param,
            code="unsupported_content",
        )
    key = TEXT_PARTS[kind]
    return fields.as_text(part.get(key), f"{param}.{key}")


def _message(sent: JsonObject, at: str) -> Message:
    role = sent.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(
            f"{at}.role must be one of {', '.join(ROLES)}, not {fields.shown(role)}",
            param=f"{at}.role",
            code="invalid_role",
        )
    content = join_text(sent.get("content"), f"{at}.content")
    name = fields.text(sent, "name", at=f"{at}.")
    if role == "assistant":
        return _assistant(sent, content, name, at)
    call_id = ""
    if role == "tool":
        call_id = fields.text(sent, "tool_call_id", at=f"{at}.")
        if not call_id:
            raise BadRequest(
                f"{at}.tool_call_id is missing: a tool message answers one of the assistant's tool_calls",
                param=f"{at}.tool_call_id",
            )
    return Message(ROLES[role], content, tool_call_id=call_id, name=name)


def _assistant(sent: JsonObject, content: str, name: str, at: str) -> Message:
    if sent.get("audio") is not None:
        raise BadRequest(f"{at}.audio: this model reads text only", param=f"{at}.audio", code="unsupported_content")
    calls = [
        _tool_call(fields.as_object(one, f"{at}.tool_calls[{k}]"), f"{at}.tool_calls[{k}]")
        for k, one in enumerate(fields.items(sent, "tool_calls", at=f"{at}."))
    ]
    legacy = sent.get("function_call")
    if legacy is not None and not calls:
        calls = [_function(fields.as_object(legacy, f"{at}.function_call"), "", f"{at}.function_call")]
    reasoning = fields.text(sent, "reasoning_content", at=f"{at}.") or _loose_text(sent.get("reasoning"))
    if not content and not calls:
        content = fields.text(sent, "refusal", at=f"{at}.")
    return Message("assistant", content, reasoning=reasoning, tool_calls=tuple(calls), name=name)


def _loose_text(value: Any) -> str:
    """`reasoning` is nobody's standard: some send a text, some an object; only the text is read."""
    return value if isinstance(value, str) else ""


def _tool_call(sent: JsonObject, at: str) -> ToolCall:
    if sent.get("type", "function") != "function":
        raise BadRequest(
            f"{at}.type must be function, not {fields.shown(sent.get('type'))}",
            param=f"{at}.type",
            code="unsupported_tool",
        )
    function = fields.as_object(sent.get("function"), f"{at}.function")
    return _function(function, fields.text(sent, "id", at=f"{at}."), f"{at}.function")


def _function(sent: JsonObject, call_id: str, at: str) -> ToolCall:
    arguments = sent.get("arguments", "")
    if isinstance(arguments, dict):  # not in the schema, but harmless: the template wants the object anyway
        arguments = orjson.dumps(arguments).decode()
    return ToolCall(
        call_id, fields.as_text(sent.get("name"), f"{at}.name"), fields.as_text(arguments or "", f"{at}.arguments")
    )


def _tool(sent: JsonObject, at: str) -> Tool:
    if sent.get("type", "function") != "function":
        raise BadRequest(
            f"{at}.type must be function, not {fields.shown(sent.get('type'))}",
            param=f"{at}.type",
            code="unsupported_tool",
        )
    function = fields.as_object(sent.get("function"), f"{at}.function")
    name = fields.as_text(function.get("name"), f"{at}.function.name")
    if not name:
        raise BadRequest(f"{at}.function.name is empty", param=f"{at}.function.name")
    parameters = fields.as_object(function.get("parameters") or {}, f"{at}.function.parameters")
    return Tool(name, fields.text(function, "description", at=f"{at}.function."), parameters)


def calls_json(calls: Sequence[ToolCall]) -> list[JsonObject]:
    """Tool calls as the schema has them, the way back of parse_messages."""
    return [
        {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}} for one in calls
    ]
