"""RLOO: REINFORCE with the mean of the *others* as baseline. Back to Basics, arXiv:2402.14740.

A_i = R_i - mean over the other sessions of the group = n / (n - 1) * (R_i - mean of the group)
L   = token mean of PPO's clipped objective
"""

from __future__ import annotations

from functools import partial

from areal.algorithms.advantages import relative
from areal.algorithms.base import Algorithm
from areal.algorithms.losses import decoupled_clip

RLOO = Algorithm("rloo", advantages=partial(relative, mean="group", std=None, leave_one_out=True), loss=decoupled_clip)
