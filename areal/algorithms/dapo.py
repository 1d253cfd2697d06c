"""DAPO: decoupled clip and dynamic sampling. arXiv:2503.14476.

A_i = GRPO's, of returns with the soft overlong punishment (reward_shaping.py, step 5)
L   = token mean of the clipped objective with a wider upper clip (clip-higher: 0.2 / 0.28)
groups whose sessions all earn the same are left out and replaced by new ones (dynamic sampling, rollout/batcher.py)
"""

from __future__ import annotations

from functools import partial

from areal.algorithms.advantages import relative
from areal.algorithms.base import Algorithm
from areal.algorithms.losses import decoupled_clip

DAPO = Algorithm("dapo", advantages=partial(relative, mean="group", std="group"), loss=decoupled_clip)
