"""Canonical form of messages: when is a message that a client sends back the one that was recorded?

    message_key(echo) == message_key(recorded.reply)       # bytes; equal = the same turn
    placed(call.messages)                                  # in canonical order; which call each tool result answers
    continues(recorded, call.messages)                     # how many leading messages are its history + its reply, or None

Clients drop reasoning, rewrite call ids, print tool arguments anew and swap the order of parallel tool results (measured:
qwen-code, OpenClaw, LangChain, Claude Code). None of that makes another turn. Text does: it is
compared verbatim, apart from an answer's leading think block and outer white space. Null, "" and absent, and one text
part and a string, are made equal before, by the dialects. Used by renderer.py and proxy/conversation.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from areal.base.types import Interaction, Message, Tool, ToolCall

_NOT_ALPHANUMERIC = re.compile(r"[^0-9A-Za-z]+")


# Made once: json.dumps makes an encoder for every call that wants these settings.
_JSON = json.JSONEncoder(separators=(",", ":"))
_SORTED_JSON = json.JSONEncoder(separators=(",", ":"), sort_keys=True, default=dict)


def message_key(message: Message) -> bytes:
    """Two messages are the same turn where their keys are equal, and their places in the conversation (placed)."""
    content = visible(message.content) if message.role == "assistant" else message.content
    calls = [[call.name, _arguments(call)] for call in message.tool_calls]
    name = message.name if message.role in ("user", "system") else ""
    key = [message.role, content, calls, name]
    return _JSON.encode(key).encode()


def tools_key(tools: Sequence[Tool]) -> bytes:
    """Equal for tool lists that say the same in the same order."""
    said = [[tool.name, tool.description, tool.parameters] for tool in tools]
    return _SORTED_JSON.encode(said).encode()


def visible(content: str) -> str:
    """An answer without its leading think block (whose opening tag may stand in the prompt) and outer white space."""
    think, closing, rest = content.partition("</think>")
    opens = think.count("<think>")
    folded = closing and (opens == 0 or (opens == 1 and think.lstrip().startswith("<think>")))
    return (rest if folded else content).strip()


def placed(messages: Sequence[Message]) -> list[tuple[Message, bytes]]:
    """A conversation in canonical order, and beside each tool result which call it answers; b"" beside everything else.

    Results of one turn stand in the order of its calls, and say by number which call of it (or of how many turns before) they
    answer: clients send them in the order in which they finished, and some give calls ids of their own. Two conversations are the same as far as the keys and
    places of their messages are; those of a beginning do not depend on what follows."""
    # Call id -> its turn, counted among turns with calls, and its number there.
    numbers: dict[str, tuple[int, int]] = {}
    result: list[tuple[Message, bytes]] = []
    run: list[Message] = []
    turn = 0
    for message in messages:
        if message.role == "tool":
            run.append(message)
            continue
        if run:
            result += _in_place(run, numbers, turn)
            run = []
        result.append((message, b""))
        turn += bool(message.tool_calls)
        numbers |= {_id(call.id): (turn, number) for number, call in enumerate(message.tool_calls)}
    return result + _in_place(run, numbers, turn)


def same_ids(recorded: Interaction, messages: Sequence[Message]) -> bool:
    """Whether the calls of a conversation that continues the recorded one still have their ids."""
    pairs = zip((*recorded.messages, recorded.reply), messages, strict=False)
    return all(
        _id(ours.id) == _id(theirs.id)
        for one, other in pairs
        for ours, theirs in zip(one.tool_calls, other.tool_calls, strict=False)
    )


def continues(recorded: Interaction, messages: Sequence[Message]) -> int | None:
    """How many leading messages are the recorded history and its reply; None where they are not."""
    return None if difference(recorded, messages) else len(recorded.messages) + 1


def difference(recorded: Interaction, messages: Sequence[Message]) -> str:
    """Why `messages` do not begin with the recorded history and reply; empty if they do."""
    history = [*recorded.messages, recorded.reply]
    if len(messages) < len(history):
        return f"{len(messages)} messages came, {len(history)} are recorded"
    leading = messages[: len(history)]
    pairs = zip(placed(history), placed(leading), strict=True)
    for index, ((ours, own_place), (theirs, place)) in enumerate(pairs):
        same = ours == theirs or message_key(ours) == message_key(theirs)  # keys cost far more than the comparison
        if not same or own_place != place:
            what = "the reply" if index == len(history) - 1 else f"message {index}"
            return f"{what} ({theirs.role}) is not the recorded one"
    return ""


def _in_place(run: Sequence[Message], numbers: Mapping[str, tuple[int, int]], turn: int) -> list[tuple[Message, bytes]]:
    """Tool results in the order of their calls; behind them those that answer none, by id. turn: the last one with calls."""
    answers: list[tuple[int, int, Message]] = []
    strays: list[tuple[str, Message]] = []
    for one in run:
        name = _id(one.tool_call_id)
        if name in numbers:
            answers.append((*numbers[name], one))
        else:
            strays.append((name, one))
    answers.sort(key=lambda found: found[:2])
    strays.sort(key=lambda found: found[0])
    placed_answers = [(one, f"#{turn - of}.{number}".encode()) for of, number, one in answers]
    return placed_answers + [(one, name.encode()) for name, one in strays]


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
