"""Trajectories and advantages become rows: each interaction's number at its own trained tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from areal.base.errors import ShapeError, TrainingError
from areal.base.types import Group, Span, Trajectory
from areal.engine.rows import decode_row, interaction_returns, to_rows


def trajectory(session: str, *spans: Span, n: int = 12, trained: list[int] | None = None) -> Trajectory:
    mask = np.zeros(n, dtype=np.bool_)
    for span in spans:
        mask[span.start : span.end] = span.trained
    if trained is not None:
        mask[:] = False
        mask[trained] = True
    return Trajectory(
        task_id="task",
        session_id=session,
        token_ids=np.arange(n, dtype=np.int32),
        trained=mask,
        logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        versions=np.where(mask, 4, -1).astype(np.int32),
        temperatures=np.ones(n, dtype=np.float32),
        spans=spans,
    )


def span(name: str, start: int, end: int, reward: float, trained: bool = True) -> Span:
    return Span(name, start, end, raw_reward=reward, reward=reward, trained=trained)


GROUPS = [
    Group(
        "g0",
        "task",
        (trajectory("a", span("a1", 3, 5, 1.0), span("a2", 8, 11, 0.5)), trajectory("b", span("b1", 3, 6, 0.0))),
    ),
    Group("g1", "task", (trajectory("c", span("c1", 2, 4, 2.0, trained=False), span("c2", 6, 7, 3.0)),)),
]


def test_one_return_per_trained_interaction() -> None:
    returns = interaction_returns(GROUPS)
    assert returns.keys == (("a", "a1"), ("a", "a2"), ("b", "b1"), ("c", "c2"))
    assert returns.returns.tolist() == [1.0, 0.5, 0.0, 3.0]
    assert returns.group.tolist() == [0, 0, 0, 1]
    assert returns.session.tolist() == [0, 0, 1, 2]


def test_each_advantage_stands_at_its_own_tokens() -> None:
    returns = interaction_returns(GROUPS)
    rows = [decode_row(row) for row in to_rows(GROUPS, returns, np.array([1, 2, 3, 4], dtype=np.float32))]
    assert [row.sequence for row in rows] == [0, 1, 2]
    assert rows[0].advantages.tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 2, 2, 2, 0]
    assert rows[1].advantages.tolist() == [0, 0, 0, 3, 3, 3] + [0] * 6
    assert rows[2].advantages.tolist() == [0] * 6 + [4] + [0] * 5
    for row, original in zip(rows, [t for g in GROUPS for t in g.trajectories], strict=True):
        for name in ("trained", "logprobs", "versions", "temperatures"):
            np.testing.assert_array_equal(getattr(row, name), getattr(original, name))
        np.testing.assert_array_equal(row.ids, original.token_ids)


def test_an_interaction_shown_by_two_rows_counts_once() -> None:
    shown_again = trajectory("a", span("a1", 3, 5, 1.0, trained=False), span("a3", 6, 8, 0.2))
    group = Group("g0", "task", (*GROUPS[0].trajectories, shown_again))
    returns = interaction_returns([group])
    assert returns.keys == (("a", "a1"), ("a", "a2"), ("b", "b1"), ("a", "a3"))
    rows = [decode_row(row) for row in to_rows([group], returns, np.arange(1, 5, dtype=np.float32))]
    assert [row.sequence for row in rows] == [0, 1, 0]
    assert rows[2].advantages.tolist() == [0] * 6 + [4, 4] + [0] * 4


def test_wholly_masked_interactions_and_rows_are_left_out() -> None:
    masked = trajectory("old", span("o1", 3, 5, 9.0), span("o2", 7, 9, 8.0), trained=[7, 8])
    nothing = trajectory("gone", span("n1", 3, 5, 9.0), trained=[])
    group = Group("g", "task", (masked, nothing))
    returns = interaction_returns([group])
    assert returns.keys == (("old", "o2"),)
    [row] = to_rows([group], returns, np.array([1.5], dtype=np.float32))
    assert decode_row(row).advantages.tolist() == [0] * 7 + [1.5, 1.5] + [0] * 3


def test_a_nan_reward_or_a_homeless_token_names_its_session() -> None:
    returns = interaction_returns(GROUPS)
    with pytest.raises(TrainingError, match="session b: trained token 3 has no advantage"):
        to_rows(GROUPS, returns, np.array([1, 1, np.nan, 1], dtype=np.float32))
    stray = replace(GROUPS[0].trajectories[1], trained=np.ones(12, dtype=np.bool_))
    with pytest.raises(TrainingError, match="session b: trained token 0 has no advantage"):
        to_rows([Group("g", "t", (stray,))], interaction_returns([Group("g", "t", (stray,))]), np.zeros(1, np.float32))


def test_advantages_of_another_batch_are_refused() -> None:
    with pytest.raises(ShapeError, match="advantages for 4 interactions"):
        to_rows(GROUPS, interaction_returns(GROUPS), np.zeros(3, dtype=np.float32))
