"""M2PO: the second moment of the stale log-ratio is bounded by leaving out the few worst tokens. arXiv:2510.01161.

    kept = the most tokens of the step whose mean of (log pi_prox - log pi_behaviour)^2 is at most m2_threshold
    L_t  = -w_t * A_t * pi / pi_prox for kept tokens, 0 for the others; no clip          A = GRPO's

The tokens left out stay in the denominator, so the step shrinks with them. It needs proximal log-probs before the first
update: one more forward pass over the rows that are trained.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from areal.algorithms.advantages import relative
from areal.algorithms.base import Algorithm, LossSettings
from areal.algorithms.losses import policy_gradient
from areal.algorithms.off_policy import second_moment_mask


def _screen(proximal: Tensor, behaviour: Tensor, settings: LossSettings) -> Tensor:
    return second_moment_mask(proximal, behaviour, settings.m2_threshold)


M2PO = Algorithm("m2po", advantages=partial(relative, mean="group", std="group"), loss=policy_gradient, screen=_screen)
