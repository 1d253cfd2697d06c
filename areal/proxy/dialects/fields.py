"""Reading decoded JSON, field by field: a typed value, or BadRequest that names the field and what stood there.

    temperature = number(body, "temperature", low=0, high=2)     # None where absent or null
    messages = require_list(body, "messages")

Null always means the same as absent. Booleans are no numbers. Values are quoted shortened, never whole. What nobody knows is
ignored and said once. Used by the dialects; knows none of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from areal.base.errors import BadRequest

JsonObject = Mapping[str, Any]
LONGEST_MODEL_NAME = 512  # characters
MOST_ITEMS = 10_000  # of any list in a request: a model that reads a million tokens has no more messages than that
_log = logging.getLogger("areal.proxy")


def shown(value: object) -> str:
    """The value as it may stand in a message: short, on one line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def wrong_type(param: str, expected: str, value: object) -> BadRequest:
    found = "and is missing or null" if value is None else f"not {shown(value)}"
    return BadRequest(f"{param} must be {expected}, {found}", param=param, code="invalid_type")


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


def model_name(body: JsonObject) -> str:
    """Which model is asked for; it is recorded with every answer, so it has a bound."""
    name = text(body, "model", "default")
    if len(name) > LONGEST_MODEL_NAME:
        raise BadRequest(
            f"model has {len(name)} characters, more than {LONGEST_MODEL_NAME}; send a shorter name", param="model"
        )
    return name


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
    """The list, empty where absent or null. Raises BadRequest beyond MOST_ITEMS."""
    value = body.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong_type(at + key, "a list", value)
    return bounded(value, at + key)


def bounded(value: list[Any], param: str) -> list[Any]:
    """The list itself. Raises BadRequest beyond MOST_ITEMS."""
    if len(value) > MOST_ITEMS:
        raise BadRequest(
            f"{param} has {len(value)} entries, more than {MOST_ITEMS}; send fewer, for example without the oldest",
            param=param,
            code="too_many_items",
        )
    return value


def unsupported(param: str, remedy: str) -> BadRequest:
    """For what is understood but cannot be kept."""
    return BadRequest(f"{param} is not supported: {remedy}", param=param, code="unsupported_parameter")


def agent_id(headers: Mapping[str, str]) -> str:
    """Which agent of a session is calling: Claude Code names its sub-agents, and names no main one."""
    return headers.get("x-claude-code-agent-id", "").strip()


def retry_count(headers: Mapping[str, str]) -> int:
    """How often the official SDKs have sent this call before."""
    said = headers.get("x-stainless-retry-count", "")
    return int(said) if said.isascii() and said.isdigit() and len(said) < 6 else 0


class Ignored:
    """What a protocol's requests hold and nobody here knows, each name logged once."""

    def __init__(self, protocol: str) -> None:
        self._protocol = protocol
        self._seen: set[str] = set()

    def note(self, what: str, names: Iterable[Any]) -> None:
        """what: for example "field". A client may invent names without end, so the memory is bounded."""
        for name in names:
            said = f"{what} {shown(name)}"
            if said not in self._seen and len(self._seen) < 256:
                self._seen.add(said)
                _log.warning("%s: unknown %s is ignored (said once)", self._protocol, said)


def _check_range(value: float, key: str, low: float | None, high: float | None) -> None:
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        bounds = " and ".join(
            said for said in (low is not None and f"at least {low:g}", high is not None and f"at most {high:g}") if said
        )
        raise BadRequest(f"{key} must be {bounds}, not {shown(value)}", param=key, code="out_of_range")
