"""System, messages and tools of the Anthropic Messages schema <-> canonical Message and Tool.

    messages = parse_messages({"system": "Be terse.", "messages": [{"role": "user", "content": "hi"}]})
    tools, ignored = parse_tools(body)

Content is a string or a list of blocks; text blocks next to each other are joined with a newline. A user message becomes its tool
results, in their order, then its text (T023); a tool result may be a string, blocks or absent, its is_error changes nothing. Thinking
becomes the turn's reasoning, whatever its signature (T029); redacted thinking says nothing. `cache_control` and other stray keys mean
nothing. Tools that load later (`defer_loading`) and the provider's own tools are not shown to the model. Tool input that was no JSON
comes back wrapped by clients and by ourselves, and is unwrapped. Errors: BadRequest with the field's path.
"""

from __future__ import annotations

from typing import Any

import orjson

from areal.base.errors import BadRequest
from areal.base.types import Message, Tool, ToolCall
from areal.proxy.dialects import fields
from areal.proxy.dialects.base import TEXT_JOINER
from areal.proxy.dialects.fields import JsonObject
from areal.proxy.dialects.turns import AssistantTurn

INVALID_JSON = "INVALID_JSON"  # the one key of a tool input that stands for a text which is no JSON object
_UNPARSED = "__unparsedToolInput"  # Claude Code's own wrapper of the same
_SILENT = ("redacted_thinking",)


def parse_messages(body: JsonObject) -> tuple[Message, ...]:
    """`system` first, then every message. Raises BadRequest where there is no message."""
    sent = fields.items(body, "messages")
    if not sent:
        raise BadRequest("messages must hold at least one message", param="messages", code="empty_messages")
    found: list[Message] = []
    if body.get("system"):
        found.append(Message("system", _text(body["system"], "system")))
    for k, one in enumerate(sent):
        found += _messages(fields.as_object(one, f"messages[{k}]"), f"messages[{k}]")
    return tuple(found)


def parse_tools(body: JsonObject) -> tuple[tuple[Tool, ...], list[str]]:
    """The tools that the model is shown, and the types of those that nobody here runs."""
    shown: list[Tool] = []
    ignored: list[str] = []
    for k, one in enumerate(fields.items(body, "tools")):
        tool = fields.as_object(one, f"tools[{k}]")
        kind = fields.text(tool, "type", "custom", at=f"tools[{k}].")
        if tool.get("defer_loading"):
            continue
        if kind != "custom" and "input_schema" not in tool:
            ignored.append(kind)
            continue
        name = fields.as_text(tool.get("name"), f"tools[{k}].name")
        if not name:
            raise BadRequest(f"tools[{k}].name is empty", param=f"tools[{k}].name")
        schema = fields.as_object(tool.get("input_schema") or {}, f"tools[{k}].input_schema")
        shown.append(Tool(name, fields.text(tool, "description", at=f"tools[{k}]."), schema))
    return tuple(shown), ignored


def tool_input(arguments: str) -> dict[str, Any]:
    """A call's arguments as the object that the protocol demands."""
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: arguments}


def _messages(sent: JsonObject, at: str) -> list[Message]:
    role, content = sent.get("role"), sent.get("content")
    if role == "system":
        return [Message("system", _text(content, f"{at}.content"))]
    if role == "user":
        return _user(content, f"{at}.content")
    if role == "assistant":
        return [_assistant(content, f"{at}.content")]
    raise BadRequest(
        f"{at}.role must be user, assistant or system, not {fields.shown(role)}",
        param=f"{at}.role",
        code="invalid_role",
    )


def _user(content: Any, at: str) -> list[Message]:
    results: list[Message] = []
    texts: list[str] = []
    for block, where in _blocks(content, at):
        if block.get("type") == "tool_result":
            call_id = fields.as_text(block.get("tool_use_id"), f"{where}.tool_use_id")
            results.append(Message("tool", _text(block.get("content"), f"{where}.content"), tool_call_id=call_id))
        else:
            texts.append(_block_text(block, where))
    if texts or not results:
        results.append(Message("user", TEXT_JOINER.join(texts)))
    return results


def _assistant(content: Any, at: str) -> Message:
    turn = AssistantTurn()
    for block, where in _blocks(content, at):
        kind = block.get("type")
        if kind == "tool_use":
            turn.add_call(_call(block, where))
        elif kind == "thinking":
            turn.add_reasoning(fields.text(block, "thinking", at=f"{where}."))
        elif kind not in _SILENT:
            turn.add_text(_block_text(block, where))
    return turn.message()


def _call(block: JsonObject, at: str) -> ToolCall:
    given = fields.as_object(block.get("input") or {}, f"{at}.input")
    raw = given.get(INVALID_JSON)
    if isinstance(unparsed := given.get(_UNPARSED), dict):
        raw = unparsed.get("raw")
    known = len(given) == 1 and isinstance(raw, str)
    arguments = raw if known else orjson.dumps(given).decode()
    return ToolCall(
        fields.as_text(block.get("id"), f"{at}.id"), fields.as_text(block.get("name"), f"{at}.name"), str(arguments)
    )


def _text(content: Any, at: str) -> str:
    return TEXT_JOINER.join(_block_text(block, where) for block, where in _blocks(content, at))


def _blocks(content: Any, at: str) -> list[tuple[JsonObject, str]]:
    """Each block with its path; a string is one text block."""
    if content is None:
        return []
    if isinstance(content, str):
        return [({"type": "text", "text": content}, at)]
    if not isinstance(content, list):
        raise fields.wrong_type(at, "a string or a list of content blocks", content)
    return [
        (
            {"type": "text", "text": one} if isinstance(one, str) else fields.as_object(one, f"{at}[{k}]"),
            f"{at}[{k}]",
        )
        for k, one in enumerate(fields.bounded(content, at))
    ]


def _block_text(block: JsonObject, at: str) -> str:
    kind = block.get("type", "text")
    if kind == "text":
        return fields.as_text(block.get("text"), f"{at}.text")
    if kind == "tool_reference":  # a tool search's answer: the names it found
        return fields.text(block, "tool_name", at=f"{at}.")
    raise BadRequest(
        f"{at} is of type {fields.shown(kind)}, which cannot stand here: this model reads text only; send "
        "{'type': 'text', 'text': ...}",
        param=at,
        code="unsupported_content",
    )
