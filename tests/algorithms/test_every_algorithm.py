"""Each algorithm's loss against its formula, token by token in Python's floats; and the keys each honours against what it computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.algorithms import ALGORITHMS, LossInputs, LossSettings, Returns
from areal.algorithms.kl import KL_ESTIMATORS
from areal.algorithms.off_policy import Correction
from areal.algorithms.ppo import CRITIC
from areal.base.errors import TrainingError
from areal.config.algorithms import GENERAL, TRAITS

Token = tuple[float, float, float, float]  # log-probs: new, proximal, behaviour; advantage
Answer = list[Token]

log_prob = st.floats(-4, -0.01)
answers = st.lists(
    st.lists(st.tuples(log_prob, log_prob, log_prob, st.floats(-2, 2)), min_size=1, max_size=4), min_size=1, max_size=4
)
CAP = 5.0
TEACHER = -1.2


def inputs(batch: list[Answer], reference: float | None = None) -> LossInputs:
    flat = torch.tensor([token for answer in batch for token in answer], dtype=torch.float64)
    new, proximal, behaviour, advantages = flat.T
    m = len(flat)
    return LossInputs(
        logprobs=new.clone().requires_grad_(),
        proximal=proximal,
        behaviour=behaviour,
        advantages=advantages,
        weight=torch.full((m,), 1 / m, dtype=torch.float64),
        interaction=torch.tensor([number for number, answer in enumerate(batch) for _ in answer]),
        reference=None if reference is None else torch.full((m,), reference, dtype=torch.float64),
        teacher=torch.full((m,), TEACHER, dtype=torch.float64),
    )


def settings_of(name: str, **changes: Any) -> LossSettings:
    """The algorithm's own values, as config/algorithms.py resolves them."""
    own = {"eps_clip": 0.2} | dict(TRAITS[name].own)
    own = {key: value for key, value in own.items() if key in LossSettings.__slots__}
    return LossSettings(**({"eps_clip_higher": own["eps_clip"]} | own | changes))


