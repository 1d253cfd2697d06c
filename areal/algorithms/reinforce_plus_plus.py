"""REINFORCE++: no critic, no groups, one normalisation over the batch. arXiv:2501.03262.

A_t = R_i - kl_ctl * sum over t' >= t of k1(pi_behaviour, pi_ref)_t'     then (A - mean) / std over all trained tokens of the batch
L   = token mean of PPO's clipped objective
"""

from __future__ import annotations

from functools import partial

from areal.algorithms.advantages import relative
from areal.algorithms.base import Algorithm
from areal.algorithms.losses import decoupled_clip

REINFORCE_PLUS_PLUS = Algorithm(
    "reinforce_plus_plus", advantages=partial(relative, mean=None, std=None), loss=decoupled_clip, whiten=True
)
