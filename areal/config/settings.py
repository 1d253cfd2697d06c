"""What the user wrote, flat: key path -> value, who said it, and under which name. Later stages only add and replace.

    settings = flatten(load_yaml(text), FILE)         # {"actor.path": Setting(Plain("m"), FILE, "actor.path")}
    merge(settings, flatten_override("actor.path=n"))
    resolve_environment(settings, keys, problems)     # ${NAME}
    resolve_references(settings, keys, problems)      # ${actor.path}

Ranks decide: router file < config file < agent file < command line. Used by load.py and aliases.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from areal.base.errors import ConfigError
from areal.config.keys import Key
from areal.config.problems import Problems, nearest
from areal.config.yaml_text import Plain, load_yaml

ROUTER, FILE, AGENT_FILE, COMMAND_LINE = range(4)

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
_SLOT = re.compile(r"\$\{([^{}]*)\}")
_UNREAD = re.compile(r"\$\{|^\$\(?[A-Z_][A-Z0-9_]*\)?$")  # what a shell would read, or what lost its brace
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Raw(Plain):
    """A value from the command line: quotes and brackets mean something only where the key's type wants them."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """value: Plain, str, list, None, or a number. name: the key as the user wrote it, for messages."""

    value: Any
    rank: int
    name: str


Settings = dict[str, Setting]


def flatten(tree: Any, rank: int, prefix: str = "", source: str = "the configuration") -> Settings:
    """Leaves of nested dicts. Raises ConfigError if the top is no mapping."""
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{source} must hold `key: value` lines, not {'a list' if isinstance(tree, list) else 'a text'}"
        )
    settings: Settings = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            settings.update(flatten(value, rank, f"{path}."))
        else:
            settings[path] = Setting(Plain("") if value == {} else value, rank, path)
    return settings


def flatten_override(text: str, sections: frozenset[str]) -> Settings:
    """`key.sub=value` of the command line. A section takes `{a: 1}`. Raises ConfigError for another form."""
    path, equals, value = text.partition("=")
    path = path.strip().removeprefix("+")
    if not equals or not _PATH.fullmatch(path):
        raise ConfigError(f"{text!r} is no override; write key.sub=value, as in actor.optimizer.lr=1e-6")
    if path in sections and value.lstrip().startswith("{"):
        return flatten(load_yaml(value, f"the value of {path}"), COMMAND_LINE, f"{path}.")
    return {path: Setting(Raw(value), COMMAND_LINE, path)}


def merge(settings: Settings, more: Settings) -> None:
    """Add; a higher rank replaces what stands at, above and below the same key."""
    for path, setting in more.items():
        for other in [each for each in settings if each.startswith(f"{path}.") or path.startswith(f"{each}.")]:
            if settings[other].rank < setting.rank:
                del settings[other]
        if path not in settings or settings[path].rank <= setting.rank:
            settings[path] = setting


def resolve_environment(settings: Settings, keys: Mapping[str, Key], problems: Problems) -> None:
    """Put in ${NAME} everywhere, and clean secrets. What goes wrong is a problem naming variable and key."""
    for path, setting in list(settings.items()):
        secret = path in keys and keys[path].secret
        sent = secret or path.endswith("base_url")
        if sent and isinstance(setting.value, str) and _UNREAD.search(_SLOT.sub("", setting.value)):
            problems.add(
                setting.name, "a variable is written ${NAME}, with both braces; this would be sent as it stands"
            )
        value = _map_texts(setting.value, partial(_SLOT.sub, _Filler(setting.name, secret, problems)))
        if secret and isinstance(value, str):
            value = type(value)(value.strip())
            if _CONTROL.search(value):
                problems.add(
                    setting.name, "the secret has a line break or another control character inside; copy it again"
                )
        settings[path] = replace(setting, value=value)


def variables_of(settings: Settings) -> set[str]:
    """The names of the environment that ${NAME} asks for. To be called before resolve_environment has put them in."""
    found: set[str] = set()

    def note(text: str) -> str:
        found.update(name.strip() for name in _SLOT.findall(text) if _VARIABLE.fullmatch(name.strip()))
        return text

    for setting in settings.values():
        _map_texts(setting.value, note)
    return found


def resolve_references(settings: Settings, keys: Mapping[str, Key], problems: Problems) -> None:
    """Put in ${actor.path}: another key's value, or its default. Circles and unknown keys are problems."""
    for path in list(settings):
        settings[path] = replace(settings[path], value=_dereference(path, settings, keys, problems, (path,)))


def _dereference(
    path: str, settings: Settings, keys: Mapping[str, Key], problems: Problems, trail: tuple[str, ...]
) -> Any:
    setting = settings.get(path)
    if setting is None:
        return keys[path].default

    def look_up(name: str) -> Any:
        if name in trail:
            problems.add(setting.name, f"${{{name}}} leads back to itself ({' -> '.join((*trail, name))})")
            return ""
        if name not in keys and name not in settings:
            near = nearest(name, keys)
            problems.add(setting.name, f"${{{name}}} names no key{f'; did you mean ${{{near}}}?' if near else ''}")
            return ""
        return _dereference(name, settings, keys, problems, (*trail, name))

    def fill(text: str) -> Any:
        whole = _SLOT.fullmatch(text)
        if whole:
            return look_up(whole[1])
        return _SLOT.sub(lambda found: str(look_up(found[1])), text)

    return _map_texts(setting.value, fill)


class _Filler:
    """Replaces ${NAME}; leaves ${key.path} for resolve_references."""

    def __init__(self, where: str, secret: bool, problems: Problems) -> None:
        self._where, self._secret, self._problems = where, secret, problems

    def __call__(self, found: re.Match[str]) -> str:
        name = found[1].strip()
        if not _VARIABLE.fullmatch(name):
            if not _PATH.fullmatch(name):
                self._problems.add(
                    self._where, f"{found[0]} is neither an environment variable (upper case) nor a key path"
                )
                return ""
            return f"${{{name}}}"
        value = os.environ.get(name)
        if value is None:
            self._problems.add(self._where, f"environment variable {name} is not set; export {name}=… before starting")
            return ""
        value = value.strip()
        if not value and self._secret:
            self._problems.add(self._where, f"environment variable {name} is empty; a key is needed here")
        if _CONTROL.search(value):
            self._problems.add(
                self._where,
                f"environment variable {name} has a line break or another control character inside; copy the value again",
            )
            return ""
        return value


def _map_texts(value: Any, change: Callable[[str], Any]) -> Any:
    if isinstance(value, list):
        return [_map_texts(each, change) for each in value]
    if isinstance(value, dict):
        return {name: _map_texts(each, change) for name, each in value.items()}
    if isinstance(value, str) and "${" in value:
        changed = change(value)
        keep = isinstance(changed, str) and not isinstance(changed, Plain)
        return type(value)(changed) if keep else changed
    return value
