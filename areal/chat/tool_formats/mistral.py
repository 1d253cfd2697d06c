"""Mistral: [TOOL_CALLS], then a JSON list of calls, or (since tokenizer v11) a name and its arguments for each marker.

    [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}]
    [TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]weather[ARGS]{"city": "Rome"}

[CALL_ID] with an id after the name is read over, and [ARGS] may be missing. Ids have nine characters: the
templates of this family refuse any other.
"""

from __future__ import annotations

from collections.abc import Sequence

from areal.base.types import Tool
from areal.chat.deltas import DeltaSink
from areal.chat.grammar import Rules
from areal.chat.source import Reading, Source
from areal.chat.tool_formats.base import Tools, read_head, text_until
from areal.chat.tool_formats.calls import Outcome, arguments_schema, call_schema, raw_until, read_arguments, read_calls

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

    def required(self, rules: Rules, tools: Sequence[Tool], *, most: int, template: str) -> str:
        marker = rules.marker(CALLS)
        if ARGUMENTS not in template:
            calls = rules.several(rules.json(call_schema(tools)), rules.literal(", "), most)
            return rules.rule(marker, "/ ?/", rules.literal("["), calls, rules.literal("]"))
        calls = rules.either(*(_named_call(rules, tool) for tool in tools))
        one = rules.rule(marker, calls)
        return rules.rule(f"{one}{{1,{most}}}")


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


def _named_call(rules: Rules, tool: Tool) -> str:
    return rules.rule(rules.name(tool.name), rules.marker(ARGUMENTS), rules.json(arguments_schema(tool)))
