"""From an interaction's number to its tokens: KL in the reward, GAE over a critic's values, normalisation over the batch.

    advantages_m = gae(rewards_m, values_m, interaction_m, gamma=1.0, lam=1.0)
    advantages_m = minus_kl_to_go(advantages_k[interaction_m], kl_ctl * kl_m, interaction_m, gamma=1.0)
    advantages_m = whitened(advantages_m)

Only trained tokens are in here, [m], those of one interaction side by side in the order they were sampled: a masked slot cannot
bootstrap into a live one (T071). Each interaction is an episode of its own that is paid its return at its last token; what
later turns earned is in that return already (turn_discount), so the export style and the number of rows change nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal.algorithms.advantages import EPS, equal
from areal.base.errors import ShapeError


def gae(rewards_m: Tensor, values_m: Tensor, interaction_m: Tensor, *, gamma: float, lam: float) -> Tensor:
    """Generalised advantage estimate (arXiv:1506.02438) of each interaction, before normalisation; [m], dtype of the rewards.

    rewards_m: paid at each trained token. values_m: the critic's, of the state before that token; after the last token of an
    interaction the episode is over (value 0). The critic learns advantages + values. Raises ShapeError."""
    if not rewards_m.shape == values_m.shape == interaction_m.shape:
        raise ShapeError(f"{len(rewards_m)} rewards, {len(values_m)} values, {len(interaction_m)} tokens; one each")
    found: list[float] = []
    advantage = next_value = 0.0
    episode: int | None = None
    columns = (rewards_m.tolist(), values_m.tolist(), interaction_m.tolist())
    for reward, value, own in zip(*(reversed(column) for column in columns), strict=True):
        if own != episode:
            advantage, next_value, episode = 0.0, 0.0, own
        advantage = reward + gamma * next_value - value + gamma * lam * advantage
        next_value = value
        found.append(advantage)
    return torch.tensor(found[::-1], dtype=rewards_m.dtype)


def paid_at_the_end(returns_k: Tensor, interaction_m: Tensor) -> Tensor:
    """Rewards [m]: each interaction's return at its last trained token, 0 elsewhere."""
    last = torch.ones_like(interaction_m, dtype=torch.bool)
    last[:-1] = interaction_m[1:] != interaction_m[:-1]
    return torch.where(last, returns_k[interaction_m], torch.zeros((), dtype=returns_k.dtype))


def minus_kl_to_go(advantages_m: Tensor, kl_m: Tensor, interaction_m: Tensor, *, gamma: float) -> Tensor:
    """Advantages [m] less the discounted sum of kl_m (already times kl_ctl) from each token to the end of its interaction."""
    return advantages_m - gae(kl_m, torch.zeros_like(kl_m), interaction_m, gamma=gamma, lam=1.0)


def whitened(advantages_m: Tensor) -> Tensor:
    """(A - mean) / (std + EPS) over all tokens [m], population standard deviation; exactly 0 among equals."""
    if equal(advantages_m):
        return torch.zeros_like(advantages_m)
    values = advantages_m.double()
    centred = values - values.mean()
    return (centred / (centred.square().mean().sqrt() + EPS)).to(advantages_m.dtype)
