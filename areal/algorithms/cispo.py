"""CISPO: the importance weight is clipped, not the update, so that rare tokens keep their gradient. MiniMax-M1, arXiv:2506.13585.

    L_t = -w_t * stop_gradient(clip(r_t, 1 - eps, 1 + eps_high)) * A_t * log pi          A = GRPO's

Its own eps of 1 means no lower bound, as in the paper.
"""

from __future__ import annotations

from functools import partial

from areal.algorithms.advantages import relative
from areal.algorithms.base import Algorithm, LossInputs, LossSettings
from areal.algorithms.losses import Loss, importance, weighted


def clipped_weight(inputs: LossInputs, settings: LossSettings) -> Loss:
    """CISPO's objective; stats besides `weighted`'s: clip_ratio, the part of the tokens whose weight was clipped."""
    step = importance(inputs, settings)
    ratio = step.ratio.detach()
    bounded = ratio.clamp(1.0 - settings.eps_clip, 1.0 + settings.eps_clip_higher)
    return weighted(step, -bounded * inputs.advantages * inputs.logprobs, clip_ratio=bounded != ratio)


CISPO = Algorithm("cispo", advantages=partial(relative, mean="group", std="group"), loss=clipped_weight)
