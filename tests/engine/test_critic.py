"""The engine in its other roles: frozen nets that score, a critic that learns values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from areal.base.errors import CheckpointError, ConfigError, TrainingError
from areal.engine.checkpoint_files import critic_beside
from areal.engine.commands import Row
from areal.engine.engine import TrainEngine
from areal.engine.rows import decode_row

MakeEngine = Callable[..., TrainEngine]
MakeRow = Callable[..., Row]
GroupRows = Callable[..., list[Row]]


def with_fields(row: Row, **changes: bytes) -> Row:
    return Row(**({name: getattr(row, name) for name in Row.__struct_fields__} | changes))


def targets_of(engine: TrainEngine, rows: list[Row], target: float) -> list[Row]:
    """The critic's rows: `target` to predict at every token, its present values as the old ones."""
    return [
        with_fields(
            row,
            advantages=np.where(decode_row(row).trained, target, 0).astype("<f4").tobytes(),
            proximal=values.astype("<f4").tobytes(),
        )
        for row, values in zip(rows, engine.score(rows), strict=True)
    ]


def test_a_critic_starts_at_zero_and_learns_its_returns(make_engine: MakeEngine, group_rows: GroupRows) -> None:
    critic, rows = make_engine(role="critic", eps_clip=0.5), group_rows()
    assert all((values == 0).all() for values in critic.score(rows))
    errors = [critic.train_step(targets_of(critic, rows, 0.8), step, step)["value_error"] for step in range(8)]
    assert errors[0] == pytest.approx(0.8)
    assert errors[-1] < 0.4
    trained = [decode_row(row).trained for row in rows]
    assert all((values[~mask] == 0).all() for values, mask in zip(critic.score(rows), trained, strict=True))


def test_a_value_stands_before_its_token(make_engine: MakeEngine, make_row: MakeRow) -> None:
    """The value at position t depends on the tokens before t and not on token t."""
    critic = make_engine(role="critic")
    critic.train_step(targets_of(critic, [make_row([5, 6, 7, 8], [2, 3])], 1.0), 0, 0)
    one, other = critic.score([make_row([5, 6, 7, 8], [2, 3]), make_row([5, 6, 7, 9], [2, 3])])
    np.testing.assert_allclose(one[2:], other[2:], atol=1e-6)
    assert one[2] != one[3]


def test_the_value_clip_holds_back_what_has_moved_enough(make_engine: MakeEngine, group_rows: GroupRows) -> None:
    critic, rows = make_engine(role="critic", eps_clip=0.01), group_rows()
    stale = targets_of(critic, rows, 1.0)
    for step in range(3):
        stats = critic.train_step(stale, step, step)
    assert stats["clip_ratio"] > 0.5


def test_a_critic_resumes_bit_equal(make_engine: MakeEngine, group_rows: GroupRows, tmp_path: Path) -> None:
    rows, path = group_rows(), str(tmp_path / "critic-000001")
    critic = make_engine(role="critic")
    critic.train_step(targets_of(critic, rows, 1.0), 0, 0)
    critic.save(path, step=1, full=True)
    resumed = make_engine(role="critic")
    assert resumed.restore(path) == {"step": 1, "optimizer_steps": 1, "dtype": "float32"}
    for engine in (critic, resumed):
        engine.train_step(targets_of(engine, rows, 1.0), 1, 1)
    ours, theirs = dict(resumed.named_tensors()), dict(critic.named_tensors())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_policy_s_checkpoint_is_no_critic_s(make_engine: MakeEngine, tmp_path: Path) -> None:
    make_engine().save(str(tmp_path / "step-000001"), step=1, full=True)
    with pytest.raises(ConfigError, match="belongs to another model"):
        make_engine(role="critic").restore(str(tmp_path / "step-000001"))
    with pytest.raises(CheckpointError, match="critic-000001 is no complete checkpoint"):
        make_engine(role="critic").restore(str(critic_beside(tmp_path / "step-000001")))


