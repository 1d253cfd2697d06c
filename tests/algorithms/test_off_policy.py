"""Corrections for stale tokens against their definitions: bounds per token and per answer, log-linear proximal, M2PO's mask."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.algorithms.kl import KL_ESTIMATORS
from areal.algorithms.off_policy import Correction, behaviour_weights, loglinear, second_moment_mask

number = st.floats(-6, -0.01)
answers = st.lists(st.lists(st.tuples(number, number), min_size=1, max_size=4), min_size=1, max_size=4)
RULES = [
    Correction(level, action, metric, agg, upper, lower)  # type: ignore[arg-type]
    for level, action, metric, agg, upper, lower in product(
        ("token", "sequence"),
        ("clamp", "mask"),
        ("ratio", "kl_k1", "kl_k2", "kl_k3"),
        ("mean", "sum", "max"),
        (2.0, None),
        (0.5, None),
    )
    if action == "mask" or metric == "ratio"
]


def naive(tokens: list[tuple[float, float]], rule: Correction) -> list[float]:
    """Weights of one answer's tokens (proximal, behaviour)."""
    logs = [p - b for p, b in tokens]
    kl = {"kl_k1": lambda d: -d, "kl_k2": lambda d: d * d / 2, "kl_k3": lambda d: math.exp(d) - 1 - d}
    measured = [kl[rule.metric](d) if rule.metric in kl else d for d in logs]
    if rule.level == "sequence":
        whole = {"mean": sum(measured) / len(measured), "sum": sum(measured), "max": max(measured)}[rule.agg]
        measured = [whole] * len(tokens)
    if rule.metric == "ratio":
        measured = [math.exp(max(-20.0, min(20.0, m))) for m in measured]
    low, high = (-math.inf if rule.lower is None else rule.lower), (math.inf if rule.upper is None else rule.upper)
    if rule.action == "clamp":
        return [min(high, max(low, m)) for m in measured]
    return [math.exp(d) if low <= m <= high else 0.0 for d, m in zip(logs, measured, strict=True)]


@settings(deadline=None, max_examples=150)
@given(answers, st.sampled_from(RULES))
def test_weights_are_their_definition(batch: list[list[tuple[float, float]]], rule: Correction) -> None:
    flat = [token for answer in batch for token in answer]
    ids = torch.tensor([number for number, answer in enumerate(batch) for _ in answer])
    proximal, behaviour = torch.tensor(flat, dtype=torch.float64).T
    weight, raw, kept = behaviour_weights(proximal, behaviour, ids, rule)
    expected = [w for answer in batch for w in naive(answer, rule)]
    bounds = [b for b in (rule.lower, rule.upper) if b is not None]
    if not any(abs(w - b) < 1e-9 for w in expected for b in bounds):  # on the bound itself rounding decides
        assert weight.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert raw.tolist() == pytest.approx([math.exp(p - b) for p, b in flat])
    assert (weight[~kept] == 0).all()


def test_the_order_of_the_tokens_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    proximal, behaviour = torch.randn(2, 9, generator=generator).double()
    ids, order = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2]), torch.randperm(9, generator=generator)
    for rule in RULES:
        whole = behaviour_weights(proximal, behaviour, ids, rule)[0]
        shuffled = behaviour_weights(proximal[order], behaviour[order], ids[order], rule)[0]
        torch.testing.assert_close(shuffled, whole[order])


@pytest.mark.parametrize("rule", [Correction(), Correction("sequence", "mask", "kl_k3", "max", 0.1)])
def test_T077_a_nan_is_not_hidden_by_a_bound(rule: Correction) -> None:
    weight, _, _ = behaviour_weights(
        torch.tensor([float("nan"), -1.0]), torch.tensor([-1.0, -1.0]), torch.arange(2), rule
    )
    assert math.isnan(weight[0])
    assert weight[1] == 1


@settings(deadline=None)
@given(st.lists(st.tuples(number, number, st.integers(0, 5)), min_size=1, max_size=5), st.integers(5, 9))
def test_loglinear_is_between_the_versions(tokens: list[tuple[float, float, int]], step: int) -> None:
    behaviour, logprobs, lags = (list(column) for column in zip(*tokens, strict=True))
    old, now = torch.tensor([behaviour, logprobs], dtype=torch.float64)
    ours = loglinear(old, now, torch.tensor(lags))
    for b, new, lag, got in zip(behaviour, logprobs, lags, ours.tolist(), strict=True):
        v_behave, v_proximal, v_theta = step - lag, step, step + 1
        alpha = (v_proximal - v_behave) / (v_theta - v_behave)
        assert got == pytest.approx(b + alpha * (new - b), rel=1e-9)


def test_a_fresh_token_keeps_its_recorded_log_prob() -> None:
    ours = loglinear(torch.tensor([-1.25]), torch.tensor([-9.0], requires_grad=True), torch.tensor([0]))
    assert ours.tolist() == [-1.25]
    assert not ours.requires_grad


def naive_mask(squares: list[float], threshold: float) -> list[bool]:
    kept = sorted(range(len(squares)), key=lambda i: (squares[i], i))
    while len(kept) > 1 and sum(squares[i] for i in kept) / len(kept) > threshold:
        kept.pop()
    return [i in kept for i in range(len(squares))]


@settings(deadline=None)
@given(st.lists(st.floats(-2, 2), min_size=1, max_size=12), st.sampled_from([0.04, 0.5, 4.0]))
def test_m2po_leaves_out_the_largest_until_the_mean_is_small(gaps: list[float], threshold: float) -> None:
    ours = second_moment_mask(torch.tensor(gaps, dtype=torch.float64), torch.zeros(len(gaps)).double(), threshold)
    assert ours.tolist() == naive_mask([g * g for g in gaps], threshold)
    assert ours.any()


def test_no_tokens_no_mask() -> None:
    assert second_moment_mask(torch.zeros(0), torch.zeros(0), 0.04).tolist() == []


def test_kl_estimators_are_their_formulas_and_finite() -> None:
    d = torch.tensor([0.0, 0.5, -0.5], dtype=torch.float64)
    assert KL_ESTIMATORS["k1"](d).tolist() == [0.0, 0.5, -0.5]
    assert KL_ESTIMATORS["k2"](d).tolist() == [0.0, 0.125, 0.125]
    assert KL_ESTIMATORS["k3"](d).tolist() == pytest.approx([0, math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5], abs=1e-12)
    assert torch.isfinite(KL_ESTIMATORS["k3"](torch.tensor([-1e4]))).all()
    assert math.isnan(KL_ESTIMATORS["k3"](torch.tensor(float("nan"))))


def test_kl_estimators_agree_on_the_true_divergence() -> None:
    """In the mean over p, k1 and k3 are exactly KL(p | q); k2 is near it."""
    p, q = torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.35, 0.25]], dtype=torch.float64)
    true = (p * (p / q).log()).sum().item()
    d = (p / q).log()
    assert (p * KL_ESTIMATORS["k1"](d)).sum().item() == pytest.approx(true, rel=1e-12)
    assert (p * KL_ESTIMATORS["k3"](d)).sum().item() == pytest.approx(true, rel=1e-12)
    assert (p * KL_ESTIMATORS["k2"](d)).sum().item() == pytest.approx(true, rel=0.1)
