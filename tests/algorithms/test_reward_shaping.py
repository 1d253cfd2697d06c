"""The reward pipeline: each step against its formula, and the order of the steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.algorithms import Returns
from areal.algorithms.advantages import relative
from areal.algorithms.reward_shaping import Rewards, Shaping, shaped
from areal.base.errors import ShapeError


def rewards(*entries: tuple[float, int, bool]) -> Rewards:
    returns, lengths, truncated = zip(*entries, strict=True)
    return Rewards(torch.tensor(returns, dtype=torch.float64), torch.tensor(lengths), torch.tensor(truncated))


def naive(reward: float, length: int, truncated: bool, s: Shaping) -> float:
    value = 0.0 if s.mask_truncated and truncated else (reward + s.bias) * s.scaling
    if s.clip is not None:
        value = max(-s.clip, min(s.clip, value))
    if s.overlong_tokens is not None:
        start = s.overlong_limit - s.overlong_tokens
        value += max(-1.0, min(0.0, (start - length) / s.overlong_tokens)) * s.overlong_factor
    return value


shapings = st.builds(
    Shaping,
    scaling=st.sampled_from([1.0, 10.0]),
    bias=st.sampled_from([0.0, -0.5]),
    clip=st.sampled_from([None, 2.0]),
    mask_truncated=st.booleans(),
    overlong_tokens=st.sampled_from([None, 4]),
    overlong_factor=st.sampled_from([1.0, 0.5]),
    overlong_limit=st.just(16),
)
entry = st.tuples(st.floats(-3, 3), st.integers(1, 24), st.booleans())


@settings(deadline=None, max_examples=100)
@given(st.lists(entry, min_size=1, max_size=6), shapings)
def test_the_pipeline_is_its_steps_in_order(entries: list[tuple[float, int, bool]], chosen: Shaping) -> None:
    ours = shaped(rewards(*entries), chosen)
    assert ours.tolist() == pytest.approx([naive(*each, chosen) for each in entries], abs=1e-12)


def test_without_a_key_nothing_changes() -> None:
    given_returns = torch.tensor([0.1, -7.0, 1e6])
    assert torch.equal(shaped(Rewards(given_returns, torch.ones(3), torch.ones(3).bool()), Shaping()), given_returns)


def test_overlong_answers_lose_in_proportion() -> None:
    """DAPO's example: limit 16384 + 4096, punishment from 16384 tokens on."""
    chosen = Shaping(overlong_tokens=4096, overlong_limit=20480)
    ours = shaped(rewards((1, 16384, False), (1, 18432, False), (1, 20480, True), (1, 99999, True)), chosen)
    assert ours.tolist() == [1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("mean", ["group", "batch"])
def test_T070_a_truncated_answer_does_not_shift_the_mean_by_its_reward(mean: str) -> None:
    found = []
    for reward in (1.0, 100.0):
        returns = shaped(rewards((1.0, 5, False), (reward, 9, True)), Shaping(mask_truncated=True))
        batch = Returns(returns, torch.zeros(2), torch.arange(2))
        found.append(relative(batch, mean=mean, std=None).tolist())  # type: ignore[arg-type]
    assert found[0] == found[1] == [0.5, -0.5]


def test_a_clip_bounds_what_is_compared() -> None:
    chosen = Shaping(clip=1.0)
    assert shaped(rewards((1e6, 1, False), (-1e6, 1, False)), chosen).tolist() == [1.0, -1.0]
    assert shaped(rewards((0.2, 1, False)), replace(chosen, scaling=10.0)).tolist() == [1.0]


def test_shapes_that_differ_are_named() -> None:
    with pytest.raises(ShapeError, match="2 returns, 3 lengths, 2 endings"):
        shaped(Rewards(torch.zeros(2), torch.zeros(3), torch.zeros(2)), Shaping())
