"""REINFORCE: the score function times the return. Williams 1992, doi:10.1007/BF00992696.

A_i = R_i                               no baseline: use actor.reward_bias to centre rewards, or reinforce_baseline
L   = -w_t * A_t * pi / pi_prox         no clip; at the start of a step its gradient is -w_t * A_t * grad log pi
"""

from __future__ import annotations

from functools import partial

from areal.algorithms.advantages import relative
from areal.algorithms.base import Algorithm
from areal.algorithms.losses import policy_gradient

REINFORCE = Algorithm("reinforce", advantages=partial(relative, mean=None, std=None), loss=policy_gradient)
