"""How far the policy is from another one, estimated at the tokens it sampled: k1, k2, k3 (J. Schulman, "Approximating KL
Divergence", http://joschu.net/blog/kl-approx.html).

    kl_m = KL_ESTIMATORS["k3"](logprobs - reference)         # nats per token, for tokens sampled by the policy

With d = log pi - log pi_ref: k1 = d (unbiased, noisy), k2 = d^2 / 2 (biased, low variance), k3 = exp(-d) - 1 + d (unbiased, never
negative). As a *loss* only k2 and k3 pull towards the reference: the gradient of k1 is zero in the mean. Names: KlEstimator in config/engine.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this before exp, so that one far-off token cannot make a step infinite; a NaN passes."""


def k1(difference: Tensor) -> Tensor:
    return difference


def k2(difference: Tensor) -> Tensor:
    return difference.square() / 2


def k3(difference: Tensor) -> Tensor:
    bounded = difference.clamp(
        min=-LOG_RATIO_LIMIT
    )  # both of its terms: what is left of a bounded sum would push the token further away
    return torch.exp(-bounded) - 1 + bounded


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
