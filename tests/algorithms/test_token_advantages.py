"""GAE, KL in the reward and whitening, against their definitions; T071."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.algorithms.token_advantages import gae, minus_kl_to_go, paid_at_the_end, whitened
from areal.base.errors import ShapeError

number = st.floats(-2, 2)
episodes = st.lists(st.lists(st.tuples(number, number), min_size=1, max_size=5), min_size=1, max_size=4)
unit = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def naive(episode: list[tuple[float, float]], gamma: float, lam: float) -> list[float]:
    """The discounted sum of TD errors; the state after the last token is worth 0."""
    values = [v for _, v in episode] + [0.0]
    td = [r + gamma * values[t + 1] - v for t, (r, v) in enumerate(episode)]
    return [sum((gamma * lam) ** (k - t) * td[k] for k in range(t, len(td))) for t in range(len(td))]


@settings(deadline=None)
@given(episodes, unit, unit)
def test_gae_is_the_discounted_sum_of_td_errors(
    batch: list[list[tuple[float, float]]], gamma: float, lam: float
) -> None:
    flat = [token for episode in batch for token in episode]
    ids = torch.tensor([number for number, episode in enumerate(batch) for _ in episode])
    rewards, values = torch.tensor(flat, dtype=torch.float64).T
    ours = gae(rewards, values, ids, gamma=gamma, lam=lam)
    assert ours.tolist() == pytest.approx([a for episode in batch for a in naive(episode, gamma, lam)], abs=1e-12)


def test_T071_a_masked_slot_does_not_bootstrap() -> None:
    rewards, values, mask = torch.tensor([0.0, 1, 0]), torch.tensor([0.0, 0, 100]), torch.tensor([1, 1, 0]).bool()
    advantages = torch.zeros(3)
    advantages[mask] = gae(rewards[mask], values[mask], torch.zeros(2, dtype=torch.long), gamma=1.0, lam=0.95)
    assert advantages.tolist() == pytest.approx([0.95, 1.0, 0.0])


def test_a_return_is_paid_at_the_last_token_of_its_interaction() -> None:
    ids = torch.tensor([0, 0, 1, 2, 2, 2])
    assert paid_at_the_end(torch.tensor([1.0, 2.0, 3.0]), ids).tolist() == [0, 1, 2, 0, 0, 3]
    assert paid_at_the_end(torch.zeros(0), torch.zeros(0, dtype=torch.long)).tolist() == []


def test_kl_is_taken_off_from_each_token_to_the_end_of_its_interaction() -> None:
    ids, kl = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0.1, 0.2, 0.3, 1.0, 2.0], dtype=torch.float64)
    ours = minus_kl_to_go(torch.ones(5).double(), kl, ids, gamma=0.5)
    to_go = [0.1 + 0.5 * 0.2 + 0.25 * 0.3, 0.2 + 0.5 * 0.3, 0.3, 1 + 0.5 * 2, 2]
    assert ours.tolist() == pytest.approx([1 - x for x in to_go], abs=1e-12)


def test_whitened_is_centred_and_scaled_over_all_tokens() -> None:
    ours = whitened(torch.tensor([1.0, 2, 3, 6], dtype=torch.float64))
    std = math.sqrt((4 + 1 + 0 + 9) / 4)
    assert ours.tolist() == pytest.approx([(x - 3) / (std + 1e-6) for x in (1, 2, 3, 6)], abs=1e-12)


@pytest.mark.parametrize(("value", "n"), [(0.95, 8), (0.1, 8), (1 / 3, 7), (0.0, 4), (2.0, 1), (0.0, 0)])
def test_T068_equal_advantages_whiten_to_exactly_zero(value: float, n: int) -> None:
    assert whitened(torch.full((n,), value)).tolist() == [0.0] * n


def test_lengths_that_differ_are_named() -> None:
    with pytest.raises(ShapeError, match="2 rewards, 3 values, 2 tokens"):
        gae(torch.zeros(2), torch.zeros(3), torch.zeros(2), gamma=1.0, lam=1.0)
