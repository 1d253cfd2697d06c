"""JSON inside sampled text: where a value ends is found by the rules of JSON, never by looking for what should follow it.

    complete = yield from read_value(source, sink.arguments)      # passes the value's own text on as it comes

False: the text is no JSON from here on, or the stream ended inside the value; what was read has been passed on. Spelling of
numbers and names is not judged (`tru` is one value); line ends inside strings are let through. Nothing recurses:
a model may open any number of brackets. Used by tool_formats/.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from typing import Any

from areal.chat.source import SPACES, Reading, Source

_WORD = frozenset(string.ascii_letters + string.digits + "+-.")
_CLOSING = {"{": "}", "[": "]"}


def read_value(source: Source, emit: Callable[[str], None]) -> Reading[bool]:
    """Read one value that begins at the next character."""
    open_brackets: list[str] = []  # the brackets that have to close
    expect = "value"  # value | first value | key | first key | colon | more
    while True:
        char = yield from source.peek()
        if not char:
            return False
        if char in SPACES and open_brackets:
            emit(source.take())
            continue
        closes = bool(open_brackets) and char == open_brackets[-1]
        if closes and expect in ("more", "first key", "first value"):
            open_brackets.pop()
            emit(source.take())
        elif expect == "more" and char == ",":
            emit(source.take())
            expect = "key" if open_brackets[-1] == "}" else "value"
            continue
        elif expect == "colon" and char == ":":
            emit(source.take())
            expect = "value"
            continue
        elif expect in ("key", "first key") and char == '"':
            if not (yield from _read_string(source, emit)):
                return False
            expect = "colon"
            continue
        elif expect not in ("value", "first value"):
            return False
        elif char in _CLOSING:
            open_brackets.append(_CLOSING[char])
            emit(source.take())
            expect = "first key" if char == "{" else "first value"
            continue
        elif char == '"':
            if not (yield from _read_string(source, emit)):
                return False
        elif char in _WORD:
            yield from _read_word(source, emit)
        else:
            return False
        if not open_brackets:
            return True
        expect = "more"


def read_text(source: Source) -> Reading[str | None]:
    """One value's text; None, with nothing read, if there is none."""
    start = source.at
    if (yield from read_value(source, _nowhere)):
        return source.since(start)
    source.at = start
    return None


def decoded(text: str) -> Any:
    """The value of a JSON text; the text itself where it is none. No lone surrogates: no encoding could hold them."""
    try:
        value = json.loads(text, strict=False)
        if "\\u" in text:
            value = json.loads(_without_lone_surrogates(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return text
    return value


def _without_lone_surrogates(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _read_string(source: Source, emit: Callable[[str], None]) -> Reading[bool]:
    emit(source.take())
    while True:
        emit(source.run('"\\'))
        char = yield from source.peek()
        if not char:
            return False
        if char not in '"\\':
            continue
        emit(source.take())
        if char == '"':
            return True
        if not (yield from source.peek()):
            return False
        emit(source.take())


def _read_word(source: Source, emit: Callable[[str], None]) -> Reading[None]:
    while (char := (yield from source.peek())) and char in _WORD:
        emit(source.take())


def _nowhere(text: str) -> None:
    pass
