"""What a step optimises (`actor`): the algorithm, its rewards, its loss, and what stale samples are worth.

A null key has the algorithm's own value; config/algorithms.py holds those values, says which algorithm honours which key, and refuses
a key that the chosen one would ignore. docs/algorithms.md has the formulas.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from areal.config.section import Section

AlgorithmName = Literal[
    "auto",
    "ppo",
    "grpo",
    "dr_grpo",
    "lite_ppo",
    "rloo",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_baseline",
    "dapo",
    "gspo",
    "cispo",
    "sapo",
    "m2po",
    "distill",
]
LossAggregation = Literal["token_mean", "sequence_mean", "fixed_length"]
ProximalMethod = Literal["recompute", "loglinear"]
KlEstimator = Literal["k1", "k2", "k3"]


class RejectionSamplingConfig(Section):
    level: Literal["token", "sequence"] = "token"
    """What is judged: each token, or each sampled answer as a whole."""
    action: Literal["clamp", "mask"] = "clamp"
    """Outside the bounds: clamp the weight proximal / behaviour to them (truncated importance sampling), or leave the token out."""
    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3"] = "ratio"
    """What is bounded: the ratio proximal / behaviour, or an estimate of the KL between them in nats (mask only)."""
    agg: Literal["mean", "sum", "max"] = "mean"
    """How the tokens of an answer make one number at level=sequence (of a ratio: of its logarithm)."""
    upper: float | None = Field(5.0, gt=0)
    """Upper bound; null = none. 2 to 5 for ratios, 0.001 to 0.1 for KL."""
    lower: float | None = None
    """Lower bound; null = none. 0.5 and less for ratios, of use with action=mask."""


class ObjectiveConfig(Section):
    algorithm: AlgorithmName = "auto"
    """auto: ppo where there is a critic, group-relative (grpo) where gconfig.n_samples > 1, else ppo with batch-normalised advantages.
    docs/algorithms.md has all."""
    reward_scaling: float = Field(1.0, gt=0)
    """Returns are (R + reward_bias) * reward_scaling before anything is compared; matters where nothing divides by a deviation."""
    reward_bias: float = 0.0
    """Added to every return before scaling; -0.5 centres rewards of 0 and 1."""
    reward_clip: float | None = Field(None, gt=0)
    """Scaled returns are kept within +-reward_clip; null = off."""
    mask_no_eos_with_zero: bool = False
    """An answer that a length limit cut off returns 0, whatever its reward; decided before any mean is taken."""
    overlong_tokens: int | None = Field(None, ge=1)
    """Soft punishment in the last so many tokens before gconfig.max_new_tokens, per answer; null = off (dapo: a fifth of the limit)."""
    overlong_penalty_factor: float = Field(1.0, gt=0)
    """What an answer of full length loses."""
    eps_clip: float | None = Field(None, gt=0)
    """The ratio to the proximal policy is clipped below 1 - eps_clip (and above 1 + eps_clip); null = 0.2 (gspo 3e-4, cispo 1)."""
    eps_clip_higher: float | None = Field(None, gt=0)
    """A wider upper clip; null = eps_clip (dapo 0.28, gspo 4e-4, cispo 4)."""
    c_clip: float | None = Field(None, gt=1)
    """Dual clip: the loss of a negative advantage is at most c_clip * |advantage|; null = off."""
    use_decoupled_loss: bool | None = None
    """Clip against the proximal policy, weight by proximal / behaviour; the right choice whenever lag > 0. null = true (sapo false)."""
    prox_logp_method: ProximalMethod | None = None
    """Proximal log-probs: recomputed at the start of the step, or log-linear between the versions, without a pass. null = recompute."""
    rejection_sampling: RejectionSamplingConfig = RejectionSamplingConfig()
    sapo_tau_pos: float | None = Field(None, gt=0)
    """Temperature of sapo's gate for positive advantages; null = 1."""
    sapo_tau_neg: float | None = Field(None, gt=0)
    """The same for negative ones; larger lets them fade sooner. null = 1.05."""
    m2_threshold: float | None = Field(None, gt=0)
    """Largest second moment of the stale log-ratio over the tokens m2po keeps; null = 0.04."""
    kl_ctl: float = Field(0.0, ge=0)
    """Weight of the KL from `ref`, in the loss or taken off the reward (docs/algorithms.md); 0.001 to 0.1. 0 = none."""
    kl_estimator: KlEstimator | None = None
    """How it is estimated per token; null = k3 in the loss, k1 off the reward. In a loss k1 does not pull, and is refused."""
    discount: float | None = Field(None, ge=0, le=1)
    """Per token, of a critic's GAE and of KL off the reward; null = 1. Between turns it is rollout.agent.turn_discount."""
    gae_lambda: float | None = Field(None, ge=0, le=1)
    """Of a critic's GAE: 1 trusts returns, 0 the critic; null = 1."""
    dynamic_sampling: bool | None = None
    """Groups whose sessions all earn the same are dropped and replaced by new ones; null = false (dapo true)."""
    loss_aggregation: LossAggregation | None = None
    """token_mean: over all trained tokens of the optimizer step. sequence_mean: over sessions, tokens averaged inside. fixed_length: a
    sum over sessions * gconfig.max_new_tokens. null = token_mean (gspo sequence_mean, dr_grpo fixed_length)."""
