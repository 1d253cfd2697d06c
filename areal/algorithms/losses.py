"""The policy loss: PPO-clip against the proximal policy, corrected for the policy that really sampled (decoupled PPO).

    loss, stats = decoupled_clip(inputs, settings)          # both are weighted sums: add them up over micro-batches

    L_t = w_t * max(-A_t * r_t, -A_t * clip(r_t, 1 - eps, 1 + eps_high))      r = pi / pi_prox
    w_t = min(pi_prox / pi_behaviour, cap), a constant                        arXiv:2110.00641, arXiv:2505.24298
    and for A_t < 0, dual clip: max(...) is at most c_clip * |A_t|            arXiv:1912.09729

Without `use_decoupled_loss` the ratio is taken to the behaviour policy and w is 1. Log-ratios are clamped to +-LOG_RATIO_LIMIT
before exp, so one far-off token cannot make the step infinite; a NaN passes through, so that the engine can name its session.
There are no masked slots in the inputs: fillers cannot leak in. Log-probs on every side are at the temperature of sampling.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal.algorithms.base import LossInputs, LossSettings

LOG_RATIO_LIMIT = 20.0


def decoupled_clip(inputs: LossInputs, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one micro-batch, a scalar, and its stats: weighted means except where the name ends in `_max`.

    Stats: clip_ratio (part of tokens whose gradient the clip removed), dual_clip_ratio, approx_kl (of pi from pi_prox,
    mean of r - 1 - log r, nats), behave_weight_mean, behave_weight_max (before the cap)."""
    proximal = inputs.proximal if settings.use_decoupled_loss else inputs.behaviour
    log_ratio = (inputs.logprobs - proximal).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    plain = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(1.0 - settings.eps_clip, 1.0 + settings.eps_clip_higher)
    per_token = torch.maximum(plain, clipped)
    dual = torch.zeros_like(per_token, dtype=torch.bool)
    if settings.c_clip is not None:
        bound = settings.c_clip * inputs.advantages.abs()
        dual = (inputs.advantages < 0) & (per_token > bound)
        per_token = torch.where(dual, bound, per_token)
    raw_weight = (proximal - inputs.behaviour).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    behave_weight = raw_weight
    if settings.behave_imp_weight_cap is not None:
        behave_weight = raw_weight.clamp(max=settings.behave_imp_weight_cap)
    loss = (inputs.weight * behave_weight * per_token).sum()
    with torch.no_grad():
        stats = {
            "clip_ratio": (inputs.weight * (clipped > plain)).sum(),
            "dual_clip_ratio": (inputs.weight * dual).sum(),
            "approx_kl": (inputs.weight * (ratio - 1.0 - log_ratio)).sum(),
            "behave_weight_mean": (inputs.weight * behave_weight).sum(),
            "behave_weight_max": raw_weight.max() if len(raw_weight) else raw_weight.sum(),
        }
    return loss, stats
