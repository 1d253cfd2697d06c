"""Held-out tasks, each tried once by an agent as an eval session: never trained, not gated, greedy unless told otherwise.

    evaluation = Evaluation(tasks, dispatcher, freq_steps=10)
    reward = await evaluation.run(step=0)          # mean over tasks; None where there is nothing to evaluate

A task whose agent failed counts 0 and is named in the log: a crash must not look like an improvement. Where the run rewards by itself its
source rewards these sessions too; one that it does not reward (in time) says nothing about the model, is left out of the mean, and said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from areal.base.logs import warn
from areal.rollout.datasets import Task
from areal.rollout.dispatcher import Dispatcher
from areal.rollout.rewards.scorer import Scorer


class Evaluation:
    """Runs the held-out tasks and remembers when it last did."""

    def __init__(
        self,
        tasks: Sequence[Task],
        dispatcher: Dispatcher,
        *,
        freq_steps: int | None,
        scorer: Scorer | None = None,
    ) -> None:
        self._held_out = tasks
        self._dispatcher = dispatcher
        self._freq_steps = freq_steps
        self._scorer = scorer
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
        rewards = [outcome.reward or 0.0 for outcome in outcomes if outcome.error or self._scorer is None]
        if self._scorer is not None:
            rewards += await self._scored(self._scorer, [one.session_id for one in outcomes if not one.error])
        return sum(rewards) / len(rewards) if rewards else None

    async def _scored(self, scorer: Scorer, session_ids: list[str]) -> list[float]:
        found = await scorer.rewards_of(session_ids)
        rewards = [reward for reward in found.values() if reward is not None]
        if late := len(session_ids) - len(found):
            warn("Evaluation", f"{late} held-out tasks still wait for their reward and are left out of the mean")
        if unrewarded := len(found) - len(rewards):
            warn("Evaluation", f"{unrewarded} held-out tasks got no reward and are left out of the mean")
        return rewards
