"""GLM 4.5 and later: the name, then keys and values in tags of their own (tagged.py makes them JSON).

    <tool_call>weather
    <arg_key>city</arg_key>
    <arg_value>Oslo</arg_value>
    </tool_call>

JSON inside the outer tag is read as Hermes' is.
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

KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"
_ENDS = (CLOSE, OPEN)


class Glm:
    """See ToolFormat."""

    marks: tuple[str, ...] = (KEY,)
    markers: tuple[str, ...] = (OPEN, CLOSE, KEY, END_KEY, VALUE, END_VALUE)
    id_length = 24

    def read(self, source: Source, sink: DeltaSink, tools: Tools) -> Reading[None]:
        while (yield from text_until(source, sink, (OPEN,))):
            start = source.at
            source.take(len(OPEN))
            yield from source.spaces()
            name = yield from read_head(source, "\n", KEY, CLOSE)
            if not name:
                source.at = start
                yield from read_block(source, sink, tools)
                continue
            yield from _call(source, sink, tools, name)
            yield from source.accept_closing(CLOSE)

    def required(self, rules: Rules, tools: Sequence[Tool], *, most: int, template: str) -> str:
        line, value = rules.literal("\n"), rules.marker(VALUE)

        def before(key: str) -> str:
            return rules.rule(rules.marker(KEY), rules.name(key), rules.marker(END_KEY), line, value)

        bodies = (rules.rule(rules.name(one.name), line, tagged_rule(rules, one, before, END_VALUE)) for one in tools)
        call = rules.rule(rules.marker(OPEN), rules.either(*bodies), rules.marker(CLOSE))
        return rules.several(call, line, most)


def _call(source: Source, sink: DeltaSink, tools: Tools, name: str) -> Reading[None]:
    sink.call(name)
    arguments = TaggedArguments(sink, tools.get(name))
    yield from source.spaces()
    if not (yield from source.begins(KEY, *_ENDS)):
        yield from read_arguments(source, sink, _ENDS)
        return
    while (yield from source.begins(KEY)):
        start = source.at
        key = yield from _key(source)
        if key is None:
            source.at = start
            yield from raw_until(source, sink, _ENDS)
            return
        arguments.key(key)
        if not (yield from arguments.value(source, END_VALUE, (KEY, *_ENDS))):
            return
        yield from source.spaces()
    if not (yield from source.peek()):
        return  # cut off between two arguments: the object stays open
    if (yield from source.begins(*_ENDS)):
        arguments.finish()
    else:
        yield from raw_until(source, sink, _ENDS)


def _key(source: Source) -> Reading[str | None]:
    """A key and the tag that opens its value; None if one of them is missing."""
    source.take(len(KEY))
    key = yield from read_head(source, END_KEY)
    if key is None:
        return None
    source.take(len(END_KEY))
    yield from source.spaces()
    return key if (yield from source.accept(VALUE)) else None
