"""Dr. GRPO: GRPO done right. Understanding R1-Zero-Like Training, arXiv:2503.20783.

    A_i = R_i - mean of the group           not divided by the std: easy and hard tasks are not pushed up
    L   = sum over tokens of the clipped objective / (sessions * gconfig.max_new_tokens)

The constant length (`loss_aggregation=fixed_length`, its own) takes away the preference for long wrong answers.
"""

from __future__ import annotations

from functools import partial

from areal.algorithms.advantages import relative
from areal.algorithms.base import Algorithm
from areal.algorithms.losses import decoupled_clip

DR_GRPO = Algorithm("dr_grpo", advantages=partial(relative, mean="group", std=None), loss=decoupled_clip)
