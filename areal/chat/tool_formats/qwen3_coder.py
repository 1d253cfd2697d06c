"""Qwen3-Coder: a function tag with parameter tags, whose values are plain text (tagged.py makes them JSON).

    <tool_call>
    <function=weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>
    </tool_call>

The outer tag may be missing, and JSON inside it is read as Hermes' is. A function tag with something else than parameters
in it is a call with that text as its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

from areal.base.types import Tool
from areal.chat.deltas import DeltaSink
from areal.chat.grammar import Rules
from areal.chat.source import Reading, Source
from areal.chat.tool_formats.base import Tools, read_head, text_until
from areal.chat.tool_formats.calls import raw_until, read_arguments
from areal.chat.tool_formats.hermes import CLOSE, OPEN, read_block
from areal.chat.tool_formats.tagged import TaggedArguments, tagged_rule

FUNCTION, END = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_ENDS = (END, CLOSE, OPEN, FUNCTION)


class Qwen3Coder:
    """See ToolFormat."""

    marks: tuple[str, ...] = (FUNCTION,)
    markers: tuple[str, ...] = (OPEN, CLOSE, FUNCTION, END, PARAMETER, END_PARAMETER)
    id_length = 24

    def read(self, source: Source, sink: DeltaSink, tools: Tools) -> Reading[None]:
        while found := (yield from text_until(source, sink, (OPEN, FUNCTION))):
            start = source.at
            yield from source.accept(OPEN)
            yield from source.spaces()
            if not (yield from source.begins(FUNCTION)):
                source.at = start
                yield from read_block(source, sink, tools)
                continue
            if not (yield from _functions(source, sink, tools)):
                source.at = start
                sink.text(source.take(len(found)))

    def required(self, rules: Rules, tools: Sequence[Tool], *, most: int, template: str) -> str:
        line = rules.literal("\n")
        function, tag, parameter = rules.literal(FUNCTION), rules.literal(">\n"), rules.literal(PARAMETER)

        def before(key: str) -> str:
            return rules.rule(parameter, rules.name(key), tag)

        bodies = (
            rules.rule(rules.name(one.name), tag, tagged_rule(rules, one, before, END_PARAMETER, lines=True))
            for one in tools
        )
        calls = rules.rule(function, rules.either(*bodies), rules.literal(END), line)
        return rules.several(rules.rule(rules.marker(OPEN), line, calls, rules.marker(CLOSE)), line, most)


def _functions(source: Source, sink: DeltaSink, tools: Tools) -> Reading[bool]:
    """All functions that stand here, and the closing tag of their block."""
    count, after = 0, source.at
    while (yield from source.accept(FUNCTION)):
        name = yield from read_head(source, ">")
        if not name:
            source.at = after
            return count > 0
        source.take()
        yield from _function(source, sink, tools, name)
        count, after = count + 1, source.at
        yield from source.spaces()
    if not (yield from source.accept_closing(CLOSE)):
        source.at = after
    return True


def _function(source: Source, sink: DeltaSink, tools: Tools, name: str) -> Reading[None]:
    sink.call(name)
    arguments = TaggedArguments(sink, tools.get(name))
    yield from source.spaces()
    if not (yield from source.begins(PARAMETER, *_ENDS)):
        yield from read_arguments(source, sink, _ENDS)
        yield from source.accept_closing(END)
        return
    while (yield from source.begins(PARAMETER)):
        start = source.at
        source.take(len(PARAMETER))
        key = yield from read_head(source, ">")
        if key is None:
            source.at = start
            yield from raw_until(source, sink, _ENDS)
            yield from source.accept_closing(END)
            return
        source.take()
        arguments.key(key)
        if not (yield from arguments.value(source, END_PARAMETER, (PARAMETER, *_ENDS))):
            return
        yield from source.spaces()
    if not (yield from source.peek()):
        return  # cut off between two parameters: the object stays open
    if not (yield from source.begins(*_ENDS)):
        yield from raw_until(source, sink, _ENDS)
    else:
        arguments.finish()
    yield from source.accept_closing(END)
