"""Algorithms by name: pure maths on plain tensors. The names are `actor.algorithm`'s (config/engine.py).

    algorithm = ALGORITHMS["grpo"]
    advantages_k = algorithm.advantages(returns)

A new algorithm is one page, one line here, one twin test. `auto` is not in the table: launch.py resolves it.
"""

from __future__ import annotations

from areal.algorithms.advantages import batch_normalised, group_relative
from areal.algorithms.base import Algorithm, LossInputs, LossSettings, Returns
from areal.algorithms.losses import decoupled_clip

ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("grpo", advantages=group_relative, loss=decoupled_clip),
        Algorithm("ppo", advantages=batch_normalised, loss=decoupled_clip),
    )
}

__all__ = ["ALGORITHMS", "Algorithm", "LossInputs", "LossSettings", "Returns"]
