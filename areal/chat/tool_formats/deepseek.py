"""DeepSeek V3, R1 and V3.1: a section of calls between markers of their own.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3 and R1 write `function` before the separator, then the name on a line and the arguments in a ```json fence.
"""

from __future__ import annotations

from collections.abc import Sequence

from areal.base.types import Tool
from areal.chat.deltas import DeltaSink
from areal.chat.grammar import Rules
from areal.chat.source import Reading, Source
from areal.chat.tool_formats.base import Tools, read_head, read_sections
from areal.chat.tool_formats.calls import arguments_schema, read_arguments

SECTION, END_SECTION = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```json"
_ENDS = (END_CALL, CALL, END_SECTION)


class DeepSeek:
    """See ToolFormat."""

    marks: tuple[str, ...] = (SECTION,)
    markers: tuple[str, ...] = (SECTION, END_SECTION, CALL, SEPARATOR, END_CALL)
    id_length = 24

    def read(self, source: Source, sink: DeltaSink, tools: Tools) -> Reading[None]:
        return read_sections(source, sink, (SECTION, CALL, END_SECTION), _call)

    def required(self, rules: Rules, tools: Sequence[Tool], *, most: int, template: str) -> str:
        fenced = FENCE in template
        calls = rules.either(*(_spelt(rules, tool, fenced) for tool in tools))
        between = rules.literal("\n") if fenced else ""
        one = rules.rule(rules.marker(CALL), calls, rules.marker(END_CALL))
        several = rules.several(one, between, most)
        return rules.rule(rules.marker(SECTION), several, rules.marker(END_SECTION))


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
        fence = yield from source.accept_closing(FENCE, "```")
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


def _spelt(rules: Rules, tool: Tool, fenced: bool) -> str:
    arguments, separator = rules.json(arguments_schema(tool)), rules.marker(SEPARATOR)
    if not fenced:
        return rules.rule(rules.name(tool.name), separator, arguments)
    before, after = rules.literal(f"\n{FENCE}\n"), rules.literal("\n```")
    return rules.rule(rules.literal("function"), separator, rules.name(tool.name), before, arguments, after)
