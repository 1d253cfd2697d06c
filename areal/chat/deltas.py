"""What a client sees of an answer, piece by piece, and the message that the pieces make.

    sink = DeltaSink(new_id=call_id)
    sink.text("Let me look.\n"); sink.call("weather"); sink.arguments('{"city": "Oslo"}')
    sink.take()                     # [TextDelta("Let me look."), CallDelta(0, "call…", "weather", '{"city": "Oslo"}')]
    fold(deltas)                    # the assistant message

White space beside a tool call is markup and is left out; any other is text, verbatim. A call's id and name stand in its
first delta only. Deltas are Structs, as TokenChunk is: there is one for every token. Used by stream_parser.py and tool_formats/.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Iterable

import msgspec

from areal.base.types import Message, ToolCall

_ALPHANUMERIC = string.ascii_letters + string.digits


class TextDelta(msgspec.Struct, frozen=True):
    """More of the answer's text; never empty."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    """More of what the model thinks before it answers; never empty."""

    text: str


class CallDelta(msgspec.Struct, frozen=True):
    """A piece of tool call `index`, counted from 0. id and name stand in the call's first piece only; a model writes one call
    after the other, so once a higher index has come, a lower one is complete."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


Delta = TextDelta | ReasoningDelta | CallDelta


def call_id(length: int = 24) -> str:
    """A new id, of a tool call or an answer: letters and digits only, because clients strip everything else (clients were measured)."""
    return "".join(_ALPHANUMERIC[byte % len(_ALPHANUMERIC)] for byte in secrets.token_bytes(length))


class DeltaSink:
    """Where the readers of one answer put what they found. Neighbouring deltas of one kind become one."""

    def __init__(self, new_id: Callable[[], str] = call_id, *, calls: bool = True) -> None:
        """calls: whether there may be some; without them no white space has to wait."""
        self._new_id = new_id
        self._may_call = calls
        self._deltas: list[Delta] = []
        self._held = ""  # white space of which it is not known yet whether a call follows
        self._after_call = False
        self._calls = 0

    def text(self, text: str) -> None:
        """More visible text."""
        shown = text
        if self._may_call:
            text = self._held + text
            shown = text.rstrip()
            self._held = text[len(shown) :]
        if shown:
            self._after_call = False
            self._add(TextDelta(shown))

    def reasoning(self, text: str) -> None:
        if text:
            self._add(ReasoningDelta(text))

    def call(self, name: str) -> None:
        """A call begins."""
        self._held, self._after_call = "", True
        self._add(CallDelta(self._calls, self._new_id(), name))
        self._calls += 1

    def arguments(self, text: str) -> None:
        """More of the last call's argument text."""
        if text:
            self._add(CallDelta(self._calls - 1, arguments=text))

    def finish(self) -> None:
        """The answer is complete: white space at its end is text, unless a call stands before it."""
        held, self._held = self._held, ""
        if held and not self._after_call:
            self._add(TextDelta(held))

    def take(self) -> list[Delta]:
        """What was put in since the last time."""
        taken, self._deltas = self._deltas, []
        return taken

    def _add(self, delta: Delta) -> None:
        if not self._deltas:
            self._deltas.append(delta)
            return
        match self._deltas[-1], delta:
            case TextDelta(text), TextDelta(more):
                self._deltas[-1] = TextDelta(text + more)
            case ReasoningDelta(text), ReasoningDelta(more):
                self._deltas[-1] = ReasoningDelta(text + more)
            case CallDelta() as call, CallDelta(index, "", "", more) if call.index == index:
                self._deltas[-1] = msgspec.structs.replace(call, arguments=call.arguments + more)
            case _:
                self._deltas.append(delta)


def fold(deltas: Iterable[Delta]) -> Message:
    """The assistant message that a stream of deltas makes."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[tuple[str, str, list[str]]] = []
    for delta in deltas:
        if isinstance(delta, TextDelta):
            texts.append(delta.text)
        elif isinstance(delta, ReasoningDelta):
            thoughts.append(delta.text)
        else:
            if delta.index == len(calls):
                calls.append((delta.id, delta.name, []))
            calls[delta.index][2].append(delta.arguments)
    tool_calls = tuple(ToolCall(id, name, "".join(arguments)) for id, name, arguments in calls)
    return Message("assistant", "".join(texts), reasoning="".join(thoughts), tool_calls=tool_calls)
