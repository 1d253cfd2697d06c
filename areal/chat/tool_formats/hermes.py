"""Hermes, Qwen 2.5 and Qwen 3: `<tool_call>` JSON `</tool_call>`, one block a call. Also our default tools prompt's.

    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Several calls in one block, a list in it, and a missing closing tag are read too.
"""

from __future__ import annotations

from collections.abc import Sequence

from areal.base.types import Tool
from areal.chat.deltas import DeltaSink
from areal.chat.grammar import Rules
from areal.chat.source import Reading, Source
from areal.chat.tool_formats.base import Tools, text_until
from areal.chat.tool_formats.calls import Outcome, call_schema, raw_until, read_calls

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes:
    """See ToolFormat."""

    marks: tuple[str, ...] = (OPEN,)
    markers: tuple[str, ...] = (OPEN, CLOSE)
    id_length = 24

    def read(self, source: Source, sink: DeltaSink, tools: Tools) -> Reading[None]:
        while (yield from text_until(source, sink, (OPEN,))):
            yield from read_block(source, sink, tools)

    def required(self, rules: Rules, tools: Sequence[Tool], *, most: int, template: str) -> str:
        line = rules.literal("\n")
        body = rules.rule(rules.gap(), line, rules.json(call_schema(tools)), line)
        call = rules.rule(rules.marker(OPEN), body, rules.marker(CLOSE))
        return rules.several(call, f"{rules.gap()} {line}", most)


def read_block(source: Source, sink: DeltaSink, tools: Tools) -> Reading[None]:
    """One block, whose opening tag comes next; as text if no call is in it."""
    start = source.at
    source.take(len(OPEN))
    yield from source.spaces()
    outcome = yield from read_calls(source, sink, tools)
    if outcome is Outcome.NONE:
        source.at = start
        sink.text(source.take(len(OPEN)))
        return
    if outcome is Outcome.BROKEN:
        yield from raw_until(source, sink, (CLOSE, OPEN))
    after = source.at
    yield from source.spaces()
    if not (yield from source.accept_closing(CLOSE)):
        source.at = after
