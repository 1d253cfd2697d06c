"""Every key of the tree, found in the sections themselves: path, type, default, secret or not, its docstring.

    KEYS["rollout.agent.admin_api_key"].secret        # True
    sorted(KEYS)                                      # the frozen list of tests/config/test_keys.py

Used by load.py (what exists), show.py (what to mask), the generated docs. No torch.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from pydantic_core import PydanticUndefined

from areal.config.section import Section


@dataclass(frozen=True, slots=True)
class Key:
    """One leaf. kinds: the plain types and Literals its value may have, None among them if it may be null."""

    path: str
    kinds: tuple[Any, ...]
    default: Any
    secret: bool
    description: str

    @property
    def text(self) -> bool:
        """Whether it takes text, so that what is written plainly is not to be read as a number."""
        return any(kind is str or get_origin(kind) is Literal for kind in self.kinds)


def kinds_of(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the one type; NoneType stands for null."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def section_of(annotation: Any) -> type[Section] | None:
    """The section among the members, if this key holds a section."""
    for kind in kinds_of(annotation):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


@cache
def keys_of(root: type[Section]) -> dict[str, Key]:
    """All leaves under `root`, by path."""
    return {key.path: key for key in _walk(root, "")}


@cache
def paths_of(root: type[Section]) -> frozenset[str]:
    """Leaves and sections."""
    leaves = keys_of(root)
    return frozenset(leaves) | {path.rsplit(".", n)[0] for path in leaves for n in range(1, path.count(".") + 1)}


def _walk(section: type[Section], prefix: str) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            yield from _walk(inner, f"{prefix}{name}.")
            continue
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        default = None if field.default is PydanticUndefined else field.default
        yield Key(
            f"{prefix}{name}",
            kinds_of(field.annotation),
            default,
            bool(extra.get("secret")),
            " ".join((field.description or "").split()),
        )
