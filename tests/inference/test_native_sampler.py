"""The sampler against definitions of a few lines: distributions, log-probs, kept mass, seeds, failures."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.base.types import SamplingParams
from areal.inference.native.sampler import Draw, sample, uniforms


def draw(seed: int = 0, position: int = 0, **sampling: float) -> Draw:
    return Draw(SamplingParams(**{"temperature": 1.0, **sampling}), seed, position)  # type: ignore[arg-type]


def kept(logits: list[float], temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """Which tokens stay, with their full-vocabulary probabilities: top-k, then the smallest nucleus of mass top_p."""
    values = np.array(logits) / temperature
    p = np.exp(values - values.max())
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda token: -p[token])[: top_k or None]
    mass, result = sum(p[token] for token in order), {}
    for token in order:
        if sum(result.values()) >= top_p * mass:
            break
        result[token] = float(p[token])
    return result


def test_T075_log_probs_are_at_the_requests_temperature_over_the_full_vocabulary() -> None:
    def logprob_of_first(**sampling: float) -> float:
        drawn = sample(torch.tensor([[2.0, 1.0, 0.0]]), [draw(**sampling, top_logprobs=3)])
        return dict(drawn.top[0])[0]

    assert logprob_of_first() == pytest.approx(-0.4076, abs=1e-4)
    assert logprob_of_first(temperature=0.5) == pytest.approx(-0.1429, abs=1e-4)
    assert logprob_of_first(top_k=2) == pytest.approx(-0.4076, abs=1e-4)
    greedy = sample(torch.tensor([[2.0, 1.0, 0.0]]), [draw(temperature=0.0, top_k=1, top_p=0.1)])
    assert greedy.token_ids[0] == 0
    assert greedy.logprobs[0] == pytest.approx(-0.4076, abs=1e-4)
    assert greedy.kept_mass[0] == 1


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.floats(-8, 8, width=16), min_size=2, max_size=30, unique=True),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
)
def test_top_k_and_top_p_keep_what_the_definition_keeps(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    expected = kept(logits, temperature, top_k, top_p)
    draws = [draw(seed, temperature=temperature, top_k=top_k, top_p=top_p) for seed in range(40)]
    drawn = sample(torch.tensor([logits] * 40), draws)
    if math.isclose(
        min(abs(sum(list(expected.values())[:n]) - top_p) for n in range(len(expected) + 1)), 0, abs_tol=1e-6
    ):
        return  # the nucleus ends exactly at top_p: rounding decides
    assert set(drawn.token_ids.tolist()) <= expected.keys()
    np.testing.assert_allclose(drawn.kept_mass, sum(expected.values()) if top_k or top_p < 1 else 1.0, rtol=1e-5)
    for token, logprob in zip(drawn.token_ids.tolist(), drawn.logprobs, strict=True):
        assert logprob == pytest.approx(math.log(expected[token]), abs=1e-4)


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.8}, {"top_k": 4, "top_p": 0.7}]
)
def test_draws_follow_the_distribution(sampling: dict[str, float]) -> None:
    """Chi-square over 20 000 draws; the seeds are fixed, so the outcome is too. 99.9 % point of 5 degrees: 20.5."""
    logits = [0.3, 1.0, -1.0, 2.0, 0.0, 1.5]
    n = 20_000
    drawn = sample(torch.tensor([logits] * n), [draw(seed, **sampling) for seed in range(n)])
    counts = np.bincount(drawn.token_ids, minlength=6)
    expected = kept(logits, sampling.get("temperature", 1.0), int(sampling.get("top_k", 0)), sampling.get("top_p", 1.0))
    share = {token: p / sum(expected.values()) for token, p in expected.items()}
    assert set(np.flatnonzero(counts)) == expected.keys()
    assert sum((counts[t] - n * p) ** 2 / (n * p) for t, p in share.items()) < 20.5


@pytest.mark.parametrize("vocabulary", [1, 2, 255, 256, 257, 1000, 3000])
def test_every_vocabulary_size_is_drawn_from_to_its_ends(vocabulary: int) -> None:
    logits = torch.full((400, vocabulary), -30.0)
    logits[:, 0] = logits[:, -1] = 3.0
    drawn = sample(logits, [draw(seed) for seed in range(400)])
    assert set(drawn.token_ids.tolist()) == {0, vocabulary - 1}


def test_a_nucleus_wider_than_the_window_is_complete() -> None:
    logits = torch.zeros(2, 5000)
    drawn = sample(logits, [draw(1, top_p=0.9), draw(2, top_p=0.9, top_k=3000)])
    np.testing.assert_allclose(drawn.kept_mass, [0.9, 0.54], atol=3e-4)


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((3000, 600), -torch.inf)
    logits[:, 300] = 0.0
    assert set(sample(logits, [draw(seed) for seed in range(3000)]).token_ids.tolist()) == {300}


def test_a_draw_depends_on_seed_and_position_not_on_the_rest_of_the_batch() -> None:
    rows = torch.randn(30, 500, generator=torch.Generator().manual_seed(0))
    draws = [draw(seed % 7, seed // 7, temperature=0.5 + seed % 2, top_p=[1.0, 0.9][seed % 2]) for seed in range(30)]
    together = sample(rows.clone(), draws)
    for row in range(30):
        alone = sample(rows[row : row + 1].clone(), [draws[row]])
        assert alone.token_ids[0] == together.token_ids[row]
        assert alone.logprobs[0] == pytest.approx(together.logprobs[row], abs=1e-6)
    backwards = sample(rows.flip(0).clone(), draws[::-1])
    assert backwards.token_ids[::-1].tolist() == together.token_ids.tolist()


def test_uniform_numbers_are_uniform_and_differ_by_seed_and_position() -> None:
    by_seed, by_position = uniforms(range(10_000), [3] * 10_000), uniforms([2**64 - 1] * 10_000, range(10_000))
    for values in (by_seed, by_position):
        assert values.min() >= 0
        assert values.max() < 1
        counts = np.histogram(values, 20, (0, 1))[0]
        assert ((counts - 500) ** 2 / 500).sum() < 45.3  # 99.9 % point of 19 degrees is 43.8; the outcome is fixed
        assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.04
    assert len({*by_seed.tolist(), *by_position.tolist()}) == 20_000
    assert uniforms([-1], [0]) == uniforms([2**64 - 1], [0])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_row_with_nan_fails_alone(poison: float) -> None:
    rows = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    good = sample(rows[[0, 2]].clone(), [draw(0), draw(2, temperature=0.0)])
    rows[1, 7], rows[3, 299] = poison, poison
    drawn = sample(rows, [draw(0), draw(1, top_p=0.5), draw(2, temperature=0.0), draw(3, top_logprobs=2)])
    assert drawn.ok.tolist() == [True, False, True, False]
    assert drawn.token_ids[[0, 2]].tolist() == good.token_ids.tolist()
