"""From a batch of groups to the rows a training step takes: one advantage per trained token.

    credit = Credit(ALGORITHMS["grpo"], Shaping(clip=20.0))
    rows = credit.rows(batch.groups)                                       # where no other net has a say
    scored = Scored(reference=await reference.score(credit.bare_rows(batch.groups)))
    rows = credit.rows(batch.groups, scored)

Returns are collected per interaction (each once, however many rows show it), shaped in the order of algorithms/reward_shaping.py,
turned into advantages by the algorithm, and put at their interaction's tokens; KL in the reward and a critic's values then
differ from token to token. The maths is algorithms/', the rows are rows.py's. Used by nets.py; the batcher asks `informative`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from torch import Tensor

from areal.algorithms.base import Algorithm, Returns
from areal.algorithms.kl import KL_ESTIMATORS
from areal.algorithms.reward_shaping import Rewards, Shaping, shaped
from areal.algorithms.token_advantages import gae, minus_kl_to_go, paid_at_the_end, whitened
from areal.base.errors import TrainingError
from areal.base.types import FloatArray, Group
from areal.engine.commands import Row
from areal.engine.rows import InteractionReturns, interaction_returns, to_rows, trained_trajectories, trained_values


@dataclass(frozen=True, slots=True)
class Scored:
    """What other nets say of the rows: one array [n] per row each, entries at trained tokens; None = there is no such net."""

    reference: Sequence[FloatArray] | None = None
    teacher: Sequence[FloatArray] | None = None
    values: Sequence[FloatArray] | None = None


@dataclass(frozen=True, slots=True)
class Credit:
    """How rewards become advantages. kl_in_reward: kl_ctl where the algorithm takes the KL off the reward, else 0."""

    algorithm: Algorithm
    shaping: Shaping = field(default_factory=Shaping)
    discount: float = 1.0
    gae_lambda: float = 1.0
    kl_in_reward: float = 0.0
    kl_estimator: str = "k1"

    def rows(self, groups: Sequence[Group], scored: Scored = Scored()) -> list[Row]:
        """The policy's rows. Raises TrainingError naming a session whose numbers are not finite."""
        returns = interaction_returns(groups)
        advantages = self._advantages(groups, returns, scored)
        if self.algorithm.whiten or scored.values is not None:
            advantages = whitened(advantages)
        rows = to_rows(groups, returns, advantages.numpy())
        reference = None if self.kl_in_reward else scored.reference  # spent already
        return _with(rows, reference=reference, teacher=scored.teacher)

    def critic_rows(self, groups: Sequence[Group], scored: Scored) -> list[Row]:
        """The critic's rows: the returns it should predict in the place of advantages, its values at the start as proximal.

        Raises TrainingError without the critic's values."""
        if scored.values is None:
            raise TrainingError("a critic's rows need its values at the start of the step; score the rows first")
        returns = interaction_returns(groups)
        advantages = self._advantages(groups, returns, scored)
        targets = advantages.numpy() + trained_values(groups, scored.values)
        return _with(to_rows(groups, returns, targets), proximal=scored.values)

    def bare_rows(self, groups: Sequence[Group]) -> list[Row]:
        """The same rows without advantages, for other nets to score."""
        returns = interaction_returns(groups)
        return to_rows(groups, returns, np.zeros(len(returns.keys), dtype=np.float32))

    def mean_kl_off_the_reward(self, groups: Sequence[Group], scored: Scored) -> float | None:
        """The KL from the reference per trained token in nats, where it is taken off the reward; None elsewhere."""
        if not self.kl_in_reward or scored.reference is None:
            return None
        return float(self._kl(groups, scored).mean()) / self.kl_in_reward

    def informative(self, group: Group) -> bool:
        """Whether the group's sessions differ, so that comparing them says something (dynamic sampling)."""
        return bool(self._returns(interaction_returns([group])).any())

    def _advantages(self, groups: Sequence[Group], returns: InteractionReturns, scored: Scored) -> Tensor:
        """[k], or [m] where they differ between the tokens of an interaction; before whitening."""
        if scored.values is None and not self.algorithm.whiten and not self.kl_in_reward:
            return self._returns(returns)
        interaction = torch.from_numpy(np.repeat(np.arange(len(returns.keys)), returns.tokens))
        kl = self._kl(groups, scored)
        if scored.values is None:
            return minus_kl_to_go(self._returns(returns)[interaction], kl, interaction, gamma=self.discount)
        values = torch.from_numpy(trained_values(groups, scored.values))
        rewards = paid_at_the_end(shaped_returns(returns, self.shaping), interaction) - kl
        return gae(rewards, values, interaction, gamma=self.discount, lam=self.gae_lambda)

    def _returns(self, returns: InteractionReturns) -> Tensor:
        batch = Returns(
            returns=shaped_returns(returns, self.shaping),
            group=torch.from_numpy(returns.group),
            session=torch.from_numpy(returns.session),
        )
        return self.algorithm.advantages(batch)

    def _kl(self, groups: Sequence[Group], scored: Scored) -> Tensor:
        """kl_in_reward times the KL of the policy that sampled from the reference, per trained token [m]."""
        behaviour = trained_values(groups, [row.logprobs for row in trained_trajectories(groups)])
        if not self.kl_in_reward or scored.reference is None:
            return torch.zeros(len(behaviour))
        difference = torch.from_numpy(behaviour - trained_values(groups, scored.reference))
        return self.kl_in_reward * KL_ESTIMATORS[self.kl_estimator](difference)


def shaped_returns(returns: InteractionReturns, shaping: Shaping) -> Tensor:
    """Returns [k] after the reward pipeline."""
    rewards = Rewards(
        torch.from_numpy(returns.returns), torch.from_numpy(returns.lengths), torch.from_numpy(returns.truncated)
    )
    return shaped(rewards, shaping)


def _with(rows: Sequence[Row], **arrays: Sequence[FloatArray] | None) -> list[Row]:
    """The rows with these arrays [n] put in."""
    found = list(rows)
    for name, values in arrays.items():
        if values is not None:
            found = [
                msgspec.structs.replace(row, **{name: own.astype("<f4").tobytes()})
                for row, own in zip(found, values, strict=True)
            ]
    return found
