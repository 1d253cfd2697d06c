"""Which running groups a training step waits for, so that what they sampled is not too old when they end.

    held_by(current=7, size=2, taken=[9, 9], left=[7, 9])      # [0]: what must be trained at step 7 still runs

A group can be trained up to its *last step*: the step of the oldest weights that may have sampled for it, plus max_lag. Admission
(store/admission.py) lets in no more than can be trained in time if nothing overtakes; finished groups do overtake, so a step
is begun only if all that stays behind still fits into the steps that it has: for every step d, the groups with a last step of at most d
number no more than (d - current) * size. What a step takes is ordered by last step, so only groups that run can be missing. Where more
is late than the steps can hold (a recovery hands back several steps' worth), a step that is full of what is as urgent waits for nobody.

`Debts` says who is waited for: everyone (`rollout.stale_tokens: wait`), or (drop, mask) a group of a task for each that this task has lost
as stale, so that about as many groups of a task slower than max_lag steps are trained as are lost (T061). Pure, but for that memory,
which lasts as long as the process. Used by batcher.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def held_by(*, current: int, size: int, taken: Sequence[int], left: Sequence[int]) -> list[int]:
    """Which of `left` the step must wait for, as indices; empty if it may begin.

    taken, left: the last steps of the groups that the step would train, and of those that would stay behind; of protected
    groups alone. size: the most groups of a step. What is beyond saving (last step < current) is not waited for."""
    order = sorted((last, index) for index, last in enumerate(left) if last >= current)
    for position, (last, _) in enumerate(order):
        late = position + 1 - (last - current) * size
        if late > 0 and sum(one <= last for one in taken) < size:
            return [index for _, index in order[: position + 1]]
    return []


class Debts:
    """How many groups of each task are owed patience: one for each that was lost. everyone: all tasks, always."""

    def __init__(self, *, everyone: bool) -> None:
        self._everyone = everyone
        self._owed: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return self._everyone or bool(self._owed)

    def __contains__(self, task_id: str) -> bool:
        return self._everyone or task_id in self._owed

    def lost(self, task_id: str) -> None:
        """A group of this task, or a part of one, came too late."""
        self._owed[task_id] += 1

    def trained(self, task_id: str) -> None:
        """One was trained with nothing lost."""
        if self._owed[task_id] > 1:
            self._owed[task_id] -= 1
        else:
            del self._owed[task_id]
