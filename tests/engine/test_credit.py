"""Rewards to advantages at tokens: the pipeline is applied once, and a session's split into rows changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.algorithms import ALGORITHMS
from areal.algorithms.reward_shaping import Shaping
from areal.base.types import Group, Span, Trajectory
from areal.engine.batch import loss_weights
from areal.engine.credit import Credit
from areal.engine.rows import RowArrays, decode_row

Turn = tuple[int, float, bool]  # tokens sampled, return, cut off


def row(session: str, turns: list[tuple[int, Turn]]) -> Trajectory:
    """One row with these turns, each after two prompt tokens: (number of the turn, turn)."""
    trained: list[bool] = []
    spans = []
    for number, (tokens, reward, truncated) in turns:
        start = len(trained) + 2
        trained += [False, False, *[True] * tokens]
        spans.append(Span(f"{session}-{number}", start, start + tokens, reward, reward, True, truncated))
    mask, n = np.array(trained), len(trained)
    return Trajectory(
        "task", session, np.arange(n, dtype=np.int32), mask, np.where(mask, -1, 0).astype(np.float32),
        np.where(mask, 0, -1).astype(np.int32), np.ones(n, np.float32), tuple(spans),
    )  # fmt: skip


def groups_of(sessions: list[list[list[Turn]]], *, concat: bool) -> list[Group]:
    found = []
    for g, group in enumerate(sessions):
        rows = []
        for s, turns in enumerate(group):
            numbered = list(enumerate(turns))
            rows += [row(f"{g}-{s}", numbered)] if concat else [row(f"{g}-{s}", [turn]) for turn in numbered]
        found.append(Group(str(g), "task", tuple(rows)))
    return found


def arrays(credit: Credit, groups: list[Group]) -> list[RowArrays]:
    return [decode_row(each) for each in credit.rows(groups)]


def totals(rows: list[RowArrays], aggregation: str) -> dict[tuple[str, int], tuple[float, float]]:
    """Per session and advantage-bearing interaction: its weight in the loss, and its advantage."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for each in loss_weights(rows, aggregation, fixed_length=16):
        assert each.weight is not None
        assert each.interactions is not None
        for t in np.flatnonzero(each.trained):
            key = (each.session_id, int(each.interactions[t]))
            found.setdefault(key, []).append((float(each.weight[t]), float(each.advantages[t])))
    return {key: (sum(w for w, _ in parts), parts[0][1]) for key, parts in found.items()}


turn = st.tuples(st.integers(1, 3), st.sampled_from([0.0, 0.5, 1.0]), st.booleans())
batches = st.lists(st.lists(st.lists(turn, min_size=1, max_size=3), min_size=1, max_size=3), min_size=1, max_size=3)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@settings(deadline=None, max_examples=15)
@given(sessions=batches)
def test_a_rollout_weighs_the_same_in_however_many_rows_it_stands(
    name: str, aggregation: str, sessions: list[list[list[Turn]]]
) -> None:
    credit = Credit(ALGORITHMS[name], Shaping(mask_truncated=True, overlong_tokens=2, overlong_limit=4))
    split, whole = (totals(arrays(credit, groups_of(sessions, concat=c)), aggregation) for c in (False, True))
    assert split.keys() == whole.keys()
    for key in split:
        assert split[key] == pytest.approx(whole[key], rel=1e-5)


def test_the_pipeline_comes_before_the_comparison() -> None:
    """Truncated, scaled and clipped first: returns 10 * (1 - 0.5) = 5, clipped to 4, against 0."""
    credit = Credit(ALGORITHMS["dr_grpo"], Shaping(scaling=10.0, bias=-0.5, clip=4.0, mask_truncated=True))
    rows = arrays(credit, groups_of([[[(1, 1.0, False)], [(2, 1.0, True)]]], concat=True))
    assert [r.advantages[r.trained].tolist() for r in rows] == [[2.0], [-2.0, -2.0]]


def test_T076_nan_in_masked_slots_changes_no_advantage() -> None:
    clean = groups_of([[[(2, 1.0, False)], [(1, 0.0, False)]]], concat=True)
    dirty = [
        Group(g.id, g.task_id, tuple(
            Trajectory(t.task_id, t.session_id, t.token_ids, t.trained, np.where(t.trained, t.logprobs, np.nan).astype(np.float32),
                       t.versions, np.where(t.trained, 1, np.nan).astype(np.float32), t.spans)
            for t in g.trajectories))
        for g in clean
    ]  # fmt: skip
    credit = Credit(ALGORITHMS["reinforce_plus_plus"])
    for ours, theirs in zip(arrays(credit, dirty), arrays(credit, clean), strict=True):
        np.testing.assert_array_equal(ours.advantages, theirs.advantages)


def test_whitening_is_over_tokens() -> None:
    credit = Credit(ALGORITHMS["reinforce_plus_plus"])
    rows = arrays(credit, groups_of([[[(3, 1.0, False)]], [[(1, 0.0, False)]]], concat=True))
    std = np.sqrt(3) / 4
    assert rows[0].advantages[rows[0].trained].tolist() == pytest.approx([0.25 / std] * 3, abs=1e-4)
    assert rows[1].advantages[rows[1].trained].tolist() == pytest.approx([-0.75 / std], abs=1e-4)


def test_a_group_of_equals_says_nothing() -> None:
    credit = Credit(ALGORITHMS["dapo"], Shaping(mask_truncated=True))
    [equal] = groups_of([[[(1, 1.0, False)], [(2, 1.0, False)]]], concat=True)
    [different] = groups_of([[[(1, 1.0, False)], [(2, 1.0, True)]]], concat=True)
    assert not credit.informative(equal)
    assert credit.informative(different)
