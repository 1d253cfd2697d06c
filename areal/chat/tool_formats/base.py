"""How one family of models writes tool calls: a reader from text to calls, chosen by name or by the chat template.

    class Example:                                   # one file, one line of the table in __init__.py
        marks = ("<call>",)                          # in a chat template's source: the family is this one
        markers = ("<call>", "</call>")              # what may be a special token, which has no text otherwise
        def read(self, source, sink, tools): ...     # puts text and calls into the sink; ends where all that follows is text
        def required(self, rules, tools, *, most, template): ...    # the grammar of an answer that is nothing but calls

Rules that every format keeps. What is no call is text, markers included: nothing vanishes. A call that breaks off, or stops
being JSON inside its arguments, is a call whose arguments are the raw text up to its closing marker. Until a call's name and
the beginning of its arguments are read nothing of it is shown, from then on its argument text is passed on as it comes, spelt
as it was sampled. Used by stream_parser.py; the readers share calls.py and tagged.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from areal.base.types import Tool
from areal.chat.deltas import DeltaSink
from areal.chat.grammar import Rules
from areal.chat.source import Reading, Source

Tools = Mapping[str, Tool]


class ToolFormat(Protocol):
    """Stateless: the state of an answer is its reader's."""

    marks: tuple[str, ...]
    markers: tuple[str, ...]
    id_length: int

    def read(self, source: Source, sink: DeltaSink, tools: Tools) -> Reading[None]: ...

    def required(self, rules: Rules, tools: Sequence[Tool], *, most: int, template: str) -> str:
        """The grammar of an answer that is 1 to `most` calls of these tools with arguments of their schemas, spelt so that `read`
        finds each of them. template: the chat template's source, where a family has several spellings. Raises BadRequest."""
        ...


def text_until(source: Source, sink: DeltaSink, markers: tuple[str, ...]) -> Reading[str]:
    """Pass text on up to the first of the markers, which is not taken; "" at the end of the stream."""
    starts = "".join({marker[0] for marker in markers})
    while True:
        sink.text(source.run(starts))
        source.settle()
        char = yield from source.peek()
        if not char:
            return ""
        if char not in starts:  # almost every token: text that has come meanwhile
            continue
        found = yield from source.begins(*markers)
        if found:
            return found
        sink.text(source.take())


def read_head(source: Source, *ends: str) -> Reading[str | None]:
    """A name up to one of `ends`, which is not taken. None, with nothing read, where no name can be."""
    start = source.at
    while True:
        found = yield from source.begins(*ends)
        if found:
            return source.since(start).strip()
        char = yield from source.peek()
        if not char or char in '\n"{}[]' or source.at - start >= 256:
            source.at = start
            return None
        source.take()


def read_sections(
    source: Source,
    sink: DeltaSink,
    markers: tuple[str, str, str],
    read_call: Callable[[Source, DeltaSink], Reading[bool]],
) -> Reading[None]:
    """Text, and sections of calls in it. markers: section begins, call begins, section ends. read_call reads one call
    behind its marker; False: it is none."""
    section, call, end = markers
    while found := (yield from text_until(source, sink, (section, call))):
        start = after = source.at
        yield from source.accept(section)
        yield from source.spaces()
        while (yield from source.accept(call)) and (yield from read_call(source, sink)):
            after = source.at
            yield from source.spaces()
        source.at = after
        if after == start:
            sink.text(source.take(len(found)))
            continue
        yield from source.spaces()
        if not (yield from source.accept_closing(end)):
            source.at = after
