"""PPO: the clipped objective. arXiv:1707.06347; with stale samples decoupled, arXiv:2110.00641 and arXiv:2505.24298.

without a critic:  A_i = (R_i - mean of the batch) / (std of the batch), sessions weigh the same
with a critic:     A_t = GAE(discount, gae_lambda) of the critic's values, normalised over the trained tokens of the batch
L = token mean of the clipped objective
critic: L_V = 1/2 * max((V - G)^2, (V_old + clip(V - V_old, +-eps) - G)^2)       G = A + V_old before normalisation
"""

from __future__ import annotations

from functools import partial

import torch

from areal.algorithms.advantages import relative
from areal.algorithms.base import Algorithm, LossInputs, LossSettings
from areal.algorithms.losses import Loss, decoupled_clip

PPO = Algorithm("ppo", advantages=partial(relative, mean="batch", std="batch"), loss=decoupled_clip)


def clipped_value_loss(inputs: LossInputs, settings: LossSettings) -> Loss:
    """The critic's loss. Of the inputs, logprobs [m] are its values (with gradient), proximal those at the start of the step,
    advantages the returns G it should predict. Stats: clip_ratio, and value_error, the mean of |V - G|."""
    change = (inputs.logprobs - inputs.proximal).clamp(-settings.eps_clip, settings.eps_clip)
    plain = (inputs.logprobs - inputs.advantages).square()
    bounded = (inputs.proximal + change - inputs.advantages).square()
    loss = 0.5 * (inputs.weight * torch.maximum(plain, bounded)).sum()
    with torch.no_grad():
        stats = {
            "clip_ratio": (inputs.weight * (bounded > plain)).sum(),
            "value_error": (inputs.weight * plain.sqrt()).sum(),
        }
    return loss, stats


CRITIC = Algorithm(
    "critic", advantages=partial(relative, mean=None, std=None), loss=clipped_value_loss, drop_zero=False
)
