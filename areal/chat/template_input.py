"""Conversations as a chat template takes them, and what a template cannot show for itself, put into words.

    needs = TemplateNeeds.of(template_source)
    messages, tools = template_input(messages, tools, needs)         # dicts in OpenAI's shape

Templates get tool arguments decoded (T004); the wire keeps its text. Arguments that are no JSON object reach them as text. Where a
template fails on that, it gets them as {"arguments": text} (`wrapped`), for a malformed call must not end the conversation;
where it puts texts together itself, as DeepSeek's does, it gets all as they were sent (`text`); where it refuses parallel calls,
as Llama 3's does, they stand one after the other.
A template that lists no tools gets the list below in its system turn. One that knows neither calls nor results gets the
default tools prompt, and they become text of assistant and user turns (Hermes' format, which hermes.py reads back); one
that knows no reasoning gets it as a think block before the answer. So tools work with every model. Pure. Used by template.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from areal.base.types import Message, Tool, ToolCall
from areal.chat.json_text import decoded

TOOL_LIST = """You can call these functions:
<tools>
{tools}
</tools>"""
TOOLS_PROMPT = """{tool_list}
To call one, write
<tool_call>
{{"name": NAME, "arguments": {{...}}}}
</tool_call>"""
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_NULL_CONTENT = re.compile(r"""content['"]?\]? is none""")

Arguments = Literal["decoded", "wrapped", "text"]


@dataclass(frozen=True, slots=True)
class TemplateNeeds:
    """What has to be written as text because the template has no place for it: the list of tools, calls and their results,
    reasoning. null_content: it shows calls only where the content is null. numbered_ids: it prints call ids, and its model
    writes them as `functions.NAME:NUMBER`."""

    tools: bool = False
    calls: bool = False
    null_content: bool = False
    reasoning: bool = False
    numbered_ids: bool = False

    @classmethod
    def of(cls, source: str) -> TemplateNeeds:
        source = _COMMENT.sub("", source)
        return cls(
            tools=not re.search(r"\btools\b", source),
            calls=not re.search(r"\btools\b|\btool_calls\b", source),
            null_content=bool(_NULL_CONTENT.search(source)),
            reasoning="reasoning_content" not in source,
            numbered_ids="<|tool_calls_section_begin|>" in source,
        )


def template_input(
    messages: Sequence[Message], tools: Sequence[Tool], needs: TemplateNeeds, arguments: Arguments = "decoded"
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What the variables `messages` and `tools` get."""
    if needs.reasoning:
        messages = [_reasoning_in_words(message) for message in messages]
    if needs.calls:
        messages = _calls_in_words(messages)
    if needs.tools and tools:
        messages = _tools_in_words(messages, tools, TOOLS_PROMPT if needs.calls else "{tool_list}")
    if needs.numbered_ids:
        messages = _numbered(messages)
    shown = template_messages(messages, arguments)
    if needs.null_content:
        for entry in shown:
            if "tool_calls" in entry and not entry["content"]:
                entry["content"] = None
    return shown, template_tools(tools)


def template_messages(messages: Sequence[Message], arguments: Arguments = "decoded") -> list[dict[str, Any]]:
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
                    "function": {"name": call.name, "arguments": _arguments(call, arguments)},
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


def one_call_a_turn(messages: Sequence[Message]) -> list[Message]:
    """Parallel calls one after the other, each with its results, for templates that know no parallel ones (Llama 3)."""
    shown: list[Message] = []
    for message in messages:
        if message.role == "tool" and shown:
            # Behind its own call, and behind what stands there already; results without a call stay where they are.
            own = (k for k, one in enumerate(shown) if any(call.id == message.tool_call_id for call in one.tool_calls))
            place = max(own, default=len(shown) - 1) + 1
            while place < len(shown) and shown[place].role == "tool":
                place += 1
            shown.insert(place, message)
        elif len(message.tool_calls) > 1:
            first, *others = message.tool_calls
            shown.append(replace(message, tool_calls=(first,)))
            shown += [Message("assistant", tool_calls=(call,)) for call in others]
        else:
            shown.append(message)
    return shown


def has_object_arguments(call: ToolCall) -> bool:
    """Whether the call's arguments are what the API wants: a JSON object, or nothing."""
    return isinstance(_arguments(call), dict)


def _arguments(call: ToolCall, form: Arguments = "decoded") -> Any:
    value = decoded(call.arguments or "{}")
    if form == "text":
        return call.arguments
    if isinstance(value, dict):
        return value
    return {"arguments": call.arguments} if form == "wrapped" else call.arguments


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


def _calls_in_words(messages: Sequence[Message]) -> list[Message]:
    """The same conversation without the role `tool` and without tool calls; unchanged where there are none."""
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
    return shown


def _tools_in_words(messages: Sequence[Message], tools: Sequence[Tool], prompt: str) -> list[Message]:
    """The same conversation with the prompt and the list of tools at the end of its system turn."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in template_tools(tools))
    text = prompt.format(tool_list=TOOL_LIST.format(tools=listed))
    if messages and messages[0].role == "system":
        return [replace(messages[0], content=f"{messages[0].content}\n\n{text}"), *messages[1:]]
    return [Message("system", text), *messages]


def _call_in_words(call: ToolCall) -> str:
    value = _arguments(call)
    arguments = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return (
        f'<tool_call>\n{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {arguments}}}\n</tool_call>'
    )
