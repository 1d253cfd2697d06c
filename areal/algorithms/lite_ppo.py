"""Lite PPO: two tricks are enough. Part I: Tricks or Traps?, arXiv:2508.08221.

A_i = (R_i - mean of the group) / (std of the batch)      a nearly solved group is not blown up
L   = token mean of PPO's clipped objective, no critic
"""

from __future__ import annotations

from functools import partial

from areal.algorithms.advantages import relative
from areal.algorithms.base import Algorithm
from areal.algorithms.losses import decoupled_clip

LITE_PPO = Algorithm("lite_ppo", advantages=partial(relative, mean="group", std="batch"), loss=decoupled_clip)
