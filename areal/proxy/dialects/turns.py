"""The assistant's turn put together from the parts that a protocol splits it into.

    turn = AssistantTurn()
    turn.add_reasoning("add them"); turn.add_text("I will call."); turn.add_call(ToolCall("t1", "add", "{}"))
    turn.message()                     # Message("assistant", "I will call.", reasoning="add them", tool_calls=(...,))

Two texts next to each other are two parts and are joined as everywhere. Texts on both sides of a call or of reasoning are one text
that our own answer was split into, and are put together as they were. Used by the Responses and Messages dialects.
"""

from __future__ import annotations

from areal.base.types import Message, ToolCall
from areal.proxy.dialects.base import TEXT_JOINER


class AssistantTurn:
    """Collects one turn. last: the kind of part that came last, empty before the first."""

    def __init__(self) -> None:
        self.last = ""
        self._text = ""
        self._reasoning = ""
        self._calls: list[ToolCall] = []

    def add_text(self, text: str) -> None:
        self._text += (TEXT_JOINER if self.last == "text" else "") + text
        self.last = "text"

    def add_reasoning(self, text: str) -> None:
        self._reasoning += text
        self.last = "reasoning"

    def add_call(self, call: ToolCall) -> None:
        self._calls.append(call)
        self.last = "call"

    def message(self) -> Message:
        return Message("assistant", self._text, reasoning=self._reasoning, tool_calls=tuple(self._calls))
