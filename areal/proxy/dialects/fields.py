"""Reading decoded JSON, field by field: a typed value, or BadRequest that names the field and what stood there.

    temperature = number(body, "temperature", low=0, high=2)     # None where absent or null
    messages = require_list(body, "messages")

Null always means the same as absent. Booleans are no numbers. Values are quoted shortened, never whole. Used by the
dialects; knows none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal.base.errors import BadRequest

JsonObject = Mapping[str, Any]


def shown(value: object) -> str:
    """The value as it may stand in a message: short, on one line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def wrong_type(param: str, expected: str, value: object) -> BadRequest:
    return BadRequest(f"{param} must be {expected}, not {shown(value)}", param=param, code="invalid_type")


def as_object(value: object, param: str) -> JsonObject:
    if not isinstance(value, dict):
        raise wrong_type(param, "an object", value)
    return value


def as_text(value: object, param: str) -> str:
    if not isinstance(value, str):
        raise wrong_type(param, "a string", value)
    return value


def text(body: JsonObject, key: str, default: str = "", *, at: str = "") -> str:
    value = body.get(key)
    return default if value is None else as_text(value, at + key)


def flag(body: JsonObject, key: str, *, at: str = "") -> bool:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise wrong_type(at + key, "true or false", value)
    return bool(value)


def integer(body: JsonObject, key: str, *, low: int | None = None, high: int | None = None) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(key, "an integer", value)
    _check_range(value, key, low, high)
    return value


def number(body: JsonObject, key: str, *, low: float | None = None, high: float | None = None) -> float | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(key, "a number", value)
    _check_range(value, key, low, high)
    return float(value)


def items(body: JsonObject, key: str, *, at: str = "") -> list[Any]:
    """The list, empty where absent or null."""
    value = body.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong_type(at + key, "a list", value)
    return value


def neutral(body: JsonObject, key: str, value: float) -> None:
    """Accept a number only if it changes nothing: the recorded log-probs are those of the unmodified policy."""
    said = number(body, key)
    if said is not None and said != value:
        raise BadRequest(
            f"{key} {said:g} is not supported: the policy is sampled from its own distribution, so that what is "
            f"recorded can be trained; leave {key} out or send {value:g}",
            param=key,
            code="unsupported_parameter",
        )


def _check_range(value: float, key: str, low: float | None, high: float | None) -> None:
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        bounds = " and ".join(
            said for said in (low is not None and f"at least {low:g}", high is not None and f"at most {high:g}") if said
        )
        raise BadRequest(f"{key} must be {bounds}, not {shown(value)}", param=key, code="out_of_range")