def bounded(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def clip(r: float, a: float, s: LossSettings) -> float:
    return max(-a * r, -a * bounded(r, 1 - s.eps_clip, 1 + s.eps_clip_higher))


def ppo(answer: Answer, s: LossSettings) -> list[float]:
    return [min(math.exp(p - b), CAP) * clip(math.exp(new - p), a, s) for new, p, b, a in answer]


def gradient(answer: Answer, s: LossSettings) -> list[float]:
    return [min(math.exp(p - b), CAP) * -a * math.exp(new - p) for new, p, b, a in answer]


def gspo(answer: Answer, s: LossSettings) -> list[float]:
    ratio = math.exp(sum(new - p for new, p, _, _ in answer) / len(answer))
    advantage = sum(a for *_, a in answer) / len(answer)
    return [min(math.exp(p - b), CAP) * clip(ratio, advantage, s) for _, p, b, _ in answer]


def cispo(answer: Answer, s: LossSettings) -> list[float]:
    return [
        min(math.exp(p - b), CAP) * -bounded(math.exp(new - p), 1 - s.eps_clip, 1 + s.eps_clip_higher) * a * new
        for new, p, b, a in answer
    ]


def sapo(answer: Answer, s: LossSettings) -> list[float]:
    taus = [s.sapo_tau_pos if a > 0 else s.sapo_tau_neg for *_, a in answer]
    ratios = [math.exp(new - b) for new, _, b, _ in answer]
    return [-a * 4 / t / (1 + math.exp(-t * (r - 1))) for (*_, a), t, r in zip(answer, taus, ratios, strict=True)]


def distill(answer: Answer, s: LossSettings) -> list[float]:
    towards = [min(math.exp(p - b), CAP) * math.exp(new - p) * (new - TEACHER) for new, p, b, _ in answer]
    rewarded = ppo(answer, s)
    return [s.rl_loss_weight * r + s.distill_loss_weight * t for r, t in zip(rewarded, towards, strict=True)]


NAIVE: dict[str, Callable[[Answer, LossSettings], list[float]]] = {
    **dict.fromkeys(("ppo", "grpo", "dr_grpo", "lite_ppo", "rloo", "reinforce_plus_plus", "dapo"), ppo),
    **dict.fromkeys(("reinforce", "reinforce_baseline", "m2po"), gradient),
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "distill": distill,
}


def test_every_algorithm_has_a_twin() -> None:
    assert set(NAIVE) == set(ALGORITHMS)


@pytest.mark.parametrize("name", sorted(NAIVE))
@settings(deadline=None, max_examples=40)
@given(batch=answers)
def test_the_loss_is_the_formula(name: str, batch: list[Answer]) -> None:
    chosen = settings_of(name)
    loss, _ = ALGORITHMS[name].loss(inputs(batch), chosen)
    terms = [term for answer in batch for term in NAIVE[name](answer, chosen)]
    assert loss.item() == pytest.approx(sum(terms) / len(terms), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", sorted(NAIVE))
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_to_a_reference_is_added(name: str, estimator: str) -> None:
    batch = [[(-1.0, -1.0, -1.0, 1.0), (-2.0, -2.0, -2.0, 1.0)]]
    chosen = settings_of(name, kl_ctl=0.1, kl_estimator=estimator)
    loss, stats = ALGORITHMS[name].loss(inputs(batch, reference=-1.5), chosen)
    d = (0.5, -0.5)
    naive = {"k1": d, "k2": [x * x / 2 for x in d], "k3": [math.exp(-x) - 1 + x for x in d]}[estimator]
    assert stats["ref_kl"].item() == pytest.approx(sum(naive) / 2, abs=1e-12)
    without = ALGORITHMS[name].loss(inputs(batch), chosen)[0]
    assert (loss - without).item() == pytest.approx(0.1 * sum(naive) / 2, abs=1e-12)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_T077_no_token_is_pushed_further_from_the_reference(estimator: str) -> None:
    difference = torch.linspace(-60, 60, 121, requires_grad=True)
    KL_ESTIMATORS[estimator](difference).sum().backward()
    assert difference.grad is not None
    assert torch.isfinite(difference.grad).all()
    assert (difference.grad * difference.detach() >= 0).all()


@pytest.mark.parametrize("name", sorted(NAIVE))
def test_at_the_start_every_gradient_is_the_policy_gradient(name: str) -> None:
    """Fresh tokens, no step yet: all ratios are 1, and d loss / d log pi = -A / m. (gspo shares its advantage in an answer.)"""
    batch = [[(-1.0, -1.0, -1.0, 0.7)], [(-2.0, -2.0, -2.0, -0.4), (-0.5, -0.5, -0.5, -0.4)]]
    given_inputs = inputs(batch)
    given_inputs = replace(given_inputs, teacher=given_inputs.logprobs.detach())
    ALGORITHMS[name].loss(given_inputs, settings_of(name))[0].backward()
    assert given_inputs.logprobs.grad is not None
    torch.testing.assert_close(given_inputs.logprobs.grad, -given_inputs.advantages / 3)


@pytest.mark.parametrize("name", sorted(NAIVE))
def test_T073_losses_and_stats_add_up_over_micro_batches(name: str) -> None:
    generator = torch.Generator().manual_seed(4)
    batch = [[tuple(x) for x in (-torch.rand(n, 4, generator=generator) * 3).tolist()] for n in (1, 3, 2)]
    whole, chosen = inputs(batch), settings_of(name)  # type: ignore[arg-type]
    loss, stats = ALGORITHMS[name].loss(whole, chosen)
    fields = [field for field in LossInputs.__slots__ if getattr(whole, field) is not None]
    parts = [
        ALGORITHMS[name].loss(LossInputs(**{field: getattr(whole, field)[part] for field in fields}), chosen)
        for part in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    assert sum(part.item() for part, _ in parts) == pytest.approx(loss.item(), rel=1e-12)
    for key in stats.keys() - {"behave_weight_max"}:
        assert sum(found[key].item() for _, found in parts) == pytest.approx(stats[key].item(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", sorted(NAIVE))
def test_T077_huge_log_ratios_stay_finite_and_a_nan_shows(name: str) -> None:
    far = [
        [(-0.1, -0.1, -0.1, 1.0)],
        [(-0.1, -200.0, -0.1, 0.0)],
        [(-200.0, -0.1, -0.1, 1.0)],
        [(-0.1, -0.1, -300.0, -1.0)],
    ]
    given_inputs = inputs(far)
    ALGORITHMS[name].loss(given_inputs, settings_of(name))[0].backward()
    assert given_inputs.logprobs.grad is not None
    assert torch.isfinite(given_inputs.logprobs.grad).all()
    for field in ("logprobs", "behaviour", "advantages"):
        values = getattr(given_inputs, field).detach().clone()
        values[0] = math.nan
        broken = replace(given_inputs, **{field: values})
        assert math.isnan(ALGORITHMS[name].loss(broken, settings_of(name))[0].item())


# For each key, another value for the loss's settings.
OTHER: dict[str, dict[str, Any]] = {
    "eps_clip": {"eps_clip": 0.05},
    "eps_clip_higher": {"eps_clip_higher": 0.11},
    "c_clip": {"c_clip": 1.01},
    "use_decoupled_loss": {"use_decoupled_loss": False},
    "rejection_sampling": {"correction": Correction(action="mask", upper=1.5)},
    "sapo_tau_pos": {"sapo_tau_pos": 3.0},
    "sapo_tau_neg": {"sapo_tau_neg": 3.0},
}


@pytest.mark.parametrize("key", sorted(OTHER))
@pytest.mark.parametrize("name", sorted(NAIVE))
def test_a_key_changes_the_loss_where_and_only_where_it_is_honoured(name: str, key: str) -> None:
    """So that config/algorithms.py refuses exactly the keys that would be ignored. (A key that an algorithm fixes is refused too.)"""
    generator = torch.Generator().manual_seed(1)
    columns = torch.rand(60, 4, generator=generator) * torch.tensor([-3.0, -3.0, -3.0, 4.0]) - torch.tensor(
        [0, 0, 0, 2.0]
    )
    batch = [[tuple(x)] for x in columns.tolist()]
    plain, changed = (
        ALGORITHMS[name].loss(inputs(batch), chosen)[0].item()  # type: ignore[arg-type]
        for chosen in (settings_of(name), settings_of(name, **OTHER[key]))
    )
    fixed = key in TRAITS[name].own and key not in TRAITS[name].keys
    assert (plain != changed) == (key in TRAITS[name].keys) or fixed


def test_m2po_s_screen_and_only_m2po_s_reads_its_threshold() -> None:
    proximal, behaviour = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -1.1, -3.0])
    for name, algorithm in ALGORITHMS.items():
        assert (algorithm.screen is not None) == ("m2_threshold" in TRAITS[name].keys)
    screen = ALGORITHMS["m2po"].screen
    assert screen is not None
    assert screen(proximal, behaviour, LossSettings()).tolist() == [True, True, False]
    assert screen(proximal, behaviour, LossSettings(m2_threshold=9.0)).all()


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_what_is_compared_is_what_the_configuration_believes(name: str) -> None:
    """The advantages of one group (of one batch) sum to 0 exactly where config/algorithms.py says so."""
    batch = Returns(torch.tensor([1.0, 0.5, 0.0, 3.0, 3.5]), torch.tensor([0, 0, 0, 1, 1]), torch.arange(5))
    ours = ALGORITHMS[name].advantages(batch)
    by_group = [ours[:3].sum().item(), ours[3:].sum().item()]
    compares = TRAITS[name].compares
    if compares == "group":
        assert by_group == pytest.approx([0, 0], abs=1e-5)
        assert ALGORITHMS[name].advantages(Returns(batch.returns, torch.arange(5), batch.session)).tolist() == [0] * 5
    elif ALGORITHMS[name].whiten or compares is None:
        assert torch.equal(ours, batch.returns)  # compared token by token, later, or not at all
        assert (compares == "batch") == ALGORITHMS[name].whiten
    else:
        assert ours.sum().item() == pytest.approx(0, abs=1e-5)


def test_own_values_are_keys_that_exist() -> None:
    for traits in TRAITS.values():
        assert set(traits.own) <= set(GENERAL) | {"eps_clip_higher", "loss_aggregation"}


def test_distillation_alone_is_the_reverse_kl_s_gradient() -> None:
    """Over a whole vocabulary, weighed by pi: sum of pi * (log pi - log q) * d log pi is d KL(pi | q), exactly."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([0.1, 0.4, -0.5], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    pi = logprobs.exp().detach()
    given_inputs = LossInputs(
        logprobs, logprobs.detach(), logprobs.detach(), torch.ones(3).double(), pi, torch.arange(3), teacher=teacher
    )
    loss, stats = ALGORITHMS["distill"].loss(given_inputs, LossSettings(rl_loss_weight=0.0, distill_loss_weight=1.0))
    [ours] = torch.autograd.grad(loss, logits)
    true = (logits.log_softmax(0).exp() * (logits.log_softmax(0) - teacher)).sum()
    torch.testing.assert_close(ours, torch.autograd.grad(true, logits)[0])
    assert stats["teacher_kl"].item() == pytest.approx(true.item())


def test_distillation_without_a_teacher_says_so() -> None:
    with pytest.raises(TrainingError, match="configure the section `teacher`"):
        ALGORITHMS["distill"].loss(replace(inputs([[(-1.0, -1.0, -1.0, 1.0)]]), teacher=None), LossSettings())


def naive_value_loss(new: float, old: float, target: float, eps: float) -> float:
    clipped = old + bounded(new - old, -eps, eps)
    return 0.5 * max((new - target) ** 2, (clipped - target) ** 2)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=6))
def test_the_critic_s_loss_is_the_clipped_square(tokens: list[tuple[float, float, float]]) -> None:
    new, old, target = torch.tensor(tokens, dtype=torch.float64).T
    m = len(tokens)
    given_inputs = LossInputs(new, old, old, target, torch.full((m,), 1 / m).double(), torch.arange(m))
    loss, stats = CRITIC.loss(given_inputs, LossSettings(eps_clip=0.5))
    assert loss.item() == pytest.approx(sum(naive_value_loss(*token, 0.5) for token in tokens) / m, rel=1e-6, abs=1e-9)
    assert stats["value_error"].item() == pytest.approx(sum(abs(n - t) for n, _, t in tokens) / m, rel=1e-6, abs=1e-9)
