"""Chunked log-probs against the full log_softmax, values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import Tensor

from areal.algorithms.logprobs import Part, token_logprobs
from areal.base.errors import ShapeError


def naive(h: Tensor, w: Tensor, b: Tensor | None, targets: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    logp = (torch.nn.functional.linear(h, w, b) / torch.where(t == 0, 1.0, t)[:, None]).log_softmax(-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("keep_bytes", [0, 5 * 37 * 4, 2**20])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_equals_log_softmax_with_gradients(chunk: int, with_bias: bool, keep_bytes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    m, d, v = 13, 8, 37
    h, w = torch.randn(m, d, generator=generator), torch.randn(v, d, generator=generator)
    b = torch.randn(v, generator=generator) if with_bias else None
    targets = torch.randint(v, (m,), generator=generator)
    t = torch.rand(m, generator=generator) + 0.5
    t[3] = 0.0
    upstream = torch.randn(m, generator=generator)
    leaves = [x.requires_grad_() for x in (h, w, b) if x is not None]
    ours, entropy = token_logprobs(h, w, targets, t, bias=b, chunk=chunk, keep_bytes=keep_bytes)
    expected, expected_entropy = naive(h, w, b, targets, t)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=1e-5)
    assert not entropy.requires_grad
    for a, e in zip(
        torch.autograd.grad(ours, leaves, upstream), torch.autograd.grad(expected, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(a, e, atol=1e-5, rtol=1e-5)


def test_T075_both_sides_use_the_temperature_of_sampling() -> None:
    hidden, weight = torch.ones(3, 1), torch.tensor([[2.0], [1.0], [0.0]])
    targets, temperatures = torch.tensor([1, 1, 1]), torch.tensor([1.0, 0.5, 0.0])
    ours, _ = token_logprobs(hidden, weight, targets, temperatures)
    assert ours.tolist() == pytest.approx([-1.4076, -2.1429, -1.4076], abs=1e-4)
    assert (ours[1] - ours[1]).exp().item() == 1.0  # the same token at the same temperature: ratio 1, not 2.0862


def test_no_tokens_give_no_logprobs_and_zero_gradients() -> None:
    weight = torch.randn(5, 2, requires_grad=True)
    hidden = torch.zeros(0, 2, requires_grad=True)
    ours, _ = token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.long), torch.zeros(0))
    ours.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_bfloat16_head_computes_its_softmax_in_float32() -> None:
    generator = torch.Generator().manual_seed(1)
    h, w = (torch.randn(n, 16, generator=generator).bfloat16() for n in (6, 50))
    targets = torch.arange(6)
    ours, _ = token_logprobs(h, w, targets, torch.ones(6))
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, (h @ w.T).float().log_softmax(-1)[torch.arange(6), targets])


def test_logits_never_exist_for_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record every [*, v] product the head makes: none is larger than a chunk."""
    sizes: list[int] = []
    linear = torch.nn.functional.linear

    def recorded(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        sizes.append(len(x))
        return linear(x, w, b)

    monkeypatch.setattr(torch.nn.functional, "linear", recorded)
    hidden = torch.randn(1000, 4, requires_grad=True)
    ours, _ = token_logprobs(
        hidden, torch.randn(9, 4), torch.zeros(1000, dtype=torch.long), torch.ones(1000), chunk=64, keep_bytes=0
    )
    ours.sum().backward()
    assert max(sizes) == 64
    assert sum(sizes) == 2000  # once forward, once recomputed


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ShapeError, match="do not fit together"):
        token_logprobs(torch.zeros(3, 4), torch.zeros(9, 5), torch.zeros(3, dtype=torch.long), torch.ones(3))


@pytest.mark.parametrize("keep_bytes", [0, 2**20])
@pytest.mark.parametrize("cuts", [[19], [8, 27], [36]])
def test_a_head_in_parts_says_what_the_whole_head_says(cuts: list[int], keep_bytes: int) -> None:
    generator = torch.Generator().manual_seed(2)
    m, d, v = 11, 8, 37
    h, w = 3 * torch.randn(m, d, generator=generator), 3 * torch.randn(v, d, generator=generator)
    b, targets = torch.randn(v, generator=generator), torch.randint(v, (m,), generator=generator)
    t = torch.rand(m, generator=generator) + 0.5
    t[3] = 0.0
    leaves = [x.requires_grad_() for x in (h, w, b)]
    upstream = torch.randn(m, generator=generator)
    expected, expected_entropy = token_logprobs(h, w, targets, t, bias=b, chunk=4)
    expected_grads = torch.autograd.grad(expected, leaves, upstream)

    edges = [0, *cuts, v]
    meeting = Meeting(len(edges) - 1)

    def of_part(first: int, end: int) -> tuple[Tensor, ...]:
        own = [h.detach().clone().requires_grad_(), *(x.detach()[first:end].clone().requires_grad_() for x in (w, b))]
        part = Part(first, meeting.maximum, meeting.sum)
        ours, entropy = token_logprobs(
            own[0], own[1], targets, t, bias=own[2], part=part, chunk=4, keep_bytes=keep_bytes
        )
        return (ours.detach(), entropy, *torch.autograd.grad(ours, own, upstream))

    with ThreadPoolExecutor(len(edges) - 1) as threads:
        parts = list(threads.map(of_part, edges[:-1], edges[1:]))
    for ours, entropy, *_ in parts:
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(entropy, expected_entropy, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(sum(part[2] for part in parts), expected_grads[0], atol=1e-5, rtol=1e-5)
    for place, grad in enumerate(expected_grads[1:], start=3):
        torch.testing.assert_close(torch.cat([part[place] for part in parts]), grad, atol=1e-6, rtol=1e-5)


class Meeting:
    """Threads that reduce their tensors as processes would."""

    def __init__(self, size: int) -> None:
        self._all = Barrier(size)
        self._tensors: list[Tensor] = []

    def maximum(self, own: Tensor) -> Tensor:
        return self._reduced(own, lambda every: every.amax(0))

    def sum(self, own: Tensor) -> Tensor:
        return self._reduced(own, lambda every: every.sum(0))

    def _reduced(self, own: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        self._tensors.append(own.detach())
        self._all.wait()
        result = reduce(torch.stack(self._tensors))
        if self._all.wait() == 0:
            self._tensors.clear()
        self._all.wait()
        return result
