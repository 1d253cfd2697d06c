"""GSPO: the ratio of whole answers is clipped. Group Sequence Policy Optimization, arXiv:2507.18071.

    s_i = exp(mean over the answer's tokens of log pi - log pi_prox)
    L   = mean over sessions of max(-A_i * s_i, -A_i * clip(s_i, 1 - eps, 1 + eps_high))       A_i = GRPO's

An answer is one interaction: the tokens of one sampled completion, in whatever row it stands. Where its tokens have
different advantages their mean counts (over trained tokens alone, T072). Clips are two orders narrower than PPO's.
"""

from __future__ import annotations

from functools import partial

from areal.algorithms.advantages import relative
from areal.algorithms.base import Algorithm, LossInputs, LossSettings
from areal.algorithms.losses import Loss, clipped, importance
from areal.algorithms.off_policy import over_sequences


def sequence_clip(inputs: LossInputs, settings: LossSettings) -> Loss:
    """GSPO's objective; stats as decoupled_clip's, counted in tokens."""
    step = importance(inputs, settings, per_sequence=True)
    return clipped(step, over_sequences(inputs.advantages, inputs.interaction, "mean"), settings)


GSPO = Algorithm("gspo", advantages=partial(relative, mean="group", std="group"), loss=sequence_clip)
