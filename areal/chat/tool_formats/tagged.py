"""Arguments as tagged text, `<parameter=city>Oslo</parameter>`, turned into JSON as they come.

    arguments = TaggedArguments(sink, tools.get(name))
    arguments.key("city")
    complete = yield from arguments.value(source, "</parameter>", followed_by=("<parameter=", "</function>"))
    arguments.finish()

The tool's schema says what a value is: text is passed on character by character; numbers, booleans, lists and objects
are read whole and written as JSON where they are JSON, else as text; a parameter that the schema does not know is text. A value
ends at its closing tag only where one of `followed_by`, or the end of the stream, comes behind it, so that the tag may stand in
the value itself. One line end next to each tag belongs to the tag. `tagged_rule` is the same from the other side, for grammars. Used by qwen3_coder.py and glm.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from areal.base.types import Tool
from areal.chat.deltas import DeltaSink
from areal.chat.grammar import Rules
from areal.chat.source import Reading, Source
from areal.chat.tool_formats.calls import arguments_schema

_WORDS = {"True": "true", "False": "false", "None": "null"}  # as Python spells them; models do


class TaggedArguments:
    """The argument object of one call while it is written."""

    def __init__(self, sink: DeltaSink, tool: Tool | None) -> None:
        properties = tool.parameters.get("properties") if tool else None
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._sink = sink
        self._key = ""
        self._count = 0

    def key(self, key: str) -> None:
        """The next parameter's name."""
        self._key = key
        self._sink.arguments(("{" if self._count == 0 else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._count += 1

    def value(self, source: Source, closing: str, followed_by: tuple[str, ...]) -> Reading[bool]:
        """The parameter's value. False: the stream ended inside it; what came of it has been passed on."""
        yield from source.accept("\n")
        if self._is_text():
            self._sink.arguments('"')
            if not (yield from _read_tagged(source, self._text, closing, followed_by)):
                return False
            self._sink.arguments('"')
            return True
        parts: list[str] = []
        complete = yield from _read_tagged(source, parts.append, closing, followed_by)
        text = "".join(parts)
        self._sink.arguments(_as_json(text) if complete else text)
        return complete

    def finish(self) -> None:
        """The call is complete."""
        self._sink.arguments("}" if self._count else "{}")

    def _text(self, text: str) -> None:
        self._sink.arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def _is_text(self) -> bool:
        return _is_text(self._properties.get(self._key))


def tagged_rule(rules: Rules, tool: Tool, before: Callable[[str], str], closing: str, *, lines: bool = False) -> str:
    """All parameters of a tool in their tags, a line each, in the schema's order; what is not required may be left out.

    before(key): the tags in front of a value. lines: a value has lines of its own. Only `properties` and `required` of the schema's
    top are known to this kind of format; of a text's own limits its length and its `enum` are kept."""
    schema = arguments_schema(tool)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    line = rules.literal("\n")
    parts = []
    for key in dict.fromkeys((*properties, *required)):
        value = _value(rules, properties.get(key), shared, closing, lines)
        one = rules.rule(before(key), value, line)
        parts.append(one if key in required else f"{one}?")
    return rules.rule(*parts) if parts else ""


def _value(rules: Rules, schema: Any, shared: Mapping[str, Any], closing: str, lines: bool) -> str:
    """A value and its closing tag, so that it is read back as what the schema wants."""
    if _is_text(schema):
        limits = schema if isinstance(schema, Mapping) else {}
        low, high = limits.get("minLength"), limits.get("maxLength")
        return rules.until(
            closing,
            low=low if isinstance(low, int) else 0,
            high=high if isinstance(high, int) else None,
            line_end=lines,
        )
    end = [*([rules.literal("\n")] if lines else ()), rules.marker(closing)]
    if isinstance(schema.get("enum"), list) and all(isinstance(one, str) for one in schema["enum"]):
        return rules.rule(rules.either(*(rules.literal(_spelt(one)) for one in schema["enum"])), *end)
    return rules.rule(rules.json({**schema, **shared}), *end)


def _spelt(text: str) -> str:
    """A text that stands where JSON may stand: bare if it is read as that text, else as a JSON string."""
    quoted = json.dumps(text, ensure_ascii=False)
    return text if text.strip() == text != "" and _as_json(text) == quoted else quoted


def _is_text(schema: Any) -> bool:
    """Whether a parameter's value is a text, passed on as it is."""
    if not isinstance(schema, Mapping) or schema.get("enum"):
        return not isinstance(schema, Mapping)
    kind = schema.get("type")
    return kind == "string" or (kind is None and not {"anyOf", "oneOf", "allOf", "$ref", "const"} & schema.keys())


def _as_json(text: str) -> str:
    """The text where it is JSON, else as a JSON string."""
    text = _WORDS.get(text.strip(), text)
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


def _read_tagged(
    source: Source, emit: Callable[[str], None], closing: str, followed_by: tuple[str, ...]
) -> Reading[bool]:
    starts = "\n" + closing[0]
    while True:
        emit(source.run(starts))
        if not (yield from source.peek()):
            return False
        start = source.at
        found = yield from source.accept_closing("\n" + closing, closing)
        if found:
            if found not in ("\n" + closing, closing):
                return False
            yield from source.spaces()
            after = source.at
            if (yield from source.accept_closing(*followed_by)) or not (yield from source.peek()):
                source.at = after
                return True
            source.at = start
        emit(source.take())
