"""What a valid configuration could never learn from, and keys that would be ignored: said before anything starts.

cannot_learn(config)        # one sentence each, with the remedy; part of startable.why_not, so --dry-run shows them
"""

from __future__ import annotations

from areal.config.algorithms import algorithm_name, ignored, kl_off_the_reward, resolved, traits
from areal.config.backend_spec import parse_backend
from areal.config.run import RunConfig


def cannot_learn(config: RunConfig) -> list[str]:
    """One line per reason, none where nothing is trained (no actor.path)."""
    if not config.actor.path:
        return []
    return [
        *_nothing_to_compare(config),
        *ignored(config),
        *_lengths(config),
        *_stale_weights(config),
        *_nets(config),
        *_experts(config),
    ]


def _nothing_to_compare(config: RunConfig) -> list[str]:
    name, compares, found = algorithm_name(config), traits(config).compares, []
    n_samples, sessions = config.gconfig.n_samples, config.gconfig.n_samples * config.train_dataset.batch_size
    if compares == "group" and n_samples == 1:
        otherwise = (
            "teacher.rl_loss_weight=0 to learn of the teacher alone" if name == "distill" else "actor.algorithm=ppo"
        )
        found.append(
            f"actor.algorithm={name} compares the samples of a task with each other, and gconfig.n_samples=1 makes one: every "
            f"advantage would be 0. Set gconfig.n_samples to 2 or more, or {otherwise}"
        )
    if compares == "batch" and sessions == 1:
        found.append(
            f"actor.algorithm={name} compares the sessions of a step with each other, and there is one: every advantage would be "
            "0. Set train_dataset.batch_size to 2 or more"
        )
    if config.gconfig.temperature == 0 and config.rollout.agent.sampling == "policy":
        found.append(
            "gconfig.temperature=0 with rollout.agent.sampling=policy: every token is greedy, and those are never trained; set a "
            "temperature above 0"
        )
    return found


def _lengths(config: RunConfig) -> list[str]:
    actor, limit, found = resolved(config), config.gconfig.max_new_tokens, []
    if actor.loss_aggregation == "fixed_length" and limit is None:
        found.append(
            f"actor.loss_aggregation=fixed_length (of actor.algorithm={actor.algorithm}) divides by gconfig.max_new_tokens; set "
            "that, or actor.loss_aggregation=token_mean"
        )
    if actor.overlong_tokens is not None and (limit is None or actor.overlong_tokens > limit):
        found.append(
            f"actor.overlong_tokens={actor.overlong_tokens} are the last tokens before gconfig.max_new_tokens={limit or 'null'}; "
            "set that to more, or take overlong_tokens out"
        )
    if actor.overlong_tokens is None and actor.overlong_penalty_factor != 1.0:
        found.append(
            f"actor.overlong_penalty_factor={actor.overlong_penalty_factor}: nothing is punished; set actor.overlong_tokens too"
        )
    return found


def _stale_weights(config: RunConfig) -> list[str]:
    actor, found = resolved(config), []
    rule = actor.rejection_sampling
    if rule.action == "clamp" and rule.metric != "ratio":
        found.append(
            f"actor.rejection_sampling.metric={rule.metric}: a KL is no weight that could be clamped; set action=mask, or metric=ratio"
        )
    if rule.level == "token" and rule.agg != "mean":
        found.append(
            f"actor.rejection_sampling.agg={rule.agg} says what tokens of an answer come to, and level=token judges each by itself: set "
            "level=sequence, or take agg out"
        )
    if rule.upper is not None and rule.lower is not None and rule.lower >= rule.upper:
        found.append(
            f"actor.rejection_sampling.lower={rule.lower} is not below upper={rule.upper}: every token would be left out; swap them"
        )
    if not actor.use_decoupled_loss and rule != type(rule)() and "rejection_sampling" in traits(config).keys:
        found.append(
            "actor.rejection_sampling weighs proximal / behaviour, and actor.use_decoupled_loss=false has no such weight; take one out"
        )
    if not actor.use_decoupled_loss and actor.prox_logp_method != "recompute":
        found.append(
            f"actor.prox_logp_method={actor.prox_logp_method}: actor.use_decoupled_loss=false has no proximal policy; take one out"
        )
    return found


def _nets(config: RunConfig) -> list[str]:
    """A net that nobody asks, and one that is asked but not there."""
    name, actor, found = algorithm_name(config), config.actor, []
    if actor.kl_ctl > 0 and config.ref is None:
        found.append(
            f"actor.kl_ctl={actor.kl_ctl} needs a reference policy: set ref.path (as a rule the same as actor.path), or "
            "actor.kl_ctl=0"
        )
    if actor.kl_ctl == 0 and config.ref is not None:
        found.append("ref: nothing asks the reference while actor.kl_ctl=0; set that (0.001 is usual), or take ref out")
    if actor.kl_ctl == 0 and actor.kl_estimator is not None:
        found.append(
            f"actor.kl_estimator={actor.kl_estimator}: there is no KL while actor.kl_ctl=0; set that, or take it out"
        )
    if actor.kl_ctl > 0 and actor.kl_estimator == "k1" and not kl_off_the_reward(config):
        found.append(
            f"actor.kl_estimator=k1: actor.algorithm={name} has the KL in its loss, where the gradient of k1 is zero in the mean; "
            "use k2 or k3"
        )
    if config.critic is not None and name != "ppo":
        found.append(
            f"critic: actor.algorithm={name} has no use for values; set actor.algorithm=ppo, or take critic out"
        )
    if (name == "distill") != (config.teacher is not None):
        found.append(
            "actor.algorithm=distill needs a teacher: set teacher.path"
            if config.teacher is None
            else f"teacher: actor.algorithm={name} asks no teacher; set actor.algorithm=distill, or take teacher out"
        )
    if config.teacher is not None and not config.teacher.path:
        found.append("teacher.path is empty: name a model folder, a hub id, or a bundled model")
    return found


def _experts(config: RunConfig) -> list[str]:
    """What keeps experts evenly used, where nobody would do it."""
    actor = config.actor
    if parse_backend(actor.backend).name != "archon":
        set_to = {key: getattr(actor, key) for key in ("moe_aux_loss", "moe_bias_rate") if getattr(actor, key)}
        return [
            f"actor.{key}={value}: actor.backend={actor.backend} does not use it; take it out, or use archon"
            for key, value in set_to.items()
        ]
    return []
