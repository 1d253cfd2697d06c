"""Mistral: [TOOL_CALLS], then a JSON list of calls, or (since tokenizer v11) a name and its arguments for each marker.

    [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}]
    [TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]weather[ARGS]{"city": "Rome"}

[CALL_ID] with an id after the name is read over, and [ARGS] may be missing. Ids have nine characters: the
templates of this family refuse any other.
"""

from __future__ import annotations

from areal.chat.deltas import DeltaSink
from areal.chat.source import Reading, Source
from areal.chat.tool_formats.base import Tools, read_head, text_until
from areal.chat.tool_formats.calls import Outcome, raw_until, read_arguments, read_calls

CALLS, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class Mistral:
    """See ToolFormat."""

    marks: tuple[str, ...] = (CALLS,)
    markers: tuple[str, ...] = (CALLS, ARGUMENTS, CALL_ID)
    id_length = 9

    def read(self, source: Source, sink: DeltaSink, tools: Tools) -> Reading[None]:
        while (yield from text_until(source, sink, (CALLS,))):
            start = source.at
            source.take(len(CALLS))
            yield from source.spaces()
            outcome = yield from read_calls(source, sink, tools)
            if outcome is Outcome.BROKEN:
                yield from raw_until(source, sink, (CALLS,))
            elif outcome is Outcome.NONE and not (yield from _named(source, sink)):
                source.at = start
                sink.text(source.take(len(CALLS)))


def _named(source: Source, sink: DeltaSink) -> Reading[bool]:
    name = yield from read_head(source, ARGUMENTS, CALL_ID, "{")
    if not name:
        return False
    if (yield from source.accept(CALL_ID)) and (yield from read_head(source, ARGUMENTS, "{")) is None:
        return False
    yield from source.accept(ARGUMENTS)
    sink.call(name)
    yield from read_arguments(source, sink, (CALLS,))
    return True
