"""REINFORCE with the mean of the group as baseline. REINFORCE++-baseline, arXiv:2501.03262, without its batch scaling.

A_i = R_i - mean of the group
L   = -w_t * A_t * pi / pi_prox  [+ kl_ctl * k2(pi, pi_ref)]        no clip
"""

from __future__ import annotations

from functools import partial

from areal.algorithms.advantages import relative
from areal.algorithms.base import Algorithm
from areal.algorithms.losses import policy_gradient

REINFORCE_BASELINE = Algorithm(
    "reinforce_baseline", advantages=partial(relative, mean="group", std=None), loss=policy_gradient
)
