"""What the algorithms' losses are made of: the ratio, the correction for stale tokens, and the sum with its statistics.

    loss, stats = decoupled_clip(inputs, settings)          # both are weighted sums: add them up over micro-batches
    step = importance(inputs, settings); return weighted(step, -inputs.advantages * step.ratio)       # a new one

    L_t = w_t * max(-A_t * r_t, -A_t * clip(r_t, 1 - eps, 1 + eps_high))      r = pi / pi_prox
    w_t = min(pi_prox / pi_behaviour, cap), a constant                        arXiv:2110.00641, arXiv:2505.24298
    and for A_t < 0, dual clip: max(...) is at most c_clip * |A_t|            arXiv:1912.09729

Without `use_decoupled_loss` the ratio is taken to the behaviour policy and w is 1. Log-ratios are clamped to +-LOG_RATIO_LIMIT
before exp, so one far-off token cannot make the step infinite; a NaN passes through, so that the engine can name its session.
There are no masked slots in the inputs: fillers cannot leak in. Log-probs on every side are at the temperature of sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areal.algorithms.base import LossInputs, LossSettings
from areal.algorithms.kl import KL_ESTIMATORS, LOG_RATIO_LIMIT
from areal.algorithms.off_policy import behaviour_weights, over_sequences

Loss = tuple[Tensor, dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Importance:
    """Tensors [m] of one micro-batch. log_ratio and ratio (to the base policy) carry the gradient, the rest does not."""

    inputs: LossInputs
    settings: LossSettings
    log_ratio: Tensor
    ratio: Tensor
    behave_weight: Tensor
    raw_weight: Tensor
    kept: Tensor


def importance(inputs: LossInputs, settings: LossSettings, *, per_sequence: bool = False) -> Importance:
    """Ratios to the proximal policy (to the behaviour policy without use_decoupled_loss) and the weights of stale tokens.

    per_sequence: the geometric mean of the ratios of each sampled answer, at all its tokens."""
    base = inputs.proximal if settings.use_decoupled_loss else inputs.behaviour
    log_ratio = inputs.logprobs - base
    if per_sequence:
        log_ratio = over_sequences(log_ratio, inputs.interaction, "mean")
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    weight, raw, kept = behaviour_weights(base, inputs.behaviour, inputs.interaction, settings.correction)
    return Importance(inputs, settings, log_ratio, log_ratio.exp(), weight, raw, kept)


def weighted(step: Importance, per_token: Tensor, **stats: Tensor) -> Loss:
    """The loss of one micro-batch, a scalar, and its stats: weighted means except where the name ends in `_max`.

    per_token [m]: the objective, stats [m]: what its author counts. Added here: approx_kl (of pi from its base, mean of
    r - 1 - log r, nats), behave_weight_mean (bounded), behave_weight_max (before that), rejected_ratio, and with a reference
    ref_kl and its part of the loss."""
    inputs, settings = step.inputs, step.settings
    loss = (inputs.weight * step.behave_weight * per_token).sum()
    with torch.no_grad():
        found = {name: (inputs.weight * values).sum() for name, values in stats.items()}
        found |= {
            "approx_kl": (inputs.weight * (step.ratio - 1.0 - step.log_ratio)).sum(),
            "behave_weight_mean": (inputs.weight * step.behave_weight).sum(),
            "behave_weight_max": step.raw_weight.max() if len(step.raw_weight) else step.raw_weight.sum(),
            "rejected_ratio": (inputs.weight * ~step.kept).sum(),
        }
    if inputs.reference is not None:
        kl = (inputs.weight * KL_ESTIMATORS[settings.kl_estimator](inputs.logprobs - inputs.reference)).sum()
        loss = loss + settings.kl_ctl * kl
        found["ref_kl"] = kl.detach()
    return loss, found


def decoupled_clip(inputs: LossInputs, settings: LossSettings) -> Loss:
    """PPO's clipped objective; stats besides `weighted`'s: clip_ratio (part of the tokens whose gradient the clip removed),
    dual_clip_ratio."""
    return clipped(importance(inputs, settings), inputs.advantages, settings)


def clipped(step: Importance, advantages: Tensor, settings: LossSettings) -> Loss:
    """The same for given ratios and advantages [m]."""
    plain = -advantages * step.ratio
    bounded = -advantages * step.ratio.clamp(1.0 - settings.eps_clip, 1.0 + settings.eps_clip_higher)
    per_token = torch.maximum(plain, bounded)
    dual = torch.zeros_like(per_token, dtype=torch.bool)
    if settings.c_clip is not None:
        bound = settings.c_clip * advantages.abs()
        dual = (advantages < 0) & (per_token > bound)
        per_token = torch.where(dual, bound, per_token)
    return weighted(step, per_token, clip_ratio=bounded > plain, dual_clip_ratio=dual)


def policy_gradient(inputs: LossInputs, settings: LossSettings) -> Loss:
    """The importance-weighted policy gradient without a clip: L_t = -w_t * A_t * r_t. At r = 1 its gradient is REINFORCE's."""
    step = importance(inputs, settings)
    return weighted(step, -inputs.advantages * step.ratio)
