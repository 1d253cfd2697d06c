"""Input items and tools of the OpenAI Responses schema -> canonical Message and Tool.

    messages = parse_input({"instructions": "Be terse.", "input": [{"role": "user", "content": "hi"}]})
    tools = parse_tools(body)                  # tools.shown, tools.ignored; namespaces(body) maps their names back

`input` is a string or a list of items, with or without type, id and status. Reasoning, messages and calls next to each other are one
assistant turn, as our own answers are split; a message that follows a message is a turn of its own. Custom tool calls are calls with
their text as `input`. Tools of a namespace are shown as `namespace__name`; custom and hosted tools (web_search, ...) are not
shown, since nobody here runs or constrains them; echoes of hosted calls say nothing. Errors: BadRequest with the item's path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from areal.base.errors import BadRequest
from areal.base.types import Message, Role, Tool, ToolCall
from areal.proxy.dialects import fields
from areal.proxy.dialects.fields import JsonObject
from areal.proxy.dialects.openai_messages import join_text
from areal.proxy.dialects.turns import AssistantTurn

ROLES: Mapping[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
OUTPUTS = ("function_call_output", "custom_tool_call_output")
# Echoes of what a provider's own tools did; their outcome stands in the text that followed.
HOSTED = ("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call", "computer_call")


@dataclass(frozen=True, slots=True)
class Tools:
    """shown: what the model sees. ignored: the types of those it does not."""

    shown: tuple[Tool, ...]
    ignored: tuple[str, ...]


def parse_input(body: JsonObject) -> tuple[Message, ...]:
    """`instructions` first (marked as such), then the input. Raises BadRequest where there is nothing to answer."""
    instructions = join_text(body.get("instructions"), "instructions")
    found = [Message("system", instructions, instructions=True)] if instructions else []
    sent = body.get("input")
    if isinstance(sent, str):
        return (*found, Message("user", sent))
    if sent is not None and not isinstance(sent, list):
        raise fields.wrong_type("input", "a string or a list of items", sent)
    if not sent and not body.get("previous_response_id"):
        raise BadRequest("input must hold a text or at least one item", param="input", code="empty_input")
    sent = fields.items(body, "input")
    items = ((fields.as_object(one, f"input[{k}]"), f"input[{k}]") for k, one in enumerate(sent))
    return (*found, *_turns(items))


def parse_tools(body: JsonObject) -> Tools:
    shown: list[Tool] = []
    ignored: list[str] = []
    for namespace, sent, at in _flat(body):
        kind = fields.text(sent, "type", "function", at=f"{at}.")
        if kind != "function":
            ignored.append(kind)
            continue
        function = fields.as_object(sent.get("function") or sent, f"{at}.function")
        name = fields.as_text(function.get("name"), f"{at}.name")
        if not name:
            raise BadRequest(f"{at}.name is empty", param=f"{at}.name")
        parameters = fields.as_object(function.get("parameters") or {}, f"{at}.parameters")
        shown.append(Tool(flat_name(namespace, name), fields.text(function, "description", at=f"{at}."), parameters))
    return Tools(tuple(shown), tuple(ignored))


def flat_name(namespace: str, name: str) -> str:
    """One name for the model, where the protocol has two."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def namespaces(tools: Any) -> dict[str, tuple[str, str]]:
    """Flat name -> (namespace, name), of the tools as they were sent."""
    found: dict[str, tuple[str, str]] = {}
    for namespace, sent, _ in _flat({"tools": tools}):
        if namespace and isinstance(name := sent.get("name"), str):
            found[flat_name(namespace, name)] = (namespace, name)
    return found


def _flat(body: JsonObject) -> Iterator[tuple[str, JsonObject, str]]:
    """(namespace or "", tool, path), the tools of namespaces in their namespace's place."""
    for k, one in enumerate(fields.items(body, "tools")):
        tool, at = fields.as_object(one, f"tools[{k}]"), f"tools[{k}]"
        if tool.get("type") != "namespace":
            yield "", tool, at
            continue
        name = fields.as_text(tool.get("name"), f"{at}.name")
        for j, inner in enumerate(fields.items(tool, "tools", at=f"{at}.")):
            yield name, fields.as_object(inner, f"{at}.tools[{j}]"), f"{at}.tools[{j}]"


def _turns(items: Iterator[tuple[JsonObject, str]]) -> Iterator[Message]:
    """Messages in order; what the assistant said is gathered into turns."""
    turn: AssistantTurn | None = None
    for item, at in items:
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind in HOSTED:
            continue
        part = _assistant_part(item, kind, at)
        if part is None or (turn is not None and turn.last == part.last == "text"):
            if turn is not None:
                yield turn.message()
            turn = None
        if part is None:
            yield _other(item, kind, at)
        else:
            turn = turn or AssistantTurn()
            part.add_to(turn)
    if turn is not None:
        yield turn.message()


@dataclass(frozen=True, slots=True)
class _Part:
    """One item of an assistant's turn. last: what AssistantTurn calls its kind."""

    last: str
    text: str = ""
    call: ToolCall | None = None

    def add_to(self, turn: AssistantTurn) -> None:
        if self.call is not None:
            turn.add_call(self.call)
        elif self.last == "reasoning":
            turn.add_reasoning(self.text)
        else:
            turn.add_text(self.text)


def _assistant_part(item: JsonObject, kind: Any, at: str) -> _Part | None:
    """None: the item is not the assistant's."""
    if kind == "message" and item.get("role") == "assistant":
        return _Part("text", join_text(item.get("content"), f"{at}.content"))
    if kind == "reasoning":
        return _Part("reasoning", _reasoning(item, at))
    if kind == "function_call":
        name = flat_name(fields.text(item, "namespace", at=f"{at}."), fields.as_text(item.get("name"), f"{at}.name"))
        arguments = fields.text(item, "arguments", at=f"{at}.")
        return _Part("call", call=ToolCall(_call_id(item, at), name, arguments))
    if kind == "custom_tool_call":
        arguments = orjson.dumps({"input": fields.text(item, "input", at=f"{at}.")}).decode()
        return _Part(
            "call", call=ToolCall(_call_id(item, at), fields.as_text(item.get("name"), f"{at}.name"), arguments)
        )
    return None


def _other(item: JsonObject, kind: Any, at: str) -> Message:
    if kind in OUTPUTS:
        return Message("tool", join_text(item.get("output"), f"{at}.output"), tool_call_id=_call_id(item, at))
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise BadRequest(
                f"{at}.role must be one of {', '.join(ROLES)}, not {fields.shown(role)}",
                param=f"{at}.role",
                code="invalid_role",
            )
        return Message(ROLES[role], join_text(item.get("content"), f"{at}.content"))
    raise BadRequest(
        f"{at} is of type {fields.shown(kind)}, which cannot be read here; send the item itself: a message, a function_call, "
        "its function_call_output, or reasoning",
        param=f"{at}.type",
        code="unsupported_item",
    )


def _reasoning(item: JsonObject, at: str) -> str:
    """The full text where it is there, else its summary; encrypted reasoning is somebody else's."""
    for key in ("content", "summary"):
        parts = fields.items(item, key, at=f"{at}.")
        texts = [fields.as_object(part, f"{at}.{key}[{k}]").get("text") for k, part in enumerate(parts)]
        if said := "".join(text for text in texts if isinstance(text, str)):
            return said
    return ""


def _call_id(item: JsonObject, at: str) -> str:
    return fields.as_text(item.get("call_id"), f"{at}.call_id")
