"""What keeps a valid configuration from starting: what this version does not do, what is missing, what is said in vain.

    why_not(config)             # sentences, all of them; --dry-run shows them
    refuse_unstartable(config)  # ConfigError with them, before anything starts

What is not built is supported.py's table, what could never learn is learnable.py's, what agents and tasks need is own_agents.py's; what other keys need of each other stands here. Used by train.py, doctor.py
and command_line.py.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from areal.base.errors import ConfigError
from areal.config.backend_spec import parse_backend, wrong_replicas
from areal.config.engine import ActorConfig
from areal.config.learnable import cannot_learn
from areal.config.own_agents import agent_problems
from areal.config.rewarded import reward_problems
from areal.config.run import RunConfig
from areal.config.supported import reasons


def why_not(config: RunConfig) -> list[str]:
    """One line per reason; empty for what can start."""
    return (
        reasons(config)
        + agent_problems(config)
        + reward_problems(config)
        + _model_and_queue(config)
        + _files_that_are_not_there(config)
        + _kept_in_vain(config)
        + _cut_in_vain(config)
        + _adapters_that_cannot_be(config)
        + _drivers_that_are_not_there(config)
        + cannot_learn(config)
    )


def refuse_unstartable(config: RunConfig) -> None:
    """Raises ConfigError with all of `why_not`."""
    found = why_not(config)
    if found:
        raise ConfigError("\n".join(found))


def _model_and_queue(config: RunConfig) -> list[str]:
    found = []
    scripted, script = parse_backend(config.rollout.backend).name == "scripted", config.rollout.scripted.path
    if scripted and not script:
        found.append("rollout.backend is scripted: name its file in rollout.scripted.path (docs/scripted.md)")
    if script and not scripted:
        found.append(
            f"rollout.scripted.path={script}: rollout.backend={config.rollout.backend} plays no script; take it out, or set "
            "rollout.backend=scripted:d1"
        )
    if not config.actor.path and not scripted:
        found.append("actor.path is empty: name a model folder, a hub id, or a bundled model such as smollm2-135m")
    queue_size, needed = config.rollout.queue_size, config.train_dataset.batch_size
    if queue_size is not None and queue_size < needed:
        found.append(
            f"rollout.queue_size={queue_size} never holds the {needed} groups that one step needs: raise it to "
            f"{needed} or more, or lower train_dataset.batch_size"
        )
    most = config.train_dataset.max_batch_size
    if most is not None and most < needed:
        found.append(
            f"train_dataset.max_batch_size={most}: a step begins with train_dataset.batch_size={needed} groups, so it cannot take fewer; "
            "raise the first (train.global_batch_size), or lower the second (async.trigger_batch_size)"
        )
    return found


def _files_that_are_not_there(config: RunConfig) -> list[str]:
    named = {
        "rollout.scripted.path": (config.rollout.scripted.path, "a script (docs/scripted.md)"),
        "rollout.agent.chat_template": (config.rollout.agent.chat_template, "a Jinja file, or take it out"),
    }
    return [
        f"{key}={path} is no file (looked in {Path.cwd()}); name {kind}"
        for key, (path, kind) in named.items()
        if path and not Path(path).is_file()
    ]


def _kept_in_vain(config: RunConfig) -> list[str]:
    if config.store.keep_bytes is None or config.store.url is None:
        return []
    return [
        f"store.keep_bytes={config.store.keep_bytes}: measures the file of a run, and store.url puts it into a database; set "
        "store.keep_steps or store.keep_seconds"
    ]


def _cut_in_vain(config: RunConfig) -> list[str]:
    """What is said of dimensions that no net is cut along, or that they have no room for."""
    named = {"actor": config.actor, "critic": config.critic, "ref": config.ref, "teacher": config.teacher}
    nets = {name: each for name, each in named.items() if each is not None}
    specs = {name: parse_backend(each.backend) for name, each in nets.items()}
    wrong = {name: wrong_replicas(specs[name], each.replicas) for name, each in nets.items()}
    found = [f"{name}.{said}" for name, said in wrong.items() if said]
    cut = [spec for spec in specs.values() if spec.name == "archon"]
    for key, axis in (("pipeline_chunks", "p"), ("context_parallel", "c"), ("sequence_parallel", "t")):
        value = getattr(config.actor, key)
        if value != ActorConfig.model_fields[key].default and all(getattr(spec, axis) == 1 for spec in cut):
            shown = str(value).lower()
            found.append(
                f"actor.{key}={shown}: no archon: net has {axis}; take it out, or set actor.backend=archon:{axis}2"
            )
    return found


def _adapters_that_cannot_be(config: RunConfig) -> list[str]:
    spec = parse_backend(config.actor.backend)
    if config.actor.lora is None or (spec.name == "fsdp" and spec.t == spec.e == 1):
        return []
    return [
        f"actor.lora: actor.backend={config.actor.backend} trains all weights and has no adapters; set actor.backend=fsdp:d{spec.size}, or take the "
        "section out"
    ]


def _drivers_that_are_not_there(config: RunConfig) -> list[str]:
    if config.store.url is None or importlib.util.find_spec("psycopg"):
        return []
    return [
        "store.url needs the psycopg driver: pip install 'areal[postgres]', or take it out to keep the run in a file"
    ]
