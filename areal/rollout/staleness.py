"""Staleness: which weights are current, and how old a recorded token is when it would be trained.

    gate = await StalenessGate.open(store.training, limits, incarnation="a1b2", first_step=0)
    gate.current                         # Version(label=4, step=4)
    await gate.learn(versions)           # labels of an earlier life of the run are looked up in the store
    gate.lag(versions)                   # steps behind the weights being trained, one per token
    await gate.reserve(gate.next_version())    # before anybody can sample under it: its label is taken
    await gate.advance(gate.next_version(), consumed=ids)     # a step was trained and published: its groups are consumed, slots open
    await gate.running()                 # groups that still run, and the step of the oldest weights they may have sampled with

The supply is bounded by the store's admission (store/admission.py, settled 3); this class publishes the limits it
applies and moves the version. Lag is a difference of *steps*: labels are never reused, so tokens of a lost timeline keep
their own (settled 4). One owner, the controller's event loop. Used by batcher.py, dispatcher.py and train.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from areal.base.types import BoolArray, IntArray, Limits, Version
from areal.store.base import TrainingStore


@dataclass(frozen=True, slots=True)
class RunningGroup:
    """opened_at: the step of the weights that were current when it opened, so none of its tokens is older."""

    id: str
    task_id: str
    opened_at: int


NEVER = np.iinfo(np.int32).max  # the lag of a label nobody published


class StalenessGate:
    """Current version, lag of tokens, and the signal that slots may have opened."""

    def __init__(self, training: TrainingStore, limits: Limits, current: Version) -> None:
        self._training = training
        self._steps: dict[int, int] = {current.label: current.step}
        self.limits = limits
        self.current = current
        self.opened = asyncio.Event()  # set whenever slots may have opened; the dispatcher clears it
        self._opened_at: dict[str, int] = {}  # of the groups that ran when we last looked

    @classmethod
    async def open(
        cls, training: TrainingStore, limits: Limits, *, incarnation: str, first_step: int = 0
    ) -> StalenessGate:
        """Publish the limits and the version that a (re)started run begins with, under a label of its own."""
        last = await training.version()
        current = Version(label=last.label + 1 if last else 0, step=first_step, incarnation=incarnation)
        await training.set_limits(limits)
        await training.advance(current, [])
        gate = cls(training, limits, current)
        # What runs already was opened in an earlier life: it counts as old as can still be trained.
        running, _ = await training.occupancy()
        gate._opened_at = {group.id: first_step - limits.max_lag for group in running}
        return gate

    def next_version(self) -> Version:
        """The label and step of the weights that the running training step will make."""
        return Version(self.current.label + 1, self.current.step + 1, self.current.incarnation)

    async def reserve(self, version: Version) -> None:
        """Take the label before the first server can sample under it: if the run dies before `advance`, tokens that carry it keep
        it for themselves, and the next life takes the label after it (settled 4). Nothing else changes yet."""
        await self._training.advance(version, [])
        self._steps[version.label] = version.step

    async def running(self) -> list[RunningGroup]:
        """The groups that run, in the order in which they opened."""
        seen, _ = await self._training.occupancy()
        self._opened_at = {group.id: self._opened_at.get(group.id, self.current.step) for group in seen}
        return [RunningGroup(group.id, group.task_id, self._opened_at[group.id]) for group in seen]

    async def advance(self, version: Version, consumed: Sequence[str]) -> None:
        """The step is trained and served: one transaction for the version row and what it consumed."""
        await (
            self.running()
        )  # what is new by now opened under the former weights: the servers have left them, the gate has not
        await self._training.advance(version, consumed)
        self._steps[version.label] = version.step
        self.current = version
        self.opened.set()

    async def close_admission(self) -> None:
        """Drain: new sessions get 503 from here on, running ones go on."""
        self.limits = replace(self.limits, accepting=False)
        await self._training.set_limits(self.limits)

    async def hold(self, reason: str) -> None:
        """No group opens any more, with this reason in every refusal, until `hold("")`. Running sessions go on."""
        self.limits = replace(self.limits, held=reason)
        await self._training.set_limits(self.limits)
        if not reason:
            self.opened.set()

    async def learn(self, labels: Iterable[int]) -> None:
        """Look up labels this process has not published itself."""
        for label in set(labels) - self._steps.keys() - {-1}:
            row = await self._training.version(label)
            self._steps[label] = row.step if row else -NEVER

    def lag(self, versions: IntArray) -> IntArray:
        """Steps between each token's weights and the current ones [n]; 0 where nothing was sampled (version -1)."""
        labels, where = np.unique(versions, return_inverse=True)
        behind = [0 if label < 0 else self.current.step - self._steps[int(label)] for label in labels]
        return np.minimum(np.asarray(behind, dtype=np.int64), NEVER).astype(np.int32)[where]

    def too_old(self, versions: IntArray, trained: BoolArray) -> BoolArray:
        """True at trained tokens that are more than max_lag steps behind [n]."""
        return trained & (self.lag(versions) > self.limits.max_lag)
