"""DeepSeek V3, R1 and V3.1: a section of calls between markers of their own.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3 and R1 write `function` before the separator, then the name on a line and the arguments in a ```json fence.
"""

from __future__ import annotations

from areal.chat.deltas import DeltaSink
from areal.chat.source import Reading, Source
from areal.chat.tool_formats.base import Tools, read_head, read_sections
from areal.chat.tool_formats.calls import read_arguments

SECTION, END_SECTION = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_ENDS = (END_CALL, CALL, END_SECTION)


class DeepSeek:
    """See ToolFormat."""

    marks: tuple[str, ...] = (SECTION,)
    markers: tuple[str, ...] = (SECTION, END_SECTION, CALL, SEPARATOR, END_CALL)
    id_length = 24

    def read(self, source: Source, sink: DeltaSink, tools: Tools) -> Reading[None]:
        return read_sections(source, sink, (SECTION, CALL, END_SECTION), _call)


def _call(source: Source, sink: DeltaSink) -> Reading[bool]:
    name = yield from read_head(source, SEPARATOR)
    if not name:
        return False
    source.take(len(SEPARATOR))
    fence = ""
    if name == "function" and (yield from source.peek()) != "{":
        name = yield from read_head(source, "\n")
        if not name:
            return False
        yield from source.spaces()
        fence = yield from source.accept_closing("```json", "```")
    sink.call(name)
    yield from read_arguments(source, sink, ("```", *_ENDS) if fence else _ENDS)
    after = source.at
    yield from source.spaces()
    if fence and (yield from source.accept_closing("```")):
        after = source.at
        yield from source.spaces()
    if not (yield from source.accept_closing(END_CALL)):
        source.at = after
    return True
