"""GRPO: group-relative policy optimisation. DeepSeekMath, arXiv:2402.03300.

A_i = (R_i - mean of the group) / (std of the group)      population std, sessions weigh the same
L   = token mean of PPO's clipped objective  [+ kl_ctl * k3(pi, pi_ref)]
"""

from __future__ import annotations

from functools import partial

from areal.algorithms.advantages import relative
from areal.algorithms.base import Algorithm
from areal.algorithms.losses import decoupled_clip

GRPO = Algorithm("grpo", advantages=partial(relative, mean="group", std="group"), loss=decoupled_clip)
