"""Corrections for tokens that older weights sampled: the weight proximal / behaviour, bounded, and approximate proximal log-probs.

    weight_m, raw_m, kept_m = behaviour_weights(proximal, behaviour, interaction, Correction(upper=5.0))
    proximal = loglinear(behaviour, logprobs, lags)

Decoupled PPO (arXiv:2110.00641, arXiv:2505.24298) clips against the proximal policy and weighs each token by w = pi_prox /
pi_behaviour. Truncated importance sampling clamps w, masked importance sampling leaves out what is outside the bounds; either per
token or per sequence, a sequence being one sampled answer. Names are those of `actor.rejection_sampling` (config/engine.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from areal.algorithms.kl import KL_ESTIMATORS, LOG_RATIO_LIMIT

Agg = Literal["mean", "sum", "max"]


@dataclass(frozen=True, slots=True)
class Correction:
    """Bounds for a measure of how far proximal and behaviour are apart, and what happens outside of them.

    metric: the ratio itself, or an estimate of KL(behaviour | proximal) in nats. level, agg: per token, or the mean, sum or
    maximum over each sequence (of a ratio: over its log). clamp: the measured ratio, bounded, is the weight; mask: weight
    0 outside the bounds, the token's own ratio inside. None = no bound."""

    level: Literal["token", "sequence"] = "token"
    action: Literal["clamp", "mask"] = "clamp"
    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3"] = "ratio"
    agg: Agg = "mean"
    upper: float | None = 5.0
    lower: float | None = None


def behaviour_weights(
    proximal: Tensor, behaviour: Tensor, interaction: Tensor, correction: Correction
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [m] without gradient, the raw ratios [m], and which tokens are kept [m] (bool).

    interaction [m]: tokens of one sequence share the number. A NaN stays one."""
    log_ratio = (proximal - behaviour).detach()
    raw = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if correction.metric == "ratio" or correction.action == "clamp":
        measured = (
            raw if correction.level == "token" else _ratio(over_sequences(log_ratio, interaction, correction.agg))
        )
    else:
        measured = KL_ESTIMATORS[correction.metric.removeprefix("kl_")](-log_ratio)  # sampled by the behaviour policy
        if correction.level == "sequence":
            measured = over_sequences(measured, interaction, correction.agg)
    kept = torch.ones_like(raw, dtype=torch.bool)
    if correction.action == "clamp":
        return _bounded(measured, correction), raw, kept
    if correction.upper is not None:
        kept &= ~(measured > correction.upper)
    if correction.lower is not None:
        kept &= ~(measured < correction.lower)
    return raw * kept, raw, kept


def over_sequences(values: Tensor, interaction: Tensor, agg: Agg) -> Tensor:
    """The mean, sum or maximum [m] of each token's whole sequence; mean and sum carry gradients."""
    _, index, counts = torch.unique(interaction, return_inverse=True, return_counts=True)
    if agg == "max":
        start = torch.full((len(counts),), -torch.inf, dtype=values.dtype, device=values.device)
        return start.scatter_reduce(0, index, values, "amax")[index]
    sums = torch.zeros(len(counts), dtype=values.dtype, device=values.device).index_add(0, index, values)
    return (sums / counts if agg == "mean" else sums)[index]


def loglinear(behaviour: Tensor, logprobs: Tensor, lags: Tensor) -> Tensor:
    """Proximal log-probs [m] without a pass of their own: on the line from behaviour to the policy being trained.

    With v the step whose weights are being trained (they become v + 1) and b the one that sampled, the proximal policy v lies
    at (v - b) / (v + 1 - b) = lag / (lag + 1) of the way; a token of lag 0 keeps its recorded log-prob. No gradient."""
    alpha = lags.clamp(min=0).to(behaviour.dtype)
    alpha = alpha / (alpha + 1)
    return behaviour + alpha * (logprobs.detach() - behaviour)


def second_moment_mask(proximal: Tensor, behaviour: Tensor, threshold: float) -> Tensor:
    """M2PO's mask [m] (bool): leaves out the tokens with the largest (log pi_prox - log pi_behaviour)^2, as few as
    possible, until the mean of the others is at most `threshold`; at least one token stays (arXiv:2510.01161).

    Over all tokens of the optimizer step, so that micro-batches change nothing. Equal ones fall in the order given."""
    squares = (proximal - behaviour).double().square()
    order = torch.argsort(squares, stable=True)
    means = squares[order].cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
    count = max(1, int((means <= threshold).sum())) if len(squares) else 0
    mask = torch.zeros_like(squares, dtype=torch.bool)
    mask[order[:count]] = True
    return mask


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _bounded(weight: Tensor, correction: Correction) -> Tensor:
    if correction.upper is None and correction.lower is None:
        return weight
    return weight.clamp(min=correction.lower, max=correction.upper)
