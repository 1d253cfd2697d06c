"""Rewards to advantages at tokens: the pipeline is applied once, and a session's split into rows changes nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.algorithms import ALGORITHMS, LossInputs, LossSettings
from areal.algorithms.reward_shaping import Shaping
from areal.base.types import Group, Span, Trajectory
from areal.engine.batch import loss_weights, pack
from areal.engine.credit import Credit, Scored
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


def test_T044_comparing_with_the_group_keeps_each_step_s_own_number() -> None:
    """Turns of one session with rewards of their own: the last one is not written over the others."""
    credit = Credit(ALGORITHMS["dr_grpo"])
    groups = groups_of([[[(1, -0.2, False), (1, 0.0, False), (1, 1.0, False)], [(1, 0.0, False)]]], concat=True)
    [first, second] = arrays(credit, groups)
    mean = ((-0.2 + 0.0 + 1.0) / 3 + 0.0) / 2
    assert first.advantages[first.trained].tolist() == pytest.approx([-0.2 - mean, -mean, 1.0 - mean], abs=1e-6)
    assert second.advantages[second.trained].tolist() == pytest.approx([-mean], abs=1e-6)


def per_token(groups: list[Group], values: list[float], masked: float) -> list[np.ndarray]:
    """An array [n] per row: these values at the trained tokens in order, `masked` elsewhere."""
    left = iter(values)
    return [
        np.array([next(left) if trained else masked for trained in row.trained], dtype=np.float32)
        for group in groups
        for row in group.trajectories
    ]


@pytest.mark.parametrize("masked", [0.0, 100.0, float("nan")])
def test_T071_values_at_masked_slots_change_nothing(masked: float) -> None:
    """Two turns in one row, the critic's values 0.1 .. 0.5 at their tokens and anything between; gamma 1, lambda 0.95."""
    credit = Credit(ALGORITHMS["ppo"], gae_lambda=0.95)
    groups = groups_of([[[(2, 1.0, False), (3, 0.5, False)]]], concat=True)
    scored = Scored(values=per_token(groups, [0.1, 0.2, 0.3, 0.4, 0.5], masked))
    [critic] = [decode_row(row) for row in credit.critic_rows(groups, scored)]
    advantages = [0.1 + 0.95 * 0.8, 0.8, 0.1 + 0.95 * (0.1 + 0.0), 0.1, 0.0]
    returns = [a + v for a, v in zip(advantages, [0.1, 0.2, 0.3, 0.4, 0.5], strict=True)]
    assert critic.advantages[critic.trained].tolist() == pytest.approx(returns, abs=1e-6)
    [policy] = [decode_row(row) for row in credit.rows(groups, scored)]
    centred = np.array(advantages) - np.mean(advantages)
    assert policy.advantages[policy.trained].tolist() == pytest.approx(
        (centred / np.std(advantages)).tolist(), abs=1e-4
    )


@pytest.mark.parametrize("concat", [True, False])
def test_a_critic_s_advantages_do_not_depend_on_rows(concat: bool) -> None:
    credit = Credit(ALGORITHMS["ppo"], gae_lambda=0.5, discount=0.9)
    groups = groups_of([[[(2, 1.0, False), (3, 0.5, False)], [(1, 0.0, False)]]], concat=concat)
    rows = credit.rows(groups, Scored(values=per_token(groups, [0.1, -0.2, 0.3, 0.4, -0.5, 0.2], 7.0)))
    found = [a for row in map(decode_row, rows) for a in row.advantages[row.trained]]
    gae = [0.9 * -0.2 - 0.1 + 0.45 * 1.2, 1.2]
    last = 0.5 + 0.5
    gae += [0.9 * 0.4 - 0.3 + 0.45 * (0.9 * -0.5 - 0.4 + 0.45 * last), 0.9 * -0.5 - 0.4 + 0.45 * last, last, -0.2]
    assert found == pytest.approx(((np.array(gae) - np.mean(gae)) / np.std(gae)).tolist(), abs=1e-4)


def test_kl_off_the_reward_is_counted_from_each_token_on_and_not_once_more_in_the_loss() -> None:
    """Behaviour log-probs are -1, the reference's -1.5, -0.5, -2: k1 = 0.5, -0.5, 1."""
    credit = Credit(ALGORITHMS["reinforce_plus_plus"], kl_in_reward=0.1, kl_estimator="k1")
    groups = groups_of([[[(2, 1.0, False)]], [[(1, 0.0, False)]]], concat=True)
    rows = [
        decode_row(r)
        for r in credit.rows(groups, Scored(reference=per_token(groups, [-1.5, -0.5, -2.0], float("nan"))))
    ]
    raw = np.array([1.0 - 0.1 * (0.5 - 0.5), 1.0 + 0.1 * 0.5, -0.1])
    expected = (raw - raw.mean()) / raw.std()
    found = [a for row in rows for a in row.advantages[row.trained]]
    assert found == pytest.approx(expected.tolist(), abs=1e-4)
    assert all(row.reference is None for row in rows)
    scored = Scored(reference=per_token(groups, [-1.5, -0.5, -2.0], float("nan")))
    assert credit.mean_kl_off_the_reward(groups, scored) == pytest.approx((0.5 - 0.5 + 1.0) / 3, abs=1e-6)
    assert Credit(ALGORITHMS["grpo"]).mean_kl_off_the_reward(groups, scored) is None


def test_a_reference_in_the_loss_and_a_teacher_travel_with_the_rows() -> None:
    groups = groups_of([[[(2, 1.0, False)], [(1, 0.0, False)]]], concat=True)
    arrays_of = per_token(groups, [-1.0, -2.0, -3.0], 0.0)
    rows = [
        decode_row(r) for r in Credit(ALGORITHMS["grpo"]).rows(groups, Scored(reference=arrays_of, teacher=arrays_of))
    ]
    for row, own in zip(rows, arrays_of, strict=True):
        assert row.reference is not None
        assert row.teacher is not None
        np.testing.assert_array_equal(row.reference, own)
        np.testing.assert_array_equal(row.teacher, own)


@pytest.mark.parametrize("masked", [10.0, 0.0, -1000.0])
def test_T072_a_sequence_s_advantage_is_over_its_trained_tokens_alone(masked: float) -> None:
    """Advantages 1, 1 at trained tokens, anything at masked ones; all ratios 1: loss -1, and the same gradient."""
    groups = groups_of([[[(2, 1.0, False)]]], concat=True)
    [sent] = Credit(ALGORITHMS["reinforce"]).rows(groups)
    row = decode_row(sent)
    poisoned = replace(row, advantages=np.where(row.trained, row.advantages, masked).astype(np.float32))
    [packed] = pack(loss_weights([poisoned], "sequence_mean"), max_tokens=64)
    logprobs = packed.behaviour.clone().requires_grad_()
    loss, _ = ALGORITHMS["gspo"].loss(
        LossInputs(logprobs, packed.behaviour, packed.behaviour, packed.advantages, packed.weight, packed.interaction),
        LossSettings(eps_clip=0.2),
    )
    loss.backward()
    assert loss.item() == pytest.approx(-1.0)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-0.5, -0.5])
