"""Plain JSON: the whole answer is a call or a list of calls, bare or in a Markdown fence, for models that were asked in words.

    {"name": "weather", "arguments": {"city": "Oslo"}}

Nothing but the content tells a call from an answer that is JSON: it is one if it stands at the beginning, names one of the
tools and has arguments. What follows the calls is text.
"""

from __future__ import annotations

from collections.abc import Sequence

from areal.base.types import Tool
from areal.chat.deltas import DeltaSink
from areal.chat.grammar import Rules
from areal.chat.source import Reading, Source
from areal.chat.tool_formats.base import Tools
from areal.chat.tool_formats.calls import Outcome, call_schema, raw_until, read_calls

_FENCES = ("```json", "```")


class PlainJson:
    """See ToolFormat."""

    marks: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    id_length = 24

    def read(self, source: Source, sink: DeltaSink, tools: Tools) -> Reading[None]:
        start = source.at
        yield from source.spaces()
        fence = yield from source.accept(*_FENCES)
        yield from source.spaces()
        outcome = yield from read_calls(source, sink, tools, known_only=True)
        if outcome is Outcome.NONE:
            source.at = start
        elif outcome is Outcome.BROKEN:
            yield from raw_until(source, sink, ("```",) if fence else ())
        if fence and outcome is not Outcome.NONE:
            yield from source.spaces()
            yield from source.accept_closing("```")

    def required(self, rules: Rules, tools: Sequence[Tool], *, most: int, template: str) -> str:
        call = rules.json(call_schema(tools))
        if most == 1:
            return call
        return rules.either(
            call, rules.rule(rules.literal("["), rules.several(call, rules.literal(", "), most), rules.literal("]"))
        )
