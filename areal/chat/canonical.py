"""Canonical form of messages: when is a message that a client sends back the one that was recorded?

    message_key(echo) == message_key(recorded.reply)       # bytes; equal = the same turn
    continues(recorded, call.messages)                     # how many leading messages are its history + its reply, or None

Clients drop reasoning, strip the non-alphanumerics from call ids, print tool arguments anew and swap the order of parallel
tool results (measured: OpenClaw, qwen-code, LangChain, Claude Code). None of that makes another turn. Text does: it is
compared verbatim, apart from an answer's leading think block and outer white space. Null, "" and absent, and one text
part and a string, are made equal before, by the dialects. Used by renderer.py and proxy/conversation.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from areal.base.types import Interaction, Message, Tool, ToolCall

_NOT_ALPHANUMERIC = re.compile(r"[^0-9A-Za-z]+")


def message_key(message: Message) -> bytes:
    """Two messages are the same turn where their keys are equal."""
    content = visible(message.content) if message.role == "assistant" else message.content
    calls = [[_id(call.id), call.name, _arguments(call)] for call in message.tool_calls]
    name = message.name if message.role in ("user", "system") else ""
    key = [message.role, content, calls, _id(message.tool_call_id), name]
    return json.dumps(key, ensure_ascii=True, separators=(",", ":")).encode()


def tools_key(tools: Sequence[Tool]) -> bytes:
    """Equal for tool lists that say the same in the same order."""
    said = [[tool.name, tool.description, tool.parameters] for tool in tools]
    return json.dumps(said, sort_keys=True, separators=(",", ":"), default=dict).encode()


def visible(content: str) -> str:
    """An answer without its leading think block (whose opening tag may stand in the prompt) and outer white space."""
    think, closing, rest = content.partition("</think>")
    opens = think.count("<think>")
    folded = closing and (opens == 0 or (opens == 1 and think.lstrip().startswith("<think>")))
    return (rest if folded else content).strip()


def ordered(messages: Sequence[Message]) -> list[Message]:
    """Runs of tool results sorted by call id: clients send parallel results in the order in which they finished."""
    result: list[Message] = []
    run: list[Message] = []
    for message in messages:
        if message.role == "tool":
            run.append(message)
            continue
        result += sorted(run, key=lambda one: _id(one.tool_call_id))
        run = []
        result.append(message)
    return result + sorted(run, key=lambda one: _id(one.tool_call_id))


def continues(recorded: Interaction, messages: Sequence[Message]) -> int | None:
    """How many leading messages are the recorded history and its reply; None where they are not."""
    return None if difference(recorded, messages) else len(recorded.messages) + 1


def difference(recorded: Interaction, messages: Sequence[Message]) -> str:
    """Why `messages` do not begin with the recorded history and reply; empty if they do."""
    history = [*recorded.messages, recorded.reply]
    if len(messages) < len(history):
        return f"{len(messages)} messages came, {len(history)} are recorded"
    leading = messages[: len(history)]
    for index, (ours, theirs) in enumerate(zip(ordered(history), ordered(leading), strict=True)):
        if ours != theirs and message_key(ours) != message_key(theirs):  # keys cost far more than the comparison
            what = "the reply" if index == len(history) - 1 else f"message {index}"
            return f"{what} ({theirs.role}) is not the recorded one"
    return ""


def _id(text: str) -> str:
    return _NOT_ALPHANUMERIC.sub("", text)


def _arguments(call: ToolCall) -> str:
    """Equal for equal JSON, whatever its spacing, key order, escapes and spelling of numbers; other text stands for itself."""
    try:
        value = json.loads(call.arguments, parse_float=_number)
        return "json:" + json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return "text:" + call.arguments


def _number(text: str) -> int | float:
    """JavaScript has one kind of number: it prints 1.0 as 1."""
    value = float(text)
    return int(value) if value.is_integer() else value
