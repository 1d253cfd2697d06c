"""Settings -> a checked tree of sections: types decided by the key, every problem found before any is reported.

    config = build(RunConfig, settings, problems, extra_names=ALIAS_NAMES)    # None if there were problems

Unknown keys get the nearest known one; pydantic's findings become sentences in the user's own key names. Used by load.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import ValidationError

from areal.base.errors import ConfigError
from areal.base.redact import hint
from areal.config.elsewhere import said_by
from areal.config.keys import Key, keys_of, paths_of
from areal.config.problems import Problems, nearest
from areal.config.section import Section
from areal.config.settings import Raw, Settings
from areal.config.yaml_text import Plain, boolean, is_null, load_yaml, number

Root = TypeVar("Root", bound=Section)
_MISSING = object()


def build(root: type[Root], settings: Settings, problems: Problems, extra_names: Iterable[str] = ()) -> Root | None:
    """The tree, or None with the reasons added to `problems`."""
    keys, paths = keys_of(root), paths_of(root)
    before = len(problems.lines)
    tree: dict[str, Any] = {}
    for path, setting in settings.items():
        if path in keys:
            value = _typed(keys[path].kinds, setting.value)
            if value is not _MISSING:
                _plant(tree, path, value)
            else:
                problems.add(setting.name, f"{_shown(setting.value, keys[path])} must be {_wanted(keys[path])}")
        elif path in paths:
            if not is_null(setting.value):
                problems.add(setting.name, "is a section; write its keys below it, not a value beside it")
        else:
            problems.add(setting.name, _unknown(path, keys, paths, extra_names))
    try:
        config = root.model_validate(tree)
    except ValidationError as error:
        for finding in error.errors(include_url=False):
            _report(finding, keys, settings, problems)
        return None
    return config if len(problems.lines) == before else None


def _typed(kinds: tuple[Any, ...], value: Any) -> Any:
    """The Python value for these kinds, _MISSING if a plain word is none; texts with quotes go on as they are."""
    if isinstance(value, Plain):
        if type(None) in kinds and is_null(value):
            return None
        if isinstance(value, Raw) and value[:1] in ("'", '"', "["):
            value = _unwrap(kinds, value)
    if isinstance(value, list):
        inner = next((get_args(kind) for kind in kinds if get_origin(kind) is list), ())
        typed = [(each, _typed(inner, each)) for each in value]
        return [
            each if found is _MISSING else found for each, found in typed
        ]  # validation then shows what stands there
    if not isinstance(value, Plain):
        return value
    if any(kind is str or get_origin(kind) is Literal for kind in kinds):
        return str(value)
    if bool in kinds and boolean(value) is not None:
        return boolean(value)
    found = number(value) if int in kinds or float in kinds else None
    return _MISSING if found is None else found


def _unwrap(kinds: tuple[Any, ...], value: Raw) -> Any:
    """Quotes and brackets of the command line, where the key's type wants them; else the text as it came."""
    if value[0] == "[" and not any(get_origin(kind) is list for kind in kinds):
        return value
    try:
        parsed = load_yaml(value)
    except ConfigError:  # not YAML, so it is the text itself
        return value
    return value if isinstance(parsed, Plain | dict) else parsed


def _plant(tree: dict[str, Any], path: str, value: Any) -> None:
    *sections, leaf = path.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[leaf] = value


def _unknown(path: str, keys: dict[str, Key], paths: frozenset[str], extra_names: Iterable[str]) -> str:
    if here := said_by(path):
        return f"unknown key; {here} (docs/algorithms.md)"
    above = path.rpartition(".")[0]
    while above:
        if above in keys:
            return f"unknown key: {above} is a value, not a section"
        above = above.rpartition(".")[0]
    near = nearest(path, [*keys, *extra_names])
    if near:
        return f"unknown key; did you mean {near}?"
    siblings = sorted(each for each in (*paths, *extra_names) if "." not in each)
    return f"unknown key; the sections and keys at the top are {', '.join(siblings)}"


def _report(finding: Any, keys: dict[str, Key], settings: Settings, problems: Problems) -> None:
    path = ".".join(str(part) for part in finding["loc"] if not isinstance(part, int))
    key = keys.get(path)
    name = settings[path].name if path in settings else path
    shown = _shown(finding.get("input"), key)
    kind, context = finding["type"], finding.get("ctx", {})
    if kind == "missing":
        problems.add(name, "is needed here; add it")
    elif kind in _BOUNDS:
        problems.add(name, f"{shown} must be {_BOUNDS[kind]} {context[_LIMITS[kind]]:g}")
    elif key is not None and kind != "value_error":
        problems.add(name, f"{shown} must be {_wanted(key)}{_near_choice(key, finding.get('input'))}")
    else:
        problems.add(name, f"{shown}: {finding['msg'].lower()}")


_BOUNDS = {
    "greater_than": "greater than",
    "greater_than_equal": "at least",
    "less_than": "less than",
    "less_than_equal": "at most",
}
_LIMITS = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}


def _choices(key: Key) -> list[str]:
    return [str(choice) for kind in key.kinds if get_origin(kind) is Literal for choice in get_args(kind)]


def _near_choice(key: Key, value: Any) -> str:
    near = nearest(str(value), _choices(key))
    return f"; did you mean {near}?" if near else ""


def _wanted(key: Key) -> str:
    """What a key takes, in words."""
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
    words = []
    for kind in key.kinds:
        if get_origin(kind) is Literal:
            words.append(f"one of {', '.join(_choices(key))}")
        elif get_origin(kind) is list:
            words.append("a list, as in [a, b]")
        else:
            words.append(names.get(kind, str(kind)))
    return " or ".join(words)


def _shown(value: Any, key: Key | None) -> str:
    text = str(value)
    return hint(text) if key is not None and key.secret and value is not None else repr(text)
