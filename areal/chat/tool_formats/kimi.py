"""Kimi K2: a section of calls between markers of their own; the name stands in an id, `functions.NAME:INDEX`.

<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Oslo"}
<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

from collections.abc import Sequence

from areal.base.types import Tool
from areal.chat.deltas import DeltaSink
from areal.chat.grammar import Rules
from areal.chat.source import Reading, Source
from areal.chat.tool_formats.base import Tools, read_head, read_sections
from areal.chat.tool_formats.calls import arguments_schema, read_arguments

SECTION, END_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, END_CALL = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ENDS = (END_CALL, CALL, END_SECTION)


class Kimi:
    """See ToolFormat."""

    marks: tuple[str, ...] = (SECTION,)
    markers: tuple[str, ...] = (SECTION, END_SECTION, CALL, ARGUMENTS, END_CALL)
    id_length = 24

    def read(self, source: Source, sink: DeltaSink, tools: Tools) -> Reading[None]:
        return read_sections(source, sink, (SECTION, CALL, END_SECTION), _call)

    def required(self, rules: Rules, tools: Sequence[Tool], *, most: int, template: str) -> str:
        calls = rules.either(*(_spelt(rules, tool) for tool in tools))
        one = rules.rule(rules.marker(CALL), rules.literal("functions."), calls, rules.marker(END_CALL))
        return rules.rule(rules.marker(SECTION), f"{one}{{1,{most}}}", rules.marker(END_SECTION))


def _call(source: Source, sink: DeltaSink) -> Reading[bool]:
    head = yield from read_head(source, ARGUMENTS)
    name = (head or "").removeprefix("functions.").partition(":")[0]
    if not name:
        return False
    source.take(len(ARGUMENTS))
    sink.call(name)
    yield from read_arguments(source, sink, _ENDS)
    after = source.at
    yield from source.spaces()
    if not (yield from source.accept_closing(END_CALL)):
        source.at = after
    return True


def _spelt(rules: Rules, tool: Tool) -> str:
    arguments = rules.json(arguments_schema(tool))
    return rules.rule(rules.name(tool.name), "/:[0-9]{1,2}/", rules.marker(ARGUMENTS), arguments)
