"""A short stand-in for a long recorded conversation: what a turn's rendering has to see, so that it costs what is new.

    if not whole_check_due(len(recorded.messages), len(messages)):
        history = stand_in(recorded.messages)          # the same tuple where it is short already

A chat template writes a turn by that turn and its neighbours. So the stand-in keeps the beginning (system turn, first
exchange), the end, and reaches back until every kind of message that occurs (role, reasoning, tool calls, ...) has stood
once more; the turns at the seam are neighbours of the kind that they had before. What a template does to old turns when new ones come
(Qwen3 drops reasoning before the last question) it does to those in the stand-in too, and renderer.py sees it. What a template
does by counting, or to turns that are far away, shows only in a whole rendering: that is compared for every
conversation that is still short, and again each time a conversation has grown by half. Pure. Used by renderer.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from areal.base.types import Message
from areal.chat.canonical import visible

SHORT = 32  # messages; up to here every rendering is whole
_HEAD = 4
_TAIL = 12
_Kind = tuple[str, bool, bool, int, bool, bool]


def whole_check_due(recorded: int, now: int) -> bool:
    """Whether a conversation that grows from `recorded` to `now` messages is rendered whole this time: while it is short,
    then at 48, 72, 108, ... messages."""
    mark = SHORT
    while mark <= recorded:
        mark += mark // 2
    return now <= SHORT or mark <= now


def stand_in(history: Sequence[Message]) -> Sequence[Message]:
    """The beginning and the end of `history`; all of it where nothing can be left out."""
    kinds = [_kind(message) for message in history]
    wanted, tail = set(kinds[_HEAD:]), len(history)
    seen: set[_Kind] = set()
    while tail > _HEAD and (len(history) - tail < _TAIL or seen < wanted):
        tail -= 1
        seen.add(kinds[tail])
    # Cut in front of a turn that continues the beginning as the turn cut off there did.
    for begin in range(tail, _HEAD, -1):
        if kinds[begin] == kinds[_HEAD] and kinds[begin - 1] == kinds[_HEAD - 1] and history[begin].role != "tool":
            return [*history[:_HEAD], *history[begin:]]
    return history


def _kind(message: Message) -> _Kind:
    """What a template may tell messages apart by, their text aside."""
    thinks = bool(message.reasoning) or (
        message.role == "assistant" and "</think>" in message.content and visible(message.content) != message.content
    )
    return (
        message.role,
        thinks,
        bool(message.content.strip()),
        min(2, len(message.tool_calls)),
        bool(message.name),
        message.instructions,
    )
