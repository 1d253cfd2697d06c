"""The reward pipeline: what stands between the rewards that were given and the returns that advantages compare.

    returns_k = shaped(Rewards(returns, lengths, truncated), Shaping(scaling=10.0, bias=-0.5, clip=20.0))

The order, each step the identity unless its key is set:
  0. bound               each reward that was set counts within +-rollout.agent.reward_clip (proxy/export.py)
  1. turn discount       R_i = r_i + turn_discount * mean of R over what follows, along the branches (proxy/export.py);
                         no reward is 0, a *failed* reward is no row at all: its session is left out (settled 9)
  2. no end, no reward   an answer cut off by a length limit returns 0             actor.mask_no_eos_with_zero
  3. bias, scale         R <- (R + reward_bias) * reward_scaling                   of the answers that step 2 left alone
  4. clip                R <- R within +-reward_clip
  5. overlong            R <- R + clip((start - length) / overlong_tokens, -1, 0) * factor with start = limit - overlong_tokens,
                         where length counts the tokens of this one answer; a client may ask for more than the limit
                                                                                   DAPO, arXiv:2503.14476, eq. 13
  6. baseline and scale of the algorithm, by group ids (advantages.py)
Everything that changes a reward comes before any mean (T070). Pure tensors; used by engine/credit.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areal.base.errors import ShapeError


@dataclass(frozen=True, slots=True)
class Rewards:
    """One entry per interaction, [k]: discounted returns (float), sampled tokens, whether a length limit cut it off."""

    returns: Tensor
    lengths: Tensor
    truncated: Tensor


@dataclass(frozen=True, slots=True)
class Shaping:
    """Names as in `actor` (config/engine.py). overlong_limit: most tokens of one answer (gconfig.max_new_tokens)."""

    scaling: float = 1.0
    bias: float = 0.0
    clip: float | None = None
    mask_truncated: bool = False
    overlong_tokens: int | None = None
    overlong_factor: float = 1.0
    overlong_limit: int = 0


def shaped(rewards: Rewards, shaping: Shaping) -> Tensor:
    """Returns [k] after steps 2 to 5; same dtype. Raises ShapeError if the lengths differ."""
    if not rewards.returns.shape == rewards.lengths.shape == rewards.truncated.shape:
        raise ShapeError(
            f"{len(rewards.returns)} returns, {len(rewards.lengths)} lengths, {len(rewards.truncated)} endings; one each"
        )
    returns = (rewards.returns + shaping.bias) * shaping.scaling
    if shaping.mask_truncated:
        returns = torch.where(rewards.truncated, torch.zeros_like(returns), returns)
    if shaping.clip is not None:
        returns = returns.clamp(-shaping.clip, shaping.clip)
    if shaping.overlong_tokens is not None:
        start = shaping.overlong_limit - shaping.overlong_tokens
        beyond = (start - rewards.lengths).to(returns.dtype) / shaping.overlong_tokens
        returns = returns + beyond.clamp(-1.0, 0.0) * shaping.overlong_factor
    return returns
