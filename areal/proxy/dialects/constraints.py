"""What a client wants its answer to be: forced tool calls and JSON formats, read alike in every dialect.

    choice = openai_tool_choice(body)                                  # ToolChoice(hidden, calls)
    answer = json_answer(body.get("response_format"), "response_format", inside="json_schema")
    sampling = constrained(sampling, choice, answer, may_call=bool(tools))

A forced call leaves no room for a JSON answer; tools that the model may call leave it the choice between a call and the answer. Whether
the named tools are there, and how their calls are spelt, is chat/constraint.py's to know. Pure. Used by the dialects.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import orjson

from areal.base.errors import BadRequest
from areal.base.types import Constraint, SamplingParams
from areal.proxy.dialects import fields
from areal.proxy.dialects.fields import JsonObject, unsupported

MOST_SCHEMA_BYTES = 100_000


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """hidden: the model does not see the tools. calls: None = it decides by itself; else it must call, see Constraint.calls."""

    hidden: bool = False
    calls: tuple[str, ...] | None = None
    parallel: bool = True


def openai_tool_choice(body: JsonObject) -> ToolChoice:
    """`tool_choice` and `parallel_tool_calls` of Chat Completions and of Responses. Raises BadRequest."""
    parallel = body.get("parallel_tool_calls") is None or fields.flag(body, "parallel_tool_calls")
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else "auto" if choice is None else choice
    if kind in ("auto", "none"):
        return ToolChoice(hidden=kind == "none", parallel=parallel)
    if kind == "required":
        return ToolChoice(calls=(), parallel=parallel)
    if not isinstance(choice, dict):
        raise fields.wrong_type("tool_choice", "auto, none, required, or an object that names a function", choice)
    if kind == "function":
        return ToolChoice(calls=(_name(choice, "tool_choice"),), parallel=parallel)
    if kind == "allowed_tools":
        return ToolChoice(calls=_allowed(choice), parallel=parallel)
    raise unsupported(
        "tool_choice", f"its type {fields.shown(kind)} is no function; name one of the functions in `tools`"
    )


def json_answer(form: object, at: str, *, inside: str = "") -> Constraint | None:
    """The JSON that a format object asks for; None for plain text. inside: the key its schema stands under. Raises BadRequest."""
    if form is None:
        return None
    said = fields.as_object(form, at)
    kind = said.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint(schema={"type": "object"})
    if kind != "json_schema":
        raise unsupported(
            f"{at}.type", f"{fields.shown(kind)} is no known format; send text, json_object or json_schema"
        )
    at = f"{at}.{inside}" if inside else at
    holder = fields.as_object(said.get(inside), at) if inside else said
    schema = fields.as_object(holder.get("schema"), f"{at}.schema")
    size = len(orjson.dumps(schema))
    if size > MOST_SCHEMA_BYTES:
        raise BadRequest(
            f"{at}.schema has {size} bytes, more than {MOST_SCHEMA_BYTES}; send a smaller schema",
            param=f"{at}.schema",
            code="schema_too_large",
        )
    lenient = holder.get("strict") is not None and not fields.flag(holder, "strict", at=f"{at}.")
    return Constraint(schema=schema, lenient=lenient)


def constrained(
    sampling: SamplingParams, choice: ToolChoice, answer: Constraint | None, *, may_call: bool
) -> SamplingParams:
    """The sampling with what the call wants of its answer. may_call: there are tools, and the model sees them."""
    if choice.calls is not None:
        return replace(sampling, constraint=Constraint(calls=choice.calls, parallel=choice.parallel))
    if answer is None:
        return sampling
    calls = () if may_call and not choice.hidden else None
    return replace(sampling, constraint=replace(answer, calls=calls, parallel=choice.parallel))


def _allowed(choice: JsonObject) -> tuple[str, ...]:
    inner = fields.as_object(choice.get("allowed_tools") or choice, "tool_choice.allowed_tools")
    if inner.get("mode") != "required":
        raise unsupported(
            "tool_choice.mode", "tools can be narrowed for a forced call only; send fewer `tools`, or mode required"
        )
    names = [
        _name(fields.as_object(one, f"tool_choice.tools[{k}]"), f"tool_choice.tools[{k}]")
        for k, one in enumerate(fields.items(inner, "tools", at="tool_choice."))
    ]
    if not names:
        raise BadRequest("tool_choice.tools is empty; name the tools that may be called", param="tool_choice.tools")
    return tuple(dict.fromkeys(names))


def _name(said: JsonObject, at: str) -> str:
    function = fields.as_object(said.get("function") or said, f"{at}.function")
    return fields.as_text(function.get("name"), f"{at}.name")
