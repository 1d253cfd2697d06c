"""The rule of the batch, as pure functions of what sessions recorded: which rows, which tokens are too old, what is written down.

    group = collected(ended, interactions, recipe)                  # a complete group as rows; interactions: session id -> its own
    checked = checked_ages(group, gate, "drop")                     # without what is too old; checked.group None: nothing is left
    batch = batch_of([checked, …], gate, reward_clip=None)

No store, no clock, no order of arrival: the same sessions under the same gate make the same batch, which is what `areal replay` lives on.
Used by queue.py and batcher.py in a run, by replay.py after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from areal.base.types import BoolArray, ExportStyle, Group, Interaction, Share, Version
from areal.proxy.export import Fate, clipped, fate, rows, shares
from areal.rollout.staleness import StalenessGate
from areal.store.admission import survivors_needed
from areal.store.base import EndedGroup


@dataclass(frozen=True, slots=True)
class Recipe:
    """How sessions become rows (rollout.agent)."""

    export_style: ExportStyle
    turn_discount: float
    reward_clip: float | None = None


@dataclass(frozen=True, slots=True)
class Collected:
    """A complete group. fates: session id -> what becomes of each of its interactions where nothing is too old."""

    group: Group
    fates: Mapping[str, tuple[Fate, ...]]


@dataclass(frozen=True, slots=True)
class Checked:
    """A group after its ages were checked. group: what is left to train, None where too little is. shares: session id -> what is trained and
    masked of it."""

    group: Group | None
    shares: Mapping[str, Mapping[str, Share]]

    @property
    def task_id(self) -> str:
        return self.group.task_id if self.group is not None else ""

    @property
    def stale(self) -> bool:
        """Whether anything of it is left out as too old."""
        return any("stale" in account for account in self.shares.values())


@dataclass(frozen=True, slots=True)
class Batch:
    """Groups for one training step. reward: mean over sessions of the raw sum. weights: the version that the step trains. lags:
    version label -> steps behind it. members: group id -> all its sessions, those included that were left out as too old.
    rewards_clipped: how many rewards are trained as less than was set (rollout.agent.reward_clip). stale_groups: dropped as stale since
    the batch before. held_seconds: how long this one was complete but for running groups that it had to wait for.

    accounts: session id -> what of it is trained ("") and masked, by reason, for every session of these groups, so that
    recorded = trained + masked holds for each."""

    groups: tuple[Group, ...]
    lag_mean: float
    lag_max: int
    reward: float
    accounts: Mapping[str, Mapping[str, Share]]
    weights: Version
    members: Mapping[str, tuple[str, ...]]
    lags: dict[int, int] = field(default_factory=dict)
    rewards_clipped: int = 0
    stale_groups: int = 0
    held_seconds: float = 0.0

    @property
    def sessions(self) -> int:
        return sum(len(group.sessions()) for group in self.groups)

    @property
    def recorded_tokens(self) -> int:
        return sum(share.tokens for account in self.accounts.values() for share in account.values())

    @property
    def rewarded(self) -> bool:
        """Whether anybody rewarded anything in it; silence counts 0, so without a reward all sessions are equal."""
        trained = (row for group in self.groups for row in group.trajectories)
        return any(span.raw_reward is not None for row in trained for span in row.spans)

    @property
    def group_ids(self) -> list[str]:
        return [group.id for group in self.groups]


def collected(ended: EndedGroup, interactions: Mapping[str, Sequence[Interaction]], recipe: Recipe) -> Collected:
    """The rows of a complete group, its sessions in start order."""
    trajectories = [
        row
        for session in ended.sessions
        for row in rows(
            session, interactions[session.id], recipe.export_style, recipe.turn_discount, recipe.reward_clip
        )
    ]
    fates = {session.id: tuple(map(fate, interactions[session.id])) for session in ended.sessions}
    return Collected(Group(ended.id, ended.task_id, tuple(trajectories)), fates)


def checked_ages(whole: Collected, gate: StalenessGate, stale: Literal["drop", "mask", "wait"]) -> Checked:
    """Every trained token's age against the gate's weights; mask leaves out the token alone, the others its whole session."""
    group, old = whole.group, [gate.too_old(row.versions, row.trained) for row in whole.group.trajectories]
    too_old = _per_interaction(whole, old)
    if not any(any(found.values()) for found in too_old.values()):
        return Checked(group, _shares(whole, too_old))
    if stale == "mask":
        kept = [replace(row, trained=row.trained & ~mask) for row, mask in zip(group.trajectories, old, strict=True)]
        survives = any(row.trained.any() for row in kept)
    else:
        kept = [row for row in group.trajectories if not any(too_old[row.session_id].values())]
        survives = len({row.session_id for row in kept}) >= survivors_needed(gate.limits.n_samples)
        too_old = {
            session: {one.interaction_id: one.trained for one in whole.fates[session]} if any(found.values()) else {}
            for session, found in too_old.items()
        }
    return Checked(replace(group, trajectories=tuple(kept)) if survives else None, _shares(whole, too_old))


def last_step(group: Group, gate: StalenessGate) -> int:
    """The last step that can train all of it: that of its oldest trained token's weights, plus the lag."""
    behind = max(int(gate.lag(row.versions)[row.trained].max(initial=0)) for row in group.trajectories)
    return gate.current.step + gate.limits.max_lag - behind


def batch_of(checked: Sequence[Checked], gate: StalenessGate, *, reward_clip: float | None) -> Batch:
    """These groups, sorted by task, so that the same ones make the same step whatever order they came in (settled 17)."""
    left = [one.group for one in checked if one.group is not None]
    groups = tuple(sorted(left, key=lambda group: (group.task_id, group.id)))
    trained = [row for group in groups for row in group.trajectories]
    lags = np.concatenate([gate.lag(row.versions)[row.trained] for row in trained])
    labels = np.unique(np.concatenate([row.versions[row.trained] for row in trained]))
    spans = {span.interaction_id: span for row in trained for span in row.spans}  # branches share their history
    rewards = [span.raw_reward or 0.0 for span in spans.values()]
    return Batch(
        groups,
        lag_mean=float(lags.mean()),
        lag_max=int(lags.max()),
        reward=sum(rewards) / len({row.session_id for row in trained}),
        rewards_clipped=sum(clipped(reward, reward_clip) != reward for reward in rewards),
        accounts={session: account for one in checked for session, account in one.shares.items()},
        weights=gate.current,
        members={one.group.id: tuple(one.shares) for one in checked if one.group is not None},
        lags=dict(zip(labels.tolist(), gate.lag(labels).tolist(), strict=True)),
    )


def _per_interaction(whole: Collected, old: Sequence[BoolArray]) -> dict[str, dict[str, int]]:
    """Session id -> interaction id -> how many of its tokens are too old; each token is trained in one row only."""
    found: dict[str, Counter[str]] = {session: Counter() for session in whole.fates}
    for row, mask in zip(whole.group.trajectories, old, strict=True):
        for span in row.spans:
            found[row.session_id][span.interaction_id] += int(mask[span.start : span.end].sum())
    return {session: dict(numbers) for session, numbers in found.items()}


def _shares(whole: Collected, too_old: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, Share]]:
    return {session: shares(fates, too_old[session]) for session, fates in whole.fates.items()}
