"""A YAML file, an agent file and overrides become a checked RunConfig, or one ConfigError with everything that is wrong.

    config = load_config(Path("config.yaml"), ["actor.optimizer.lr=1e-6", "async.enabled=false"])
    resolved = resolve(Path("config.yaml"), [])      # the same, with notes for the user beside it

Stages: read (yaml_text.py, agent_file.py) -> flatten and rank (settings.py) -> ${NAME} -> second names (aliases.py) ->
${key.path} -> types and sections (tree.py) -> backend specs. Nothing starts and nothing is sent before all have passed.
Secrets are announced to base/redact.py as soon as they are known. Used by command_line.py and the gateway. No torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from areal.base.errors import ConfigError
from areal.base.logs import warn
from areal.base.redact import protect
from areal.config.agent_file import read_agent_file
from areal.config.aliases import ALIAS_NAMES, GATEWAY_CONFIG, translate
from areal.config.backend_spec import Use, parse_backend
from areal.config.base_url import openai_base
from areal.config.keys import keys_of, paths_of
from areal.config.problems import Problems
from areal.config.run import RunConfig
from areal.config.settings import (
    FILE,
    ROUTER,
    Settings,
    flatten,
    flatten_override,
    merge,
    resolve_environment,
    resolve_references,
    variables_of,
)
from areal.config.show import value_at
from areal.config.tree import build
from areal.config.yaml_text import is_null, load_yaml

T = TypeVar("T")
_KEYS = keys_of(RunConfig)
_SECTIONS = paths_of(RunConfig) - _KEYS.keys()
_ROUTER_SECTIONS = ("api_gateway.", "model_routing.")
_SPECS: tuple[tuple[str, Use], ...] = (
    ("actor.backend", "train"),
    ("ref.backend", "train"),
    ("critic.backend", "train"),
    ("rollout.backend", "rollout"),
)
_LONG = 8  # characters of a variable that is taken for a part of a secret


@dataclass(frozen=True, slots=True)
class Resolved:
    """notes: sentences about how the configuration was read, for the log."""

    config: RunConfig
    notes: tuple[str, ...]


def load_config(path: Path | None, overrides: Sequence[str] = (), *, agent_config: Path | None = None) -> RunConfig:
    """`resolve`, with the notes as warnings in the log."""
    resolved = resolve(path, overrides, agent_config=agent_config)
    for note in resolved.notes:
        warn("Config", note)
    return resolved.config


def resolve(path: Path | None, overrides: Sequence[str] = (), *, agent_config: Path | None = None) -> Resolved:
    """Raises ConfigError whose message has one line per problem. Paths are relative to the working directory."""
    problems = Problems()
    settings, notes = _collect(path, overrides, agent_config, problems)
    notes += _literal_secrets(settings)
    variables = variables_of(settings)
    resolve_environment(settings, _KEYS, problems)
    variables |= _add_router(settings, problems)
    _announce_secrets(settings)
    notes += translate(settings, problems)
    resolve_references(settings, _KEYS, problems)
    config = build(RunConfig, settings, problems, ALIAS_NAMES)
    for key, use in _SPECS:
        if key in settings and isinstance(settings[key].value, str):
            _attempt(problems, settings[key].name, partial(parse_backend, settings[key].value, use))
    known_wrong = any(line.startswith("api_gateway.base_url") for line in problems.lines)
    if config is not None and config.api_gateway is not None and not known_wrong:
        _attempt(problems, "", partial(openai_base, config.api_gateway.base_url))
    problems.raise_if_any()
    assert config is not None  # build says why, if it is
    config.remember_secret_variables(_behind_secrets(config, variables))
    return Resolved(config, tuple(notes))


def _collect(
    path: Path | None, overrides: Sequence[str], agent_config: Path | None, problems: Problems
) -> tuple[Settings, list[str]]:
    settings: Settings = {}
    notes: list[str] = []
    if path is not None:
        merge(settings, _attempt(problems, "", lambda: _read(path, FILE)) or {})
    if agent_config is not None:
        found = _attempt(problems, "", lambda: read_agent_file(agent_config))
        if found:
            merge(settings, found[0])
            notes += found[1]
    for text in overrides:
        merge(settings, _attempt(problems, "", partial(flatten_override, text, _SECTIONS)) or {})
    return settings, notes


def _read(path: Path, rank: int) -> Settings:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist (looked in {Path.cwd()}); check the path") from None
    except UnicodeError as error:
        raise ConfigError(f"{path} is no text in UTF-8 ({error}); name a YAML file") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); name a YAML file that you may read") from None
    tree = load_yaml(text, str(path))
    return {} if is_null(tree) else flatten(tree, rank, source=str(path))


def _add_router(settings: Settings, problems: Problems) -> set[str]:
    """S2's `agent.gateway_config`: a file of the upstream channel and the model routes. Returns the variables that it reads."""
    named = settings.get(GATEWAY_CONFIG)
    if named is None or is_null(named.value):
        return set()
    router = _attempt(problems, named.name, lambda: _read(Path(str(named.value)), ROUTER)) or {}
    for path in [path for path in router if not path.startswith(_ROUTER_SECTIONS)]:
        problems.add(path, f"does not belong into {named.value}, which holds api_gateway and model_routing only")
        del router[path]
    variables = variables_of(router)
    resolve_environment(router, _KEYS, problems)
    merge(router, settings)
    settings.clear()
    settings.update(router)
    return variables


def _behind_secrets(config: RunConfig, variables: Iterable[str]) -> frozenset[str]:
    """Those that secrets of this configuration hold, whole or as a part, under whatever name the secret was written; of a URL its user and
    password are the secret."""
    tree = config.model_dump(mode="json")
    secrets = [str(value_at(tree, key.path) or "") for key in _KEYS.values() if key.secret]
    secrets = [text.partition("://")[2].rpartition("@")[0] if "://" in text else text for text in secrets]
    values = {name: os.environ.get(name, "").strip() for name in variables}
    return frozenset(
        name
        for name, value in values.items()
        if value in {*secrets} - {""} or (len(value) >= _LONG and any(value in text for text in secrets))
    )


def _announce_secrets(settings: Settings) -> None:
    for path, setting in settings.items():
        key = _KEYS.get(path)
        if not (key and key.secret and isinstance(setting.value, str)) or is_null(setting.value):
            continue
        if setting.value != key.default:  # the default key is no secret: warnings have to name it
            protect(setting.value)


def _literal_secrets(settings: Settings) -> list[str]:
    """Keys that stand in the config file itself: allowed, but said."""
    return [
        f"{path} is written out in the config file; write ${{NAME}} there and export NAME to keep it out of files"
        for path, setting in settings.items()
        if path in _KEYS and _KEYS[path].secret and setting.rank == FILE
        if isinstance(setting.value, str) and "${" not in setting.value and not is_null(setting.value)
        if setting.value != _KEYS[path].default
    ]


def _attempt(problems: Problems, path: str, work: Callable[[], T]) -> T | None:
    """The result, or None with the reason kept for later: a user should see everything at once."""
    try:
        return work()
    except ConfigError as error:
        problems.add(path, str(error))
        return None
