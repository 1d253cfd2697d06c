"""SAPO: a smooth gate in the place of the clip. Soft Adaptive Policy Optimization, arXiv:2511.20347.

    L_t = -A_t * 4 / tau * sigmoid(tau * (r_t - 1))       r = pi / pi_behaviour, tau = tau_pos for A_t > 0, else tau_neg

The gate's slope is 1 at r = 1 and falls to both sides, faster for negative advantages. The ratio is to the behaviour policy
itself, so there is no decoupled weight. A = GRPO's.
"""

from __future__ import annotations

from functools import partial

import torch

from areal.algorithms.advantages import relative
from areal.algorithms.base import Algorithm, LossInputs, LossSettings
from areal.algorithms.losses import Loss, importance, weighted


def soft_gate(inputs: LossInputs, settings: LossSettings) -> Loss:
    """SAPO's objective; stats as `weighted`."""
    step = importance(inputs, settings)
    positive = torch.full_like(inputs.advantages, settings.sapo_tau_pos)
    tau = torch.where(inputs.advantages > 0, positive, torch.full_like(positive, settings.sapo_tau_neg))
    gate = torch.sigmoid(tau * (step.ratio - 1.0)) * 4.0 / tau
    return weighted(step, -inputs.advantages * gate)


SAPO = Algorithm("sapo", advantages=partial(relative, mean="group", std="group"), loss=soft_gate)
