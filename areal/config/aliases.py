"""The second set of names (`train`, `async`, `agent`, `logging` blocks) and what each means in the canonical tree.

    translate(settings, problems)      # replaces alias settings by canonical ones; returns notes for the log

One visible table, ALIASES. Values from several names that belong together (engine and its dimensions, enabled and the
threshold) are combined over file and command line, so `async.enabled=false` works on top of a file. Used by load.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from areal.base.errors import ConfigError
from areal.base.guide import TAKES_TURNS
from areal.config.backend_spec import BackendSpec
from areal.config.problems import Problems
from areal.config.settings import ROUTER, Setting, Settings
from areal.config.yaml_text import Plain, boolean, is_null, number

Given = Mapping[str, Any]  # the names of one alias that the user wrote, with their values
Convert = Callable[[Given], Any]  # None: this alias says nothing about its target


@dataclass(frozen=True, slots=True)
class Alias:
    """names -> target by `convert`. default: only where nothing else sets the target; then a difference is no conflict."""

    names: tuple[str, ...]
    target: str
    convert: Convert
    meaning: str
    default: bool = False


def _same(given: Given) -> Any:
    return next(iter(given.values()))


def _whole(given: Given, name: str, absent: int) -> int:
    if name not in given:
        return absent
    value = number(str(given[name]))
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}: {given[name]!s} must be a whole number of at least 1")
    return value


def _backend(given: Given) -> Any:
    sizes = {letter: _whole(given, f"train.parallelism.{name}", 1) for name, letter in _DIMENSIONS.items()}
    sizes["d"] = _whole(given, "async.train_workers", sizes["d"])
    name = str(given.get("train.engine", "fsdp"))
    if name not in ("archon", "fsdp"):
        raise ConfigError(f"train.engine: {name!r} is unknown; write archon or fsdp")
    written = "".join(f"{letter}{size}" for letter, size in sizes.items() if size > 1 or letter == "d")
    return str(BackendSpec(name, **sizes)) if name == "archon" else f"{name}:{written}"


def _lag(given: Given) -> Any:
    if "async.enabled" in given:
        enabled = boolean(str(given["async.enabled"]))
        if enabled is None:
            raise ConfigError(f"async.enabled: {given['async.enabled']!s} must be true or false")
        if not enabled:
            return 0
    return given.get("async.staleness_threshold")


def _groups(name: str) -> Convert:
    """Trajectories as groups of gconfig.n_samples; the last group may be larger than asked for, never smaller."""

    def convert(given: Given) -> int | None:
        n_samples = _whole(given, "gconfig.n_samples", 1)
        most = _whole(given, "train.global_batch_size", 0)
        fewest = _whole(given, "async.trigger_batch_size", math.ceil(most / 2))
        if most and fewest > most:
            raise ConfigError(
                f"async.trigger_batch_size: {fewest} trajectories start a step, but train.global_batch_size lets it take "
                f"only {most}; lower the first or raise the second"
            )
        if name == "most" and most == fewest:
            return None  # a step takes what starts it
        wanted = fewest if name == "fewest" else most
        return math.ceil(wanted / n_samples) if wanted else None

    return convert


def _online(given: Given) -> str | None:
    return None if is_null(_same(given)) else "online"


def _served(given: Given) -> Any:
    return None if boolean(str(given.get("model_routing.policy_model.upstream", False))) else _model(given)


def _model(given: Given) -> Any:
    return given.get("model_routing.policy_model.model_id")


_DIMENSIONS = {"dp": "d", "tp": "t", "pp": "p", "cp": "c", "ep": "e"}
_BACKEND_NAMES = ("train.engine", *(f"train.parallelism.{name}" for name in _DIMENSIONS), "async.train_workers")
_BATCH_NAMES = ("async.trigger_batch_size", "train.global_batch_size", "gconfig.n_samples")
_FRAMEWORK = ("agent.framework", "rollout.agent.framework")
_POLICY = "model_routing.policy_model"

ALIASES: tuple[Alias, ...] = (
    Alias(_BACKEND_NAMES, "actor.backend", _backend, "engine:d·t·p·c·e·; train_workers sets d"),
    Alias(_BATCH_NAMES, "train_dataset.batch_size", _groups("fewest"), "trigger, or half of global; in groups"),
    Alias(_BATCH_NAMES, "train_dataset.max_batch_size", _groups("most"), "global_batch_size; in groups"),
    Alias(("train.mini_batch_size",), "actor.mini_batch_size", _same, "sequences per optimizer mini-batch"),
    Alias(("train.learning_rate",), "actor.optimizer.lr", _same, "the same"),
    Alias(("train.max_steps",), "total_train_steps", _same, "the same"),
    Alias(("async.enabled", "async.staleness_threshold"), "rollout.max_head_offpolicyness", _lag, "false: lag 0"),
    Alias(("async.rollout_workers",), "rollout.workers", _same, "the same"),
    Alias(("async.queue_max_size",), "rollout.queue_size", _same, "the same"),
    Alias(("agent.framework",), "rollout.agent.framework", _same, "the same"),
    Alias(_FRAMEWORK, "rollout.agent.mode", _online, "a framework comes over HTTP", default=True),
    Alias(("agent.max_turns",), "rollout.agent.max_turns", _same, "the same"),
    Alias(("agent.reward_source",), "rollout.agent.reward_source", _same, "the same"),
    Alias(("logging.log_dir",), "stats_logger.log_dir", _same, "the same"),
    Alias(("logging.log_interval",), "stats_logger.log_interval", _same, "the same"),
    Alias(("logging.save_interval",), "saver.freq_steps", _same, "the same"),
    Alias((f"{_POLICY}.model_id", f"{_POLICY}.upstream"), "actor.path", _served, "the trained model", default=True),
    Alias((f"{_POLICY}.temperature",), "gconfig.temperature", _same, "where the client names none", default=True),
    Alias((f"{_POLICY}.max_tokens",), "gconfig.max_new_tokens", _same, "where the client names none", default=True),
)
GATEWAY_CONFIG = "agent.gateway_config"  # names a router file; load.py reads it
ALIAS_NAMES: frozenset[str] = frozenset(
    {name for alias in ALIASES for name in alias.names if name.startswith(("train.", "async.", "agent.", "logging."))}
    | {GATEWAY_CONFIG}
)


def translate(settings: Settings, problems: Problems) -> list[str]:
    """Put canonical settings in the place of alias ones. Returns what a user should hear about how they were read."""
    notes = _notes(settings)
    found: Settings = {}
    for alias in ALIASES:
        given = {name: settings[name] for name in alias.names if name in settings}
        if not any(name in ALIAS_NAMES or alias.default for name in given):
            continue
        try:
            value = alias.convert({name: setting.value for name, setting in given.items()})
        except ConfigError as error:
            problems.add("", str(error))
            continue
        if value is None:
            continue
        said = [setting for name, setting in given.items() if name in ALIAS_NAMES or alias.default]
        name = " + ".join(setting.name for setting in said)
        rank = ROUTER if alias.default else max(setting.rank for setting in said)
        value = Plain(str(value)) if isinstance(value, int) else value
        _put(alias, Setting(value, rank, f"{name} ({alias.target})"), settings, found, problems)
    for name in ALIAS_NAMES & settings.keys():
        del settings[name]
    settings.update(found)
    return notes


def _put(alias: Alias, new: Setting, settings: Settings, found: Settings, problems: Problems) -> None:
    old = settings.get(alias.target)
    if old is None or (not alias.default and new.rank > old.rank):
        found[alias.target] = new
    elif not alias.default and new.rank == old.rank and _meaning(old.value) != _meaning(new.value):
        problems.add(
            old.name,
            f"{old.value} contradicts {new.name.partition(' (')[0]}, which makes it {new.value}; keep one of them",
        )


def _meaning(value: Any) -> Any:
    found = number(str(value))
    return str(value) if found is None else found


def _notes(settings: Settings) -> list[str]:
    notes = []
    dp, workers = settings.get("train.parallelism.dp"), settings.get("async.train_workers")
    if dp and workers and _meaning(dp.value) != _meaning(workers.value):
        notes.append(
            f"async.train_workers={workers.value} wins over train.parallelism.dp={dp.value}: it sets the data-parallel size"
        )
    enabled, lag = settings.get("async.enabled"), settings.get("async.staleness_threshold")
    if enabled and boolean(str(enabled.value)) is False:
        notes.append(TAKES_TURNS.text())
    if enabled and boolean(str(enabled.value)) and lag and number(str(lag.value)) == 0:
        notes.append(
            "async.enabled is true but async.staleness_threshold is 0: generation and training alternate; "
            "raise the threshold to 1 or more for them to overlap"
        )
    return notes
