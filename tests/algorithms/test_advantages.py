"""Advantages by comparison against their definition: by group or batch, leave-one-out, divided or not."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.algorithms import Returns
from areal.algorithms.advantages import relative
from areal.base.errors import ShapeError

group_relative = partial(relative, mean="group", std="group")
batch_normalised = partial(relative, mean="batch", std="batch")
VARIANTS = [
    partial(relative, mean=mean, std=std, leave_one_out=out)
    for mean in ("group", "batch")
    for std in (None, "group", "batch")
    for out in (False, True)
]


def single_turn(*groups: list[float]) -> Returns:
    """Each return is a session of its own."""
    flat = [value for group in groups for value in group]
    ids = [number for number, group in enumerate(groups) for _ in group]
    return Returns(torch.tensor(flat), torch.tensor(ids), torch.arange(len(flat)))


def naive(returns: list[float], group: list[int], session: list[int]) -> list[float]:
    """Mean and population deviation over sessions' values, each session's turns sharing one vote."""
    result = []
    for r, g in zip(returns, group, strict=True):
        turns = defaultdict(list)
        for value, other, s in zip(returns, group, session, strict=True):
            turns[s] += [value] if other == g else []
        votes = [(v, 1 / len(t)) for t in turns.values() for v in t]
        mean = sum(v * w for v, w in votes) / sum(w for _, w in votes)
        std = math.sqrt(sum(w * (v - mean) ** 2 for v, w in votes) / sum(w for _, w in votes))
        result.append((r - mean) / (std + 1e-6) if std > 1e-5 and len([t for t in turns.values() if t]) > 1 else 0.0)
    return result


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=14))
def test_group_relative_is_the_definition(entries: list[tuple[int, int, int]]) -> None:
    returns = [value / 4 for value, _, _ in entries]
    group = [g for _, g, _ in entries]
    session = [10 * g + s for _, g, s in entries]
    ours = group_relative(Returns(torch.tensor(returns), torch.tensor(group), torch.tensor(session)))
    assert ours.tolist() == pytest.approx(naive(returns, group, session), abs=1e-4)


def test_T066_short_groups_are_told_apart_by_id() -> None:
    ours = group_relative(single_turn([1.0, 0, 0, 1], [1.0, 0], [0.0, 1, 1, 1]))
    expected = [1, -1, -1, 1, 1, -1, -1.7320, 0.5773, 0.5773, 0.5773]
    assert ours.tolist() == pytest.approx(expected, abs=2e-4)


def test_T066_order_of_the_batch_does_not_matter() -> None:
    batch = single_turn([1.0, 0, 0, 1], [1.0, 0], [0.0, 1, 1, 1])
    order = torch.randperm(10, generator=torch.Generator().manual_seed(3))
    shuffled = Returns(batch.returns[order], batch.group[order], batch.session[order])
    assert torch.equal(group_relative(shuffled), group_relative(batch)[order])


def test_T067_a_leftover_group_of_one_is_zero() -> None:
    ours = group_relative(single_turn([1.0, 2.0], [3.0]))
    assert ours.tolist() == pytest.approx([-1, 1, 0], abs=1e-5)
    assert ours[2] == 0
    assert group_relative(single_turn([7.0])).tolist() == [0.0]


@pytest.mark.parametrize("advantages", VARIANTS)
@pytest.mark.parametrize(("value", "n"), [(0.95, 8), (0.1, 8), (1 / 3, 7), (-12345.678, 5), (0.0, 4)])
def test_T068_equal_rewards_are_exactly_zero(advantages: object, value: float, n: int) -> None:
    assert advantages(single_turn([value] * n)).tolist() == [0.0] * n  # type: ignore[operator]


def test_T068_rewards_equal_up_to_float32_rounding_are_zero() -> None:
    third = torch.tensor(0.1) + torch.tensor(0.2)  # one unit in the last place beside 0.3
    batch = Returns(torch.stack([third, torch.tensor(0.3), third]), torch.zeros(3), torch.arange(3))
    assert group_relative(batch).tolist() == [0.0] * 3


def test_T069_population_deviation_and_singletons() -> None:
    ours = group_relative(single_turn([1.0, 1, 1, 0, 0, 0, 0, 0], [0.7]))
    assert ours[:8].tolist() == pytest.approx([1.2910] * 3 + [-0.7746] * 5, abs=1e-4)
    assert ours[8] == 0


def test_T069_leave_one_out_and_a_group_of_one() -> None:
    rloo = partial(relative, mean="group", std=None, leave_one_out=True)
    ours = rloo(single_turn([1.0, 1, 1, 0, 0, 0, 0, 0], [0.7]))
    assert ours[:8].tolist() == pytest.approx([0.7143] * 3 + [-0.4286] * 5, abs=1e-4)
    assert ours[8] == 0


@pytest.mark.parametrize("advantages", VARIANTS)
def test_T067_T069_a_singleton_is_zero_by_every_comparison(advantages: partial[torch.Tensor]) -> None:
    assert advantages(single_turn([7.0])).tolist() == [0.0]
    ours = advantages(single_turn([1.0, 2.0], [3.0]))
    assert ours.abs().max() < 3  # never 300000
    assert torch.isfinite(ours).all()


def naive_leave_one_out(returns: list[float], group: list[int], session: list[int]) -> list[float]:
    """Each return less the mean over the other sessions' means; alone: 0."""
    result = []
    for r, g, own in zip(returns, group, session, strict=True):
        turns = defaultdict(list)
        for value, other, s in zip(returns, group, session, strict=True):
            turns[s] += [value] if other == g and s != own else []
        means = [sum(t) / len(t) for t in turns.values() if t]
        result.append(r - sum(means) / len(means) if means else 0.0)
    return result


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=14))
def test_leave_one_out_is_the_definition(entries: list[tuple[int, int, int]]) -> None:
    returns, group = [value / 4 for value, _, _ in entries], [g for _, g, _ in entries]
    session = [10 * g + s for _, g, s in entries]
    batch = Returns(torch.tensor(returns, dtype=torch.float64), torch.tensor(group), torch.tensor(session))
    ours = relative(batch, mean="group", std=None, leave_one_out=True)
    assert ours.tolist() == pytest.approx(naive_leave_one_out(returns, group, session), abs=1e-12)


