"""Held-out tasks, each tried once by an agent as an eval session: never trained, not gated, greedy unless told otherwise.

    evaluation = Evaluation(tasks, dispatcher, freq_steps=10)
    reward = await evaluation.run(step=0)          # mean over tasks; None where there is nothing to evaluate

A task whose agent failed counts 0 and is named in the log: a crash must not look like an improvement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from areal.base.logs import warn
from areal.rollout.datasets import Task
from areal.rollout.dispatcher import Dispatcher


class Evaluation:
    """Runs the held-out tasks and remembers when it last did."""

    def __init__(self, tasks: Sequence[Task], dispatcher: Dispatcher, *, freq_steps: int | None) -> None:
        self._held_out = tasks
        self._dispatcher = dispatcher
        self._freq_steps = freq_steps
        self.last_step: int | None = None

    @property
    def tasks(self) -> int:
        return len(self._held_out)

    def due(self, step: int) -> bool:
        """Whether `step` trained steps call for an evaluation by frequency."""
        return bool(self._held_out and self._freq_steps and step % self._freq_steps == 0)

    async def run(self, step: int) -> float | None:
        """Mean reward over all tasks under the current weights."""
        self.last_step = step
        if not self._held_out:
            return None
        outcomes = await self._dispatcher.evaluate(self._held_out, label=f"eval-{step}")
        failed = Counter(outcome.error for outcome in outcomes if outcome.error)
        for reason, times in failed.most_common(3):
            warn("Evaluation", f"{times} of {len(outcomes)} held-out tasks failed and count 0: {reason}")
        return sum(outcome.reward or 0.0 for outcome in outcomes) / len(outcomes)
