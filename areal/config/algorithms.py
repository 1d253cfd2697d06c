"""Which algorithm is meant, its own values of the keys nobody set, and which keys it would ignore. Free of torch.

    actor = resolved(config)               # an ActorConfig without `auto` and without open keys, for the rank
    ignored(config)                        # sentences about keys that the chosen algorithm does not use

One table, one line per algorithm; the maths is in areal/algorithms, and a test holds both to each other: a key that is
honoured changes a number there, one that is not changes none. Used by learnable.py, launch.py and assemble.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
}
"""What a key means to an algorithm without a value of its own; eps_clip_higher follows eps_clip."""

SPECIFIC = (*GENERAL, "eps_clip_higher")
"""Keys that not every algorithm honours."""


def algorithm_name(config: RunConfig) -> str:
    """auto: compare samples of one task with each other where there are several, else normalise over the batch."""
    if config.actor.algorithm != "auto":
        return config.actor.algorithm
    return "grpo" if config.gconfig.n_samples > 1 else "ppo"


def traits(config: RunConfig) -> Traits:
    """Of the algorithm that this configuration runs."""
    return TRAITS[algorithm_name(config)]


def resolved(config: RunConfig) -> ActorConfig:
    """The actor's section with the algorithm's name and every key of its objective filled in."""
    actor, own = config.actor, traits(config).own
    values = {key: _first(getattr(actor, key), own.get(key, default)) for key, default in GENERAL.items()}
    values["eps_clip_higher"] = _first(actor.eps_clip_higher, own.get("eps_clip_higher", values["eps_clip"]))
    values["loss_aggregation"] = _first(actor.loss_aggregation, own.get("loss_aggregation", "token_mean"))
    values["algorithm"] = algorithm_name(config)
    limit = config.gconfig.max_new_tokens
    if values["algorithm"] == "dapo" and actor.overlong_tokens is None and limit is not None:
        values["overlong_tokens"] = max(1, limit // 5)
    return actor.model_copy(update=values)


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
        found.append(
            f"actor.{key}{shown}: {name} does not use it (docs/algorithms.md); take it out, or set actor.algorithm to one of {users}"
        )
    return found


def _first(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value
