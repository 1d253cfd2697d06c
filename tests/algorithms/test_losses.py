"""The decoupled PPO-clip loss against its formula, and the reported ways to get it wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from areal.algorithms import LossInputs, LossSettings
from areal.algorithms.losses import decoupled_clip
from areal.algorithms.off_policy import Correction

SETTINGS = LossSettings(eps_clip=0.2, eps_clip_higher=0.2, correction=Correction(upper=5.0))


def inputs(new: list[float], prox: list[float], old: list[float], adv: list[float]) -> LossInputs:
    m = len(new)
    return LossInputs(
        logprobs=torch.tensor(new, requires_grad=True),
        proximal=torch.tensor(prox),
        behaviour=torch.tensor(old),
        advantages=torch.tensor(adv),
        weight=torch.full((m,), 1 / max(1, m)),
        interaction=torch.zeros(m, dtype=torch.long),
    )


def naive(new: float, prox: float, old: float, adv: float, s: LossSettings) -> float:
    if not s.use_decoupled_loss:
        prox = old
    ratio = math.exp(new - prox)
    clipped = min(max(ratio, 1 - s.eps_clip), 1 + s.eps_clip_higher)
    loss = max(-adv * ratio, -adv * clipped)
    if s.c_clip is not None and adv < 0:
        loss = min(loss, s.c_clip * abs(adv))
    weight = math.exp(prox - old)
    return loss * (weight if s.correction.upper is None else min(weight, s.correction.upper))


number = st.floats(-6, -0.01)
variants = st.builds(
    LossSettings,
    eps_clip=st.just(0.2),
    eps_clip_higher=st.sampled_from([0.2, 0.28]),
    c_clip=st.sampled_from([None, 3.0]),
    use_decoupled_loss=st.booleans(),
    correction=st.sampled_from([Correction(upper=None), Correction(upper=5.0)]),
)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(number, number, number, st.floats(-3, 3)), min_size=1, max_size=6), variants)
def test_the_loss_is_the_formula(tokens: list[tuple[float, float, float, float]], chosen: LossSettings) -> None:
    loss, _ = decoupled_clip(inputs(*(list(column) for column in zip(*tokens, strict=True))), chosen)
    expected = sum(naive(*token, chosen) for token in tokens) / len(tokens)
    assert loss.item() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_at_ratio_one_the_gradient_is_the_policy_gradient() -> None:
    batch = inputs([-1.0, -2.0], [-1.0, -2.0], [-1.0, -2.0], [1.0, -0.5])
    loss, stats = decoupled_clip(batch, SETTINGS)
    loss.backward()
    assert batch.logprobs.grad is not None
    torch.testing.assert_close(batch.logprobs.grad, -batch.advantages / 2)
    assert (stats["clip_ratio"].item(), stats["approx_kl"].item()) == (0.0, 0.0)


def test_the_behaviour_weight_is_capped_and_reported_before_the_cap() -> None:
    batch = inputs([-1.0, -1.0], [-1.0, -1.0], [-4.0, -1.0], [1.0, 1.0])
    loss, stats = decoupled_clip(batch, SETTINGS)
    assert loss.item() == pytest.approx(-(5 + 1) / 2)
    assert stats["behave_weight_max"].item() == pytest.approx(math.exp(3), rel=1e-5)
    assert stats["behave_weight_mean"].item() == pytest.approx(3)


def test_stats_and_loss_add_up_over_micro_batches() -> None:
    tokens = [[-1.0, -1.2, -3.0], [-1.5, -1.0, -3.0], [-1.4, -1.1, -2.5], [1.0, -1.0, 0.5]]
    whole = inputs(*tokens)
    loss, stats = decoupled_clip(whole, SETTINGS)
    parts = []
    for part in (slice(0, 1), slice(1, 3)):
        names = [name for name in LossInputs.__slots__ if getattr(whole, name) is not None]
        cut: dict[str, Tensor] = {name: getattr(whole, name)[part] for name in names}
        parts.append(decoupled_clip(LossInputs(**cut), SETTINGS))
    assert sum(p[0].item() for p in parts) == pytest.approx(loss.item())
    for name in stats.keys() - {"behave_weight_max"}:
        assert sum(p[1][name].item() for p in parts) == pytest.approx(stats[name].item())


def test_T072_T076_only_trained_tokens_are_in_the_inputs() -> None:
    """T076's rows after the mask: two live tokens at ratio 1. Fillers have no slot to leak from."""
    loss, stats = decoupled_clip(inputs([-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0], [1.0, 1.0]), SETTINGS)
    assert loss.item() == pytest.approx(-1.0)
    assert stats["behave_weight_mean"].item() == pytest.approx(1.0)
    assert stats["approx_kl"].item() == 0.0


def test_T077_a_huge_log_ratio_stays_finite_and_leaves_others_alone() -> None:
    batch = inputs([0.0, 100.0, -100.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 1.0])
    loss, stats = decoupled_clip(batch, SETTINGS)
    loss.backward()
    assert loss.item() == pytest.approx(-(1 + 0 + math.exp(-20)) / 3)
    assert batch.logprobs.grad is not None
    assert torch.isfinite(batch.logprobs.grad).all()
    assert batch.logprobs.grad[0].item() == pytest.approx(-1 / 3)
    assert all(torch.isfinite(value) for value in stats.values())


def test_T077_negative_advantage_with_huge_ratio_is_finite_with_and_without_dual_clip() -> None:
    batch = inputs([100.0], [0.0], [0.0], [-1.0])
    assert math.isfinite(decoupled_clip(batch, SETTINGS)[0].item())
    assert decoupled_clip(batch, replace(SETTINGS, c_clip=3.0))[0].item() == pytest.approx(3.0)


@pytest.mark.parametrize("where", ["logprobs", "proximal", "behaviour", "advantages"])
def test_T077_a_nan_input_is_not_hidden(where: str) -> None:
    batch = inputs([-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0], [1.0, 1.0])
    batch = replace(batch, **{where: torch.tensor([float("nan"), -1.0])})
    assert math.isnan(decoupled_clip(batch, SETTINGS)[0].item())


def test_an_empty_micro_batch_is_zero() -> None:
    loss, stats = decoupled_clip(inputs([], [], [], []), SETTINGS)
    assert loss.item() == 0
    assert stats["behave_weight_max"].item() == 0