def test_T075_a_frozen_net_scores_as_the_policy_would_at_the_row_s_temperature_and_cannot_be_trained(
    make_engine: MakeEngine, group_rows: GroupRows
) -> None:
    frozen, policy, rows = make_engine(role="frozen"), make_engine(), group_rows()
    for ours, theirs in zip(frozen.score(rows), policy.score(rows), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(ConfigError, match="is frozen; it scores"):
        frozen.train_step(rows, 0, 0)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_in_the_loss_pulls_back_to_the_reference(
    make_engine: MakeEngine, group_rows: GroupRows, estimator: str
) -> None:
    """No advantage at all: the rows are trained all the same, and the KL sinks."""
    reference, rows = make_engine(role="frozen"), group_rows()
    engine = make_engine(kl_ctl=1.0, kl_estimator=estimator, optimizer={"lr": 2e-3})
    with torch.no_grad():
        for _, parameter in engine.policy.trained_parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(parameter))))
    scored = reference.score(rows)
    pulled = [
        with_fields(row, advantages=b"", reference=own.astype("<f4").tobytes())
        for row, own in zip(rows, scored, strict=True)
    ]
    stats = [engine.train_step(pulled, step, step) for step in range(6)]
    assert stats[0]["updates"] == 1
    assert stats[-1]["ref_kl"] < 0.7 * stats[0]["ref_kl"]


def test_a_reference_equal_to_the_policy_is_no_distance(make_engine: MakeEngine, group_rows: GroupRows) -> None:
    engine, rows = make_engine(kl_ctl=0.1), group_rows()
    same = [
        with_fields(row, reference=own.astype("<f4").tobytes())
        for row, own in zip(rows, engine.score(rows), strict=True)
    ]
    stats, plain = engine.train_step(same, 0, 0), make_engine().train_step(rows, 0, 0)
    assert stats["ref_kl"] == pytest.approx(0, abs=1e-6)
    assert stats["loss"] == pytest.approx(plain["loss"], abs=1e-6)


def test_a_nan_of_another_net_names_the_session(make_engine: MakeEngine, group_rows: GroupRows) -> None:
    engine, rows = make_engine(kl_ctl=0.1), group_rows()
    n = len(rows[3].ids) // 4
    rows = [with_fields(row, reference=np.zeros(len(row.ids) // 4, "<f4").tobytes()) for row in rows]
    rows[3] = with_fields(rows[3], reference=np.full(n, np.nan, "<f4").tobytes())
    with pytest.raises(TrainingError, match=f"session {rows[3].session_id}: reference of trained token"):
        engine.train_step(rows, 0, 0)
    critic = make_engine(role="critic")
    with torch.no_grad():
        critic.policy.value_head.bias.fill_(float("nan"))
    with pytest.raises(TrainingError, match=r"session task\d-\d: the critic's value of token \d+ is nan"):
        critic.score(group_rows())


def test_distillation_moves_towards_the_teacher(make_engine: MakeEngine, group_rows: GroupRows) -> None:
    """All continuations of one prompt, weighed as the policy samples them, would be exact; here the sampled ones must come nearer."""
    teacher, rows = make_engine(role="frozen"), group_rows(turns=False)
    student = make_engine(algorithm="distill", rl_loss_weight=0.0, distill_loss_weight=1.0, optimizer={"lr": 1e-3})
    with torch.no_grad():
        for _, parameter in student.policy.trained_parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(parameter))))
    graded = teacher.score(rows)

    def gap() -> float:
        own = student.score(rows)
        return float(
            np.mean([abs(a - b)[decode_row(r).trained].mean() for a, b, r in zip(own, graded, rows, strict=True)])
        )

    before = gap()
    for step in range(6):
        sampled = [
            with_fields(row, advantages=b"", logprobs=own.astype("<f4").tobytes(), teacher=t.astype("<f4").tobytes())
            for row, own, t in zip(rows, student.score(rows), graded, strict=True)
        ]
        assert student.train_step(sampled, step, step)["updates"] == 1
    assert gap() < 0.8 * before
