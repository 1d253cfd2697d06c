"""Log-probs of given tokens from hidden states and the output head, without a [tokens x vocabulary] tensor in the graph.

    logprobs, entropy = token_logprobs(hidden, weight, targets, temperatures)
    logprobs.sum().backward()                              # gradients to hidden and weight

The head is applied to `chunk` tokens at a time; backward computes each chunk again, but for the first KEEP_BYTES worth of
probabilities, which are kept (recomputing costs a third of the head's work, keeping is free while it is small). So memory is
bounded by a constant, whatever the number of tokens.
Log-probs are natural logs over the full vocabulary at each token's own temperature, before any top-k or top-p, as the sampler
records them. Temperature 0 means greedy sampling and leaves the logits unscaled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areal.base.errors import ShapeError

CHUNK = 128
"""Tokens whose logits exist at once."""

KEEP_BYTES = 96 * 2**20
"""Most bytes of float32 probabilities that one forward pass keeps for its backward pass."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    *,
    bias: Tensor | None = None,
    chunk: int = CHUNK,
    keep_bytes: int = KEEP_BYTES,
) -> tuple[Tensor, Tensor]:
    """Log-probs [m] (with gradient) and entropies [m] (nats, without), both float32.

    hidden [m, d] and weight [v, d] of one dtype, bias [v]; targets [m] ids below v; temperatures [m].
    Raises ShapeError if they do not fit together."""
    m = len(targets)
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape != (m, weight.shape[1]) or temperatures.shape != (m,):
        shapes = f"{tuple(hidden.shape)}, {tuple(weight.shape)}, {tuple(targets.shape)}, {tuple(temperatures.shape)}"
        raise ShapeError(f"hidden [m, d], weight [v, d], targets [m], temperatures [m] do not fit together: {shapes}")
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(
        hidden, weight, bias, targets, temperatures.float(), chunk, keep_bytes
    )  # type: ignore[no-untyped-call]
    return result


def scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperatures: Tensor) -> Tensor:
    """Logits [m, v] in float32, divided by each row's temperature (0 counts as 1)."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    divisor = torch.where(temperatures == 0, torch.ones_like(temperatures), temperatures)
    return logits if bool((divisor == 1).all()) else logits.div_(divisor[:, None])


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperatures: Tensor,
        chunk: int,
        keep_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        wants_gradient = any(ctx.needs_input_grad[:3])
        kept: dict[int, Tensor] = {}
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            logits = scaled_logits(hidden[part], weight, bias, temperatures[part])
            log_softmax = logits.log_softmax(dim=1)
            del logits
            logprobs[part] = log_softmax.gather(1, targets[part, None])[:, 0]
            probabilities = log_softmax.exp()
            entropy[part] = -torch.linalg.vecdot(probabilities, log_softmax)
            del log_softmax
            keep_bytes -= probabilities.numel() * probabilities.element_size()
            if wants_gradient and keep_bytes >= 0:
                kept[start] = probabilities
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures)
        ctx.kept = kept
        ctx.chunk = chunk
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperatures = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight: Tensor | None = None
        grad_bias = torch.zeros_like(bias) if needs_bias else None
        for start in range(0, len(targets), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            probabilities = ctx.kept.pop(start, None)  # taken out: it is overwritten below
            if probabilities is None:
                probabilities = scaled_logits(hidden[part], weight, bias, temperatures[part]).softmax(dim=1)
            grad_logits = _grad_logits(probabilities, targets[part], temperatures[part], grads[0][part])
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[part])
            if needs_weight and grad_weight is None:
                grad_weight = torch.mm(grad_logits.T, hidden[part])
            elif grad_weight is not None:
                grad_weight.addmm_(grad_logits.T, hidden[part])
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        if needs_weight and grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _grad_logits(probabilities: Tensor, targets: Tensor, temperatures: Tensor, grad: Tensor) -> Tensor:
    """d(logprob)/d(logits) = (onehot - p) / T, times the incoming gradient; written over `probabilities`."""
    divisor = torch.where(temperatures == 0, torch.ones_like(temperatures), temperatures)
    scale = (grad.float() / divisor)[:, None]
    return probabilities.mul_(-scale).scatter_add_(1, targets[:, None], scale)
