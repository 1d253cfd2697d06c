"""Conversations as a chat template takes them, and what a template cannot show for itself, put into words.

    needs = TemplateNeeds.of(template_source)
    messages, tools = template_input(messages, tools, needs)         # dicts in OpenAI's shape

Templates get tool arguments decoded (T004); the wire keeps its text. Arguments that are no JSON object reach them as text, or, where
a template insists on an object (`wrapped`), as {"arguments": text}: a malformed call must not end the conversation.
A template without a tools section gets the default tools prompt below in its system turn, calls and results as text of
assistant and user turns (Hermes' format, which hermes.py reads back); one that knows no reasoning gets it as a think block before
the answer. So tools work with every model, and history is kept. Pure. Used by template.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from areal.base.types import Message, Tool, ToolCall
from areal.chat.json_text import decoded

TOOLS_PROMPT = """You can call these functions:
<tools>
{tools}
</tools>
To call one, write
<tool_call>
{{"name": NAME, "arguments": {{...}}}}
</tool_call>"""
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_TOOLS = re.compile(r"\btools\b|\btool_calls\b")


@dataclass(frozen=True, slots=True)
class TemplateNeeds:
    """What has to be written as text because the template has no place for it. numbered_ids: it prints call ids, and its
    model writes them as `functions.NAME:NUMBER`."""

    tools: bool = False
    reasoning: bool = False
    numbered_ids: bool = False

    @classmethod
    def of(cls, source: str) -> TemplateNeeds:
        source = _COMMENT.sub("", source)
        return cls(
            tools=not _TOOLS.search(source),
            reasoning="reasoning_content" not in source,
            numbered_ids="<|tool_calls_section_begin|>" in source,
        )


def template_input(
    messages: Sequence[Message], tools: Sequence[Tool], needs: TemplateNeeds, *, wrapped: bool = False
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What the variables `messages` and `tools` get."""
    if needs.reasoning:
        messages = [_reasoning_in_words(message) for message in messages]
    if needs.tools:
        messages = _tools_in_words(messages, tools)
    if needs.numbered_ids:
        messages = _numbered(messages)
    return template_messages(messages, wrapped=wrapped), template_tools(tools)


def template_messages(messages: Sequence[Message], *, wrapped: bool = False) -> list[dict[str, Any]]:
    """Messages as templates expect them: dicts; tool arguments decoded where they are JSON objects; a tool's name."""
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    shown: list[dict[str, Any]] = []
    for message in messages:
        entry: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning:
            entry["reasoning_content"] = message.reasoning
        if message.tool_calls:
            entry["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": _arguments(call, wrapped)},
                }
                for call in message.tool_calls
            ]
        if message.role == "tool":
            entry["tool_call_id"] = message.tool_call_id
        name = message.name or names.get(message.tool_call_id, "") if message.role == "tool" else message.name
        if name:
            entry["name"] = name
        shown.append(entry)
    return shown


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools in OpenAI's shape, which is what templates print."""
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
        }
        for tool in tools
    ]


def has_object_arguments(call: ToolCall) -> bool:
    """Whether the call's arguments are what the API wants: a JSON object, or nothing."""
    return isinstance(_arguments(call, wrapped=False), dict)


def _arguments(call: ToolCall, wrapped: bool) -> Any:
    value = decoded(call.arguments or "{}")
    if isinstance(value, dict):
        return value
    return {"arguments": call.arguments} if wrapped else call.arguments


def _reasoning_in_words(message: Message) -> Message:
    if message.role != "assistant" or not message.reasoning:
        return message
    return replace(message, content=f"<think>\n{message.reasoning}\n</think>\n\n{message.content}", reasoning="")


def _numbered(messages: Sequence[Message]) -> list[Message]:
    """Calls counted over the conversation, with ids as the model writes them, and results that name them."""
    ids: dict[str, str] = {}
    shown = []
    for message in messages:
        for call in message.tool_calls:
            ids[call.id] = f"functions.{call.name}:{len(ids)}"
        calls = tuple(replace(call, id=ids[call.id]) for call in message.tool_calls)
        result = ids.get(message.tool_call_id, message.tool_call_id)
        shown.append(replace(message, tool_calls=calls, tool_call_id=result))
    return shown


def _tools_in_words(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The same conversation without the role `tool`, tool calls and tools; unchanged where there are none."""
    shown: list[Message] = []
    after_result = False
    for message in messages:
        if message.role == "tool":
            result = f"<tool_response>\n{message.content}\n</tool_response>"
            if after_result:
                shown[-1] = replace(shown[-1], content=f"{shown[-1].content}\n{result}")
            else:
                shown.append(Message("user", result))
        elif message.tool_calls:
            calls = [_call_in_words(call) for call in message.tool_calls]
            content = "\n".join([message.content, *calls] if message.content else calls)
            shown.append(replace(message, content=content, tool_calls=()))
        else:
            shown.append(message)
        after_result = message.role == "tool"
    if not tools:
        return shown
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in template_tools(tools))
    prompt = TOOLS_PROMPT.format(tools=listed)
    if shown and shown[0].role == "system":
        return [replace(shown[0], content=f"{shown[0].content}\n\n{prompt}"), *shown[1:]]
    return [Message("system", prompt), *shown]


def _call_in_words(call: ToolCall) -> str:
    value = _arguments(call, wrapped=False)
    arguments = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return (
        f'<tool_call>\n{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {arguments}}}\n</tool_call>'
    )
