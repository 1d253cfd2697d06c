"""Advantages without a critic: how much better each interaction's return is than those it is compared with.

    advantages_k = relative(Returns(returns, group, session), mean="group", std="group")      # GRPO, arXiv:2402.03300
    advantages_k = relative(batch, mean="group", std=None, leave_one_out=True)                # RLOO, arXiv:2402.14740

(return - mean) / (std + EPS) with the *population* standard deviation, and with every session weighing the same: an
interaction counts 1 / (interactions of its session), so a session that is split into more turns of the same return changes
nothing. What is compared is said by ids, in any order and of any size, never by strides. A comparison with nobody (one session)
or among equals is exactly 0. Used by the controller, before the ranks see a row (engine/credit.py spreads the numbers over tokens).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from areal.algorithms.base import Returns
from areal.base.errors import ShapeError

Level = Literal["group", "batch"]

EPS = 1e-6
"""Added to the standard deviation."""

ROUNDING = 8 * torch.finfo(torch.float32).eps
"""Returns whose spread is below this part of the largest one differ by float32 rounding only, and count as equal."""


def relative(batch: Returns, *, mean: Level | None, std: Level | None, leave_one_out: bool = False) -> Tensor:
    """Advantages [k] of each interaction; same dtype as the returns.

    mean: over whom the baseline is taken, None = no baseline. std: over whom the deviation is, None = not divided.
    leave_one_out: a session is no part of its own baseline. Raises ShapeError if the arrays do not fit together."""
    _check(batch)
    values = batch.returns.double()
    advantages = values.clone() if mean is None else torch.zeros_like(values)
    if mean is not None:
        for members in _sets(batch, mean):
            advantages[members] = _centred(values[members], batch.session[members], leave_one_out)
    if std is not None:
        for members in _sets(batch, std):
            advantages[members] = advantages[members] / (_deviation(values[members], batch.session[members]) + EPS)
    return advantages.to(batch.returns.dtype)


def equal(values: Tensor) -> bool:
    """Whether values [k] differ by float32 rounding at most, so that a deviation of theirs would be noise (T068)."""
    return len(values) == 0 or bool(values.max() - values.min() <= ROUNDING * values.abs().max())


def _sets(batch: Returns, level: Level) -> Iterator[Tensor]:
    """The masks [k] of those who are compared with each other."""
    if level == "batch":
        yield torch.ones_like(batch.group, dtype=torch.bool)
        return
    for group in torch.unique(batch.group):
        yield batch.group == group


def _centred(values: Tensor, session_k: Tensor, leave_one_out: bool) -> Tensor:
    _, index_k, turns = torch.unique(session_k, return_inverse=True, return_counts=True)
    sessions = len(turns)
    if sessions < 2 or equal(values):
        return torch.zeros_like(values)
    if leave_one_out:
        means = torch.zeros(sessions, dtype=values.dtype).index_add_(0, index_k, values) / turns
        centred: Tensor = values - ((means.sum() - means) / (sessions - 1))[index_k]
        return centred
    return values - (_shares(index_k, turns) * values).sum()


def _deviation(values: Tensor, session_k: Tensor) -> Tensor:
    """Population standard deviation, a scalar; infinite among equals, so that what is divided by it is 0."""
    if equal(values):
        return torch.tensor(torch.inf, dtype=values.dtype)
    _, index_k, turns = torch.unique(session_k, return_inverse=True, return_counts=True)
    weight_k = _shares(index_k, turns)
    centred = values - (weight_k * values).sum()
    deviation: Tensor = (weight_k * centred.square()).sum().sqrt()
    return deviation


def _shares(index_k: Tensor, turns: Tensor) -> Tensor:
    """The weight of each interaction, [k], 1 in sum: sessions weigh the same."""
    return 1.0 / (turns[index_k].double() * len(turns))


def _check(batch: Returns) -> None:
    if not batch.returns.shape == batch.group.shape == batch.session.shape or batch.returns.dim() != 1:
        shapes = f"{tuple(batch.returns.shape)}, {tuple(batch.group.shape)}, {tuple(batch.session.shape)}"
        raise ShapeError(f"returns, group and session must be one-dimensional and of one length, got {shapes}")
