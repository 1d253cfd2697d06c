"""Which algorithm is meant, its own values of the keys nobody set, and which keys it would ignore. Free of torch.

    actor = resolved(config)               # an ActorConfig without `auto` and without open keys, for the rank
    filled_in(config)                      # the same as a sentence
    ignored(config)                        # sentences about keys that the chosen algorithm does not use

One table, one line per algorithm; the maths is in areal/algorithms, and a test holds both to each other: a key that is
honoured changes a number there, one that is not changes none. Used by learnable.py, command_line.py, launch.py and assemble.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from areal.config.engine import ActorConfig
from areal.config.objective import RejectionSamplingConfig
from areal.config.run import RunConfig

_STALE = frozenset({"use_decoupled_loss", "prox_logp_method", "rejection_sampling"})
_CLIP = _STALE | {"eps_clip", "eps_clip_higher"}
_PPO = _CLIP | {"c_clip"}


@dataclass(frozen=True, slots=True)
class Traits:
    """keys: those of `SPECIFIC` it honours. own: its values where the user named none, and what it insists on where it does
    not honour a key. compares: among whom its advantages are zero in sum; None = nothing is compared."""

    keys: frozenset[str]
    own: Mapping[str, Any] = field(default_factory=dict)
    compares: Literal["group", "batch"] | None = "group"


TRAITS: dict[str, Traits] = {
    "ppo": Traits(_PPO, compares="batch"),
    "grpo": Traits(_PPO | {"dynamic_sampling"}),
    "dr_grpo": Traits(_PPO | {"dynamic_sampling"}, {"loss_aggregation": "fixed_length"}),
    "lite_ppo": Traits(_PPO | {"dynamic_sampling"}),
    "rloo": Traits(_PPO | {"dynamic_sampling"}),
    "reinforce": Traits(_STALE, compares=None),
    "reinforce_plus_plus": Traits(_PPO, compares="batch"),
    "reinforce_baseline": Traits(_STALE | {"dynamic_sampling"}),
    "dapo": Traits(_PPO | {"dynamic_sampling"}, {"eps_clip_higher": 0.28, "dynamic_sampling": True}),
    "gspo": Traits(
        _PPO | {"dynamic_sampling"}, {"eps_clip": 3e-4, "eps_clip_higher": 4e-4, "loss_aggregation": "sequence_mean"}
    ),
    "cispo": Traits(_CLIP | {"dynamic_sampling"}, {"eps_clip": 1.0, "eps_clip_higher": 4.0}),
    "sapo": Traits(frozenset({"sapo_tau_pos", "sapo_tau_neg", "dynamic_sampling"}), {"use_decoupled_loss": False}),
    "distill": Traits(_PPO),
    "m2po": Traits(frozenset({"m2_threshold", "use_decoupled_loss", "rejection_sampling", "dynamic_sampling"})),
}

GENERAL: dict[str, Any] = {
    "eps_clip": 0.2,
    "c_clip": None,
    "use_decoupled_loss": True,
    "prox_logp_method": "recompute",
    "rejection_sampling": RejectionSamplingConfig(),
    "sapo_tau_pos": 1.0,
    "sapo_tau_neg": 1.05,
    "m2_threshold": 0.04,
    "dynamic_sampling": False,
    "discount": 1.0,
    "gae_lambda": 1.0,
}
"""What a key means to an algorithm without a value of its own; eps_clip_higher follows eps_clip."""

SPECIFIC = (*GENERAL, "eps_clip_higher")
"""Keys that not every algorithm honours."""


def algorithm_name(config: RunConfig) -> str:
    """auto: a critic means ppo; else compare samples of one task where there are several, or normalise over the batch."""
    if config.actor.algorithm != "auto":
        return config.actor.algorithm
    return "grpo" if config.gconfig.n_samples > 1 and config.critic is None else "ppo"


def traits(config: RunConfig) -> Traits:
    """Of the algorithm that this configuration runs, with its critic, its KL and its teacher."""
    found = TRAITS[algorithm_name(config)]
    if config.critic is not None:
        found = replace(found, keys=found.keys | {"discount", "gae_lambda"}, compares=None)
    elif kl_off_the_reward(config):
        found = replace(found, keys=found.keys | {"discount"})
    if config.teacher is not None and config.teacher.rl_loss_weight == 0:
        found = replace(found, compares=None)
    return found


def kl_off_the_reward(config: RunConfig) -> bool:
    """Whether the KL from the reference is taken off the rewards, token by token, instead of being part of the loss."""
    return config.actor.kl_ctl > 0 and (algorithm_name(config) == "reinforce_plus_plus" or config.critic is not None)


def resolved(config: RunConfig) -> ActorConfig:
    """The actor's section with the algorithm's name and every key of its objective filled in."""
    actor, own = config.actor, traits(config).own
    values = {key: _first(getattr(actor, key), own.get(key, default)) for key, default in GENERAL.items()}
    values["eps_clip_higher"] = _first(actor.eps_clip_higher, own.get("eps_clip_higher", values["eps_clip"]))
    values["loss_aggregation"] = _first(actor.loss_aggregation, own.get("loss_aggregation", "token_mean"))
    values["kl_estimator"] = actor.kl_estimator or ("k1" if kl_off_the_reward(config) else "k3")
    values["algorithm"] = algorithm_name(config)
    limit = config.gconfig.max_new_tokens
    if values["algorithm"] == "dapo" and actor.overlong_tokens is None and limit is not None:
        values["overlong_tokens"] = max(1, limit // 5)
    return actor.model_copy(update=values)


def filled_in(config: RunConfig) -> str:
    """A sentence about what the open keys of the objective mean here."""
    actor, name = resolved(config), algorithm_name(config)
    shown = (*sorted(traits(config).keys - {"rejection_sampling"}), "loss_aggregation", "overlong_tokens")
    values = {key: getattr(actor, key) for key in shown if getattr(config.actor, key) is None}
    listed = ", ".join(f"{key}={value}" for key, value in values.items() if value is not None)
    return f"actor.algorithm={config.actor.algorithm} runs {name} with its own {listed}"


def ignored(config: RunConfig) -> list[str]:
    """One line per key that is set to something the chosen algorithm does not use."""
    name, chosen, found = algorithm_name(config), traits(config), []
    for key in SPECIFIC:
        value = getattr(config.actor, key)
        without = chosen.own.get(key, GENERAL.get(key))
        if value is None or key in chosen.keys or value == without:
            continue
        shown = f"={value}" if not isinstance(value, RejectionSamplingConfig) else ""
        users = ", ".join(sorted(other for other, its in TRAITS.items() if key in its.keys))
        remedy = f"set actor.algorithm to one of {users}" if users else "configure a critic for ppo"
        found.append(f"actor.{key}{shown}: {name} does not use it (docs/algorithms.md); take it out, or {remedy}")
    return found


def _first(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value
