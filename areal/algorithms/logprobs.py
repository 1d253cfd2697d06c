"""Log-probs of given tokens from hidden states and the output head, without a [tokens x vocabulary] tensor in the graph.

    logprobs, entropy = token_logprobs(hidden, weight, targets, temperatures)
    logprobs.sum().backward()                              # gradients to hidden and weight

The head is applied to `chunk` tokens at a time; backward computes each chunk again, but for the first KEEP_BYTES worth of
probabilities, which are kept (recomputing costs a third of the head's work, keeping is free while it is small). So memory is
bounded by a constant, whatever the number of tokens.
A head whose rows lie on several processes (`Part`) gives the same on all of them: largest logit, sum of exponentials and the target's
logit are reduced per chunk, and backward needs nobody: it leaves each process's share of the hidden states' gradient, still to be summed.
Log-probs are natural logs over the full vocabulary at each token's own temperature, before any top-k or top-p, as the sampler
records them. Temperature 0 means greedy sampling and leaves the logits unscaled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areal.base.errors import ShapeError

CHUNK = 128
"""Tokens whose logits exist at once."""

KEEP_BYTES = 96 * 2**20
"""Most bytes of float32 probabilities that one forward pass keeps for its backward pass."""


@dataclass(frozen=True, slots=True)
class Part:
    """Which rows of the head are here, and how to hear of the others. first: id of the first row. maximum, sum: elementwise over the
    processes that have the rest, in place, the same result on all."""

    first: int
    maximum: Callable[[Tensor], Tensor]
    sum: Callable[[Tensor], Tensor]


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    *,
    bias: Tensor | None = None,
    part: Part | None = None,
    chunk: int = CHUNK,
    keep_bytes: int = KEEP_BYTES,
) -> tuple[Tensor, Tensor]:
    """Log-probs [m] (with gradient) and entropies [m] (nats, without), both float32.

    hidden [m, d] and weight [v, d] of one dtype, bias [v]; targets [m] ids below v; temperatures [m]. part: where weight and bias are
    some rows of a head that spans several processes; all of these call it alike, and must sum the gradient of `hidden`.
    Raises ShapeError if they do not fit together."""
    m = len(targets)
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape != (m, weight.shape[1]) or temperatures.shape != (m,):
        shapes = f"{tuple(hidden.shape)}, {tuple(weight.shape)}, {tuple(targets.shape)}, {tuple(temperatures.shape)}"
        raise ShapeError(f"hidden [m, d], weight [v, d], targets [m], temperatures [m] do not fit together: {shapes}")
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(
        hidden, weight, bias, targets, temperatures.float(), part, chunk, keep_bytes
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
        part: Part | None,
        chunk: int,
        keep_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        norms = torch.empty(2, len(targets) if part else 0, device=hidden.device)
        wants_gradient = any(ctx.needs_input_grad[:3])
        kept: dict[int, Tensor] = {}
        for start in range(0, len(targets), chunk):
            own = slice(start, start + chunk)
            logits = scaled_logits(hidden[own], weight, bias, temperatures[own])
            if part is None:
                log_softmax = logits.log_softmax(dim=1)
                del logits
                logprobs[own] = log_softmax.gather(1, targets[own, None])[:, 0]
                probabilities = log_softmax.exp()
                entropy[own] = -torch.linalg.vecdot(probabilities, log_softmax)
                del log_softmax
            else:
                probabilities, logprobs[own], entropy[own] = _from_part(logits, targets[own], part, norms[:, own])
            keep_bytes -= probabilities.numel() * probabilities.element_size()
            if wants_gradient and keep_bytes >= 0:
                kept[start] = probabilities
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, norms)
        ctx.kept = kept
        ctx.part = part
        ctx.chunk = chunk
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperatures, norms = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight: Tensor | None = None
        grad_bias = torch.zeros_like(bias) if needs_bias else None
        for start in range(0, len(targets), ctx.chunk):
            own = slice(start, start + ctx.chunk)
            probabilities = ctx.kept.pop(start, None)  # taken out: it is overwritten below
            if probabilities is None:
                logits = scaled_logits(hidden[own], weight, bias, temperatures[own])
                probabilities = logits.softmax(dim=1) if ctx.part is None else _part_softmax(logits, norms[:, own])
            grad_logits = _grad_logits(probabilities, targets[own], temperatures[own], grads[0][own], ctx.part)
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[own])
            if needs_weight and grad_weight is None:
                grad_weight = torch.mm(grad_logits.T, hidden[own])
            elif grad_weight is not None:
                grad_weight.addmm_(grad_logits.T, hidden[own])
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        if needs_weight and grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _from_part(logits: Tensor, targets: Tensor, part: Part, norms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities [m, v] of the ids that are here; the targets' log-probs and the entropies [m] over all ids. Overwrites `logits`, fills
    norms [2, m]: of all logits of a token the largest, and the sum of exponentials relative to it."""
    largest = norms[0] = part.maximum(logits.amax(dim=1))
    logits -= largest[:, None]
    exponentials = logits.exp()
    here, at = _rows(targets, logits.shape[1], part)
    target = logits.gather(1, at[:, None])[:, 0].masked_fill(~here, 0)
    sums = torch.stack([exponentials.sum(1), torch.linalg.vecdot(exponentials, logits), target])
    total, weighted, target = part.sum(sums)
    norms[1] = total
    log_total = total.log()
    return exponentials.div_(total[:, None]), target - log_total, log_total - weighted / total


def _part_softmax(logits: Tensor, norms: Tensor) -> Tensor:
    """The same probabilities once more. Overwrites `logits`."""
    largest, total = norms
    return logits.sub_(largest[:, None]).exp_().div_(total[:, None])


def _rows(targets: Tensor, rows: int, part: Part) -> tuple[Tensor, Tensor]:
    """Whether each target's row of the head is here, and which it is; 0 for those that are not."""
    at = targets - part.first
    here = (at >= 0) & (at < rows)
    return here, at.where(here, 0)


def _grad_logits(
    probabilities: Tensor, targets: Tensor, temperatures: Tensor, grad: Tensor, part: Part | None
) -> Tensor:
    """d(logprob)/d(logits) = (onehot - p) / T, times the incoming gradient; written over `probabilities`."""
    divisor = torch.where(temperatures == 0, torch.ones_like(temperatures), temperatures)
    scale = (grad.float() / divisor)[:, None]
    probabilities.mul_(-scale)
    if part is None:
        return probabilities.scatter_add_(1, targets[:, None], scale)
    here, at = _rows(targets, probabilities.shape[1], part)
    return probabilities.scatter_add_(1, at[:, None], scale * here[:, None])
