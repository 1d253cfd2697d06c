"""A configuration as text that may be shown and stored: the whole tree as YAML, secrets as four-character hints.

print(masked_yaml(config))
RunConfig.model_validate(secretless_tree(config))      # for whoever reads it back: all but the secrets
"""

from __future__ import annotations

from typing import Any

import yaml

from areal.base.redact import hint
from areal.config.keys import keys_of
from areal.config.section import Section


def masked_tree(config: Section) -> dict[str, Any]:
    """Plain dicts and values, every key with its value, secrets masked."""
    tree = config.model_dump(mode="json")
    for key in keys_of(type(config)).values():
        if key.secret:
            _mask(tree, key.path)
    return tree


def masked_yaml(config: Section) -> str:
    """`masked_tree` in the order of the sections."""
    return yaml.safe_dump(masked_tree(config), sort_keys=False, allow_unicode=True, width=120)


def secretless_tree(config: Section) -> dict[str, Any]:
    """The same for a program to read again: a secret that may be absent is, every other one is a hint."""
    tree = config.model_dump(mode="json")
    for key in keys_of(type(config)).values():
        if key.secret:
            _mask(tree, key.path, absent=type(None) in key.kinds)
    return tree


def value_at(tree: Any, path: str) -> Any:
    """Of such plain dicts; None also where a section above it is absent."""
    for name in path.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _mask(tree: Any, path: str, *, absent: bool = False) -> None:
    above, _, leaf = path.rpartition(".")
    tree = value_at(tree, above) if above else tree
    if isinstance(tree, dict) and tree.get(leaf):
        tree[leaf] = None if absent else hint(tree[leaf])
