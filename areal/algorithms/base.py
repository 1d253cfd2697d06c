"""An algorithm is two pure functions and what they need; a new one is one file, one table line, one twin test.

    algorithm = ALGORITHMS["grpo"]
    advantages = algorithm.advantages(returns)               # on the controller: numbers per interaction
    loss, stats = algorithm.loss(inputs, settings)           # in the rank: tensors per trained token

Pure maths on plain tensors: no I/O, no engine types, no global state. Which configuration keys an algorithm honours, its
own values for them and what else it needs to learn stands in config/algorithms.py, which is free of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from areal.algorithms.off_policy import Correction


@dataclass(frozen=True, slots=True)
class Returns:
    """Shaped returns of one batch, one entry per trained interaction [k].

    group [k] and session [k]: integer ids that say which interactions belong together; any order, any sizes."""

    returns: Tensor
    group: Tensor
    session: Tensor


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Tensors over the trained tokens of one micro-batch, all of one length [m]; nothing masked is in here.

    logprobs carries the gradient; the others do not. weight sums to 1 over the whole optimizer step (1 / trained tokens
    of the global batch for token_mean), so that micro-batch losses add up. interaction: tokens of one sampled answer share
    the number; an answer is never split over micro-batches. reference, teacher: log-probs of those policies, where there is one."""

    logprobs: Tensor
    proximal: Tensor
    behaviour: Tensor
    advantages: Tensor
    weight: Tensor
    interaction: Tensor
    reference: Tensor | None = None
    teacher: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The configured numbers of a loss; names, units and advice are those of config/engine.py."""

    eps_clip: float = 0.2
    eps_clip_higher: float = 0.2
    c_clip: float | None = None
    use_decoupled_loss: bool = True
    correction: Correction = field(default_factory=Correction)
    kl_ctl: float = 0.0
    kl_estimator: str = "k3"
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    m2_threshold: float = 0.04
    rl_loss_weight: float = 1.0
    distill_loss_weight: float = 0.005


@dataclass(frozen=True, slots=True)
class Algorithm:
    """advantages: Returns -> [k]. loss: weighted sum (a scalar) and stats as weighted sums, both addable over
    micro-batches. drop_zero: rows whose advantages are all 0 change nothing and need no forward pass. screen: which tokens
    of a whole optimizer step take part, from (proximal, behaviour) [m]; asks for proximal log-probs before the first update.
    whiten: advantages of the trained tokens are normalised over the batch at last (token_advantages.py)."""

    name: str
    advantages: Callable[[Returns], Tensor]
    loss: Callable[[LossInputs, LossSettings], tuple[Tensor, dict[str, Tensor]]]
    drop_zero: bool = True
    screen: Callable[[Tensor, Tensor, LossSettings], Tensor] | None = None
    whiten: bool = False


__all__ = ["Algorithm", "LossInputs", "LossSettings", "Returns"]
