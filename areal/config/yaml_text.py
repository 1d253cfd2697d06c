"""YAML as text: what was written plainly stays the text it was until the type of its key is known.

    load_yaml("a: 010\nb: '1'")        # {"a": Plain("010"), "b": "1"}
    number(Plain("1e-6"))              # 1e-06

A loader that guesses types first turns `trial_name: 010` into 8, `12:30:45` into 45045 and `no` into False, and leaves
`1e-6` a text. Here the guess comes last (tree.py), by the rules of YAML 1.2. Used by load.py. No I/O.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from areal.base.errors import ConfigError


class Plain(str):
    """A scalar without quotes: text, number, boolean or null, whatever its key wants."""

    __slots__ = ()


_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_MOST_ELEMENTS = 100_000
_SPECIAL = {".inf": "inf", "+.inf": "inf", "-.inf": "-inf", ".nan": "nan"}
_NULLS = ("", "~", "null", "Null", "NULL")
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


class _Loader(yaml.SafeLoader):
    """Safe, with duplicate keys refused and no guessing of scalar types."""

    yaml_implicit_resolvers = {"<": [("tag:yaml.org,2002:merge", re.compile(r"^(?:<<)$"))]}  # noqa: RUF012

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {name!r} stands twice", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


def _construct_text(loader: _Loader, node: yaml.ScalarNode) -> str:
    text = str(loader.construct_scalar(node))
    return Plain(text) if node.style is None else text


_Loader.add_constructor("tag:yaml.org,2002:str", _construct_text)


def load_yaml(text: str, source: str = "the configuration") -> Any:
    """Dicts, lists and texts. Raises ConfigError with the line for what is no YAML."""
    try:
        value = yaml.load(text, _Loader)
        _count(value, 0)
        return value
    except RecursionError:  # nested without end, for example by an anchor inside itself
        raise ConfigError(f"{source} nests too deep; this is no configuration") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}, line {mark.line + 1}" if mark else source
        raise ConfigError(f"{where}: {error.problem or error.context}; this is not valid YAML") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: {' '.join(str(error).split())}; this is not valid YAML") from None


def _count(value: object, before: int) -> int:
    """Elements of the tree so far. Anchors can make a small file endless (RecursionError) or huge (ConfigError)."""
    if before > _MOST_ELEMENTS:
        raise ConfigError(f"the configuration has more than {_MOST_ELEMENTS} elements; use fewer anchors")
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for child in children:
        before = _count(child, before + 1)
    return before


def is_null(value: object) -> bool:
    """None, or null as it is written plainly."""
    return value is None or (isinstance(value, Plain) and value in _NULLS)


def boolean(text: str) -> bool | None:
    """What a plain `true` or `false` means; None for another word."""
    return _BOOLEANS.get(text)


def number(text: str) -> int | float | None:
    """The number a text is in YAML 1.2 (`010` is ten, `1.e-6` a float); None if it is none."""
    if _INTEGER.fullmatch(text):
        return int(text, 0 if text[:2] in ("0o", "0x") else 10)
    if text.lower() in _SPECIAL:
        return float(_SPECIAL[text.lower()])
    return float(text) if _FLOAT.fullmatch(text) else None
