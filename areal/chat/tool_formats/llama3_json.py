"""Llama 3: the whole answer is a call, `{"name": …, "parameters": {…}}`, several with `;` between; <|python_tag|> may come first.

    {"name": "weather", "parameters": {"city": "Oslo"}}

Without the tag the rule of plain_json.py holds: a call stands at the beginning, names one of the tools and has arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

from areal.base.types import Tool
from areal.chat.deltas import DeltaSink
from areal.chat.grammar import Rules
from areal.chat.source import Reading, Source
from areal.chat.tool_formats.base import Tools, text_until
from areal.chat.tool_formats.calls import Outcome, call_schema, raw_until, read_calls

TAG = "<|python_tag|>"


class Llama3Json:
    """See ToolFormat."""

    marks: tuple[str, ...] = (TAG,)
    markers: tuple[str, ...] = (TAG,)
    id_length = 24

    def read(self, source: Source, sink: DeltaSink, tools: Tools) -> Reading[None]:
        start = source.at
        yield from source.spaces()
        tagged = yield from source.begins(TAG)
        outcome = Outcome.NONE
        if not tagged:
            outcome = yield from read_calls(source, sink, tools, known_only=True)
        if outcome is Outcome.NONE:
            source.at = start
        elif outcome is Outcome.BROKEN:
            yield from raw_until(source, sink, (TAG,))
        while (yield from text_until(source, sink, (TAG,))):
            yield from _tagged(source, sink, tools)

    def required(self, rules: Rules, tools: Sequence[Tool], *, most: int, template: str) -> str:
        return rules.several(rules.json(call_schema(tools, "parameters")), rules.literal("; "), most)


def _tagged(source: Source, sink: DeltaSink, tools: Tools) -> Reading[None]:
    start = source.at
    source.take(len(TAG))
    yield from source.spaces()
    outcome = yield from read_calls(source, sink, tools)
    if outcome is Outcome.NONE:
        source.at = start
        sink.text(source.take(len(TAG)))
    elif outcome is Outcome.BROKEN:
        yield from raw_until(source, sink, (TAG,))
