"""Advantages without a critic: how much better each interaction's return is than those it is compared with.

    advantages_k = group_relative(Returns(returns, group, session))       # GRPO, arXiv:2402.03300
    advantages_k = batch_normalised(Returns(returns, group, session))     # PPO without a critic

Both are (return - mean) / (std + EPS) with the *population* standard deviation, and with every session weighing the same:
an interaction counts 1 / (interactions of its session). A session that is split into more turns of the same return changes nothing.
What is compared is said by ids, in any order and of any size, never by strides. A comparison with nobody (one session)
or among equals is exactly 0. Used by the controller, before the ranks see a row (engine/rows.py spreads the numbers over tokens).
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal.algorithms.base import Returns
from areal.base.errors import ShapeError

EPS = 1e-6
"""Added to the standard deviation."""

ROUNDING = 8 * torch.finfo(torch.float32).eps
"""Returns whose spread is below this part of the largest one differ by float32 rounding only, and count as equal."""


def group_relative(batch: Returns) -> Tensor:
    """Advantages [k] of each interaction against the sessions of its group; same dtype as the returns."""
    _check(batch)
    advantages = torch.zeros_like(batch.returns)
    for group in torch.unique(batch.group):
        members = batch.group == group
        advantages[members] = _standardised(batch.returns[members], batch.session[members])
    return advantages


def batch_normalised(batch: Returns) -> Tensor:
    """Advantages [k] of each interaction against all sessions of the batch; same dtype as the returns."""
    _check(batch)
    return _standardised(batch.returns, batch.session)


def _standardised(returns_k: Tensor, session_k: Tensor) -> Tensor:
    _, index_k, turns = torch.unique(session_k, return_inverse=True, return_counts=True)
    values = returns_k.double()
    if len(turns) < 2 or values.max() - values.min() <= ROUNDING * values.abs().max():
        return torch.zeros_like(returns_k)
    weight_k = 1.0 / (turns[index_k].double() * len(turns))  # sums to 1
    centred = values - (weight_k * values).sum()
    std = (weight_k * centred.square()).sum().sqrt()
    advantages: Tensor = (centred / (std + EPS)).to(returns_k.dtype)
    return advantages


def _check(batch: Returns) -> None:
    if not batch.returns.shape == batch.group.shape == batch.session.shape or batch.returns.dim() != 1:
        shapes = f"{tuple(batch.returns.shape)}, {tuple(batch.group.shape)}, {tuple(batch.session.shape)}"
        raise ShapeError(f"returns, group and session must be one-dimensional and of one length, got {shapes}")
