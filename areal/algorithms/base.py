"""An algorithm is two pure functions and what they need; a new one is one file, one table line, one twin test.

    algorithm = ALGORITHMS["grpo"]
    advantages = algorithm.advantages(group_returns)         # on the controller: numbers per interaction
    loss, stats = algorithm.loss(inputs, settings)           # in the rank: tensors per trained token

Pure maths on plain tensors: no I/O, no engine types, no global state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Returns:
    """Discounted returns of one batch, one entry per trained interaction [k].

    group [k] and session [k]: integer ids that say which interactions belong together; any order, any sizes."""

    returns: Tensor
    group: Tensor
    session: Tensor


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Tensors over the trained tokens of one micro-batch, all of one length [m]; nothing masked is in here.

    logprobs carries the gradient; proximal and behaviour do not. weight sums to 1 over the whole optimizer step
    (1 / trained tokens of the global batch for token_mean), so that micro-batch losses add up."""

    logprobs: Tensor
    proximal: Tensor
    behaviour: Tensor
    advantages: Tensor
    weight: Tensor
    sequence: Tensor


@dataclass(frozen=True, slots=True)
class LossSettings:
    eps_clip: float
    eps_clip_higher: float
    c_clip: float | None
    use_decoupled_loss: bool
    behave_imp_weight_cap: float | None


@dataclass(frozen=True, slots=True)
class Algorithm:
    """advantages: Returns -> [k]. loss: weighted sum (a scalar) and stats as weighted sums, both addable over
    micro-batches. drop_zero: rows whose advantages are all 0 change nothing and need no forward pass."""

    name: str
    advantages: Callable[[Returns], Tensor]
    loss: Callable[[LossInputs, LossSettings], tuple[Tensor, dict[str, Tensor]]]
    drop_zero: bool = True
    needs_critic: bool = False
    needs_reference: bool = False


__all__ = ["Algorithm", "LossInputs", "LossSettings", "Returns"]
