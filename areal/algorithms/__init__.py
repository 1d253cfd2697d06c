"""Algorithms by name: pure maths on plain tensors. The names are `actor.algorithm`'s (config/engine.py).

    algorithm = ALGORITHMS["grpo"]
    advantages_k = algorithm.advantages(returns)

A new algorithm is one page, one line here, one line in config/algorithms.py (its keys), one twin test, one section of
docs/algorithms.md. `auto` is not in the table: config/algorithms.py resolves it.
"""

from __future__ import annotations

from areal.algorithms.base import Algorithm, LossInputs, LossSettings, Returns
from areal.algorithms.cispo import CISPO
from areal.algorithms.dapo import DAPO
from areal.algorithms.distill import DISTILL
from areal.algorithms.dr_grpo import DR_GRPO
from areal.algorithms.grpo import GRPO
from areal.algorithms.gspo import GSPO
from areal.algorithms.lite_ppo import LITE_PPO
from areal.algorithms.m2po import M2PO
from areal.algorithms.ppo import PPO
from areal.algorithms.reinforce import REINFORCE
from areal.algorithms.reinforce_baseline import REINFORCE_BASELINE
from areal.algorithms.reinforce_plus_plus import REINFORCE_PLUS_PLUS
from areal.algorithms.rloo import RLOO
from areal.algorithms.sapo import SAPO

ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        PPO,
        GRPO,
        DR_GRPO,
        LITE_PPO,
        RLOO,
        REINFORCE,
        REINFORCE_PLUS_PLUS,
        REINFORCE_BASELINE,
        DAPO,
        GSPO,
        CISPO,
        SAPO,
        M2PO,
        DISTILL,
    )
}

__all__ = ["ALGORITHMS", "Algorithm", "LossInputs", "LossSettings", "Returns"]
