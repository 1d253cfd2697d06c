"""From a batch of groups to the rows a training step takes: one advantage per trained token.

    rows = training_rows(batch.groups, ALGORITHMS["grpo"])

Returns are collected per interaction (each once, however many rows show it), the algorithm turns them into advantages, and
each stands at its interaction's tokens. The algorithm is pure maths; the rows are engine/rows.py's. Used by train.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from areal.algorithms.base import Algorithm, Returns
from areal.base.types import Group
from areal.engine.commands import Row
from areal.engine.rows import interaction_returns, to_rows


def training_rows(groups: Sequence[Group], algorithm: Algorithm) -> list[Row]:
    """Rows of the batch with their advantages. Raises TrainingError naming a session whose numbers are not finite."""
    returns = interaction_returns(groups)
    advantages = algorithm.advantages(
        Returns(
            returns=torch.from_numpy(returns.returns),
            group=torch.from_numpy(returns.group),
            session=torch.from_numpy(returns.session),
        )
    )
    return to_rows(groups, returns, advantages.numpy())
