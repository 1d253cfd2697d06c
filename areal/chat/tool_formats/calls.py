"""Calls as JSON: `{"name": …, "arguments": {…}}`, alone, several in a row, or in a list.

    outcome = yield from read_calls(source, sink, tools)              # every call that stands here
    yield from read_arguments(source, sink, ("</call>",))             # where only the arguments are JSON

Outcome: NONE, nothing here is a call and nothing was read; DONE; BROKEN, the last call's arguments stopped being JSON, the
caller ends them with `raw_until`. The keys may stand in any order; `parameters` is the same as `arguments`, and
{"function": {"name": …}} the same as its inside. Arguments that are a string holding JSON are passed on as that JSON, none
as {}. `call_schema` is the same from the other side, for grammars. Used by the formats of this folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from areal.base.errors import BadRequest
from areal.base.types import Tool
from areal.chat.deltas import DeltaSink
from areal.chat.json_text import decoded, read_text, read_value
from areal.chat.source import Reading, Source
from areal.chat.tool_formats.base import Tools

Outcome = Enum("Outcome", ["NONE", "DONE", "BROKEN"])
_ARGUMENTS = ("arguments", "parameters")


def read_calls(source: Source, sink: DeltaSink, tools: Tools, *, known_only: bool = False) -> Reading[Outcome]:
    """Calls from here on. known_only: for text without markers, a call must name one of the tools and have arguments."""
    start = source.at
    listed = yield from source.accept("[")
    outcome = Outcome.NONE
    after = source.at
    while True:
        yield from source.spaces()
        if (yield from source.peek()) != "{":
            break
        one = yield from _Call(source, sink, tools, known_only).read()
        if one is Outcome.NONE:
            break
        outcome = one
        if outcome is Outcome.BROKEN:
            return outcome
        after = source.at
        yield from source.spaces()
        yield from source.accept(",", ";")
    if outcome is Outcome.NONE:
        source.at = start
        return outcome
    source.at = after
    yield from source.spaces()
    if not (listed and (yield from source.accept("]"))):
        source.at = after
    return outcome


def read_arguments(source: Source, sink: DeltaSink, ends: tuple[str, ...]) -> Reading[None]:
    """The arguments of the call that has begun, as JSON; whatever else stands here as raw text up to one of `ends`."""
    yield from source.spaces()
    if (yield from source.begins(*ends)):
        sink.arguments("{}")
    elif (yield from source.peek()) != "{" or not (yield from read_value(source, sink.arguments)):
        yield from raw_until(source, sink, ends)


def raw_until(source: Source, sink: DeltaSink, ends: tuple[str, ...]) -> Reading[None]:
    """The rest of a broken call, verbatim, as its arguments, up to one of `ends` or the end of the stream."""
    starts = "".join({end[0] for end in ends})
    held = ""
    while (yield from source.peek()) and not (yield from source.begins(*ends)):
        text = held + (source.run(starts) or source.take())
        shown = text.rstrip()
        held = text[len(shown) :]
        sink.arguments(shown)


@dataclass(slots=True)
class _Call:
    """One object that may be a call."""

    source: Source
    sink: DeltaSink
    tools: Tools
    known_only: bool
    name: str = ""
    arguments: str | None = None  # read before the name was known
    begun: bool = False
    nested: bool = False

    def read(self) -> Reading[Outcome]:
        start = self.source.at
        complete = yield from self._members()
        if complete and not self.begun and self._is_call():
            self._begin()
            self.sink.arguments(_as_arguments(self.arguments))
        if self.begun:
            return Outcome.DONE if complete else Outcome.BROKEN
        self.source.at = start
        return Outcome.NONE

    def _members(self) -> Reading[bool]:
        """The members of the object that begins here. False: its arguments broke off, or it is no object at all."""
        source = self.source
        source.take()
        while True:
            yield from source.spaces()
            if (yield from source.accept("}")):
                return True
            start, had_begun = source.at, self.begun
            if not (yield from self._member()):
                if not had_begun:
                    return False
                source.at = start  # the arguments are complete: what follows them is no part of the call
                return True
            yield from source.spaces()
            yield from source.accept(",")

    def _member(self) -> Reading[bool]:
        source = self.source
        key = (yield from read_text(source)) if (yield from source.peek()) == '"' else None
        yield from source.spaces()
        if key is None or not (yield from source.accept(":")):
            return False
        yield from source.spaces()
        return (yield from self._value(decoded(key)))

    def _value(self, key: str) -> Reading[bool]:
        source = self.source
        opens = (yield from source.peek()) == "{" and not self.begun
        if opens and key in _ARGUMENTS and self._named():
            self._begin()
            return (yield from read_value(source, self.sink.arguments))
        if opens and key == "function" and not self.nested:
            self.nested = True
            return (yield from self._members())
        text = yield from read_text(source)
        if text is None:
            return False
        if key in ("name", "function") and text[0] == '"' and not self.name:
            self.name = str(decoded(text))
        elif key in _ARGUMENTS and self.arguments is None:
            self.arguments = text
        return True

    def _named(self) -> bool:
        return self.name in self.tools if self.known_only else bool(self.name)

    def _is_call(self) -> bool:
        return self._named() and (self.arguments is not None or not self.known_only)

    def _begin(self) -> None:
        self.begun = True
        self.sink.call(self.name)


def _as_arguments(text: str | None) -> str:
    """What was written as arguments: a string stands for the JSON in it, nothing for an empty object."""
    if text is None or text == "null":
        return "{}"
    return str(decoded(text)) if text[0] == '"' else text


def call_schema(tools: Sequence[Tool], key: str = "arguments") -> dict[str, Any]:
    """The JSON schema of one call, `{"name": …, key: {…}}`, of any of these tools."""
    definitions = {f"tool{k}": _moved(arguments_schema(tool), f"#/$defs/tool{k}") for k, tool in enumerate(tools)}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, key: {"$ref": f"#/$defs/tool{k}"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for k, tool in enumerate(tools)
    ]
    return {"$defs": definitions, "anyOf": calls}


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments: an object, and where properties are named, of no others. Raises BadRequest."""
    schema = {key: value for key, value in tool.parameters.items() if key not in ("$schema", "$id")}
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if (
        not isinstance(properties, Mapping)
        or not isinstance(required, list)
        or not all(isinstance(one, str) for one in required)
    ):
        raise BadRequest(
            f"the parameters of tool {tool.name[:60]!r} are no JSON schema: `properties` must be an object and `required` a list "
            "of names",
            param="tools",
        )
    closed = {"additionalProperties": False} if "properties" in schema else {}
    return {"type": "object", **closed, **schema}


def _moved(schema: Any, to: str) -> Any:
    """The schema with its references to its own root pointing to where it is put."""
    if isinstance(schema, Mapping):
        return {
            key: to + value[1:] if key == "$ref" and isinstance(value, str) and value[:1] == "#" else _moved(value, to)
            for key, value in schema.items()
        }
    return [_moved(one, to) for one in schema] if isinstance(schema, list) else schema