def test_the_group_mean_over_the_deviation_of_the_batch() -> None:
    """Lite PPO: rewards [1, 0] and [3, 1]: mean of the batch 1.25, deviation sqrt(4.75 / 4)."""
    ours = relative(single_turn([1.0, 0], [3.0, 1]), mean="group", std="batch")
    std = math.sqrt(sum((r - 1.25) ** 2 for r in (1, 0, 3, 1)) / 4)
    assert ours.tolist() == pytest.approx([0.5 / std, -0.5 / std, 1 / std, -1 / std], abs=1e-5)


def test_without_a_comparison_a_return_is_its_advantage() -> None:
    batch = single_turn([0.95] * 3, [0.5])
    assert torch.equal(relative(batch, mean=None, std=None), batch.returns)


def test_splitting_a_session_into_turns_changes_nothing() -> None:
    whole = group_relative(Returns(torch.tensor([1.0, 0, 0.5]), torch.zeros(3), torch.tensor([0, 1, 2])))
    split = Returns(torch.tensor([1.0, 1, 1, 1, 0, 0.5, 0.5]), torch.zeros(7), torch.tensor([0, 0, 0, 0, 1, 2, 2]))
    torch.testing.assert_close(group_relative(split), whole[[0, 0, 0, 0, 1, 2, 2]])


def test_one_session_of_different_turns_is_compared_with_nobody() -> None:
    batch = Returns(torch.tensor([1.0, 0.5, 0.25]), torch.zeros(3), torch.zeros(3))
    assert group_relative(batch).tolist() == batch_normalised(batch).tolist() == [0.0] * 3


def test_batch_normalised_is_one_group() -> None:
    batch = single_turn([1.0, 2, 4], [0.0, 1])
    one = Returns(batch.returns, torch.zeros(5), batch.session)
    torch.testing.assert_close(batch_normalised(batch), group_relative(one))
    assert batch_normalised(batch).square().mean() == pytest.approx(1, abs=1e-4)


def test_shapes_that_differ_are_named() -> None:
    with pytest.raises(ShapeError, match=r"\(2,\), \(3,\), \(2,\)"):
        group_relative(Returns(torch.zeros(2), torch.zeros(3), torch.zeros(2)))
