"""On-policy distillation: the student's own tokens, graded by a teacher. GKD, arXiv:2306.13649; with rewards KDRL, arXiv:2506.02208.

    L_t = rl_loss_weight * (GRPO's clipped objective) + distill_loss_weight * w_t * r_t * stop_gradient(log pi - log pi_teacher)

The second term's gradient is that of the reverse KL(pi | teacher), by the score function and weighted for staleness. With
teacher.rl_loss_weight=0 rewards do not matter, and one sample per task is enough.
"""

from __future__ import annotations

from functools import partial

import torch

from areal.algorithms.advantages import relative
from areal.algorithms.base import Algorithm, LossInputs, LossSettings
from areal.algorithms.losses import Loss, clipped, importance
from areal.base.errors import TrainingError


def distilled(inputs: LossInputs, settings: LossSettings) -> Loss:
    """The joint objective; stats besides decoupled_clip's: teacher_kl, the mean of log pi - log pi_teacher in nats."""
    if inputs.teacher is None:
        raise TrainingError("distillation without the teacher's log-probs; configure the section `teacher`")
    step = importance(inputs, settings)
    reward_loss, stats = clipped(step, settings.rl_loss_weight * inputs.advantages, settings)
    gap = (inputs.logprobs - inputs.teacher).detach()
    teacher_loss = (inputs.weight * step.behave_weight * step.ratio * gap).sum()
    with torch.no_grad():
        stats["teacher_kl"] = (inputs.weight * gap).sum()
    return reward_loss + settings.distill_loss_weight * teacher_loss, stats


DISTILL = Algorithm("distill", advantages=partial(relative, mean="group", std="group"), loss=distilled, drop_zero=False)
