"""Learning rate over optimizer steps: linear warm-up from 0, then constant, linear or cosine down to min_lr_ratio.

    factor = SCHEDULES["cosine"](progress)                 # 1 at progress 0, 0 at progress 1
    lr = learning_rate(step, lr=2e-5, schedule="cosine", warmup_steps=10, total_steps=100, min_lr_ratio=0.1)

Pure functions of the step number, so a resumed run needs nothing but that number. Names: LrSchedule in config/engine.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def learning_rate(
    step: int, *, lr: float, schedule: str, warmup_steps: int, total_steps: int, min_lr_ratio: float
) -> float:
    """The rate of optimizer step `step` (from 0) out of about total_steps.

    Step 0 of a warm-up over w steps gets lr / w, step w - 1 and w get lr. Steps past total_steps get the last rate.
    The floor is min_lr_ratio * lr, for schedules that fall."""
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return lr * (min_lr_ratio + (1.0 - min_lr_ratio) * SCHEDULES[schedule](progress))
