"""Tasks for agents that the service runs itself: in an order fixed by the seed, for as many epochs as needed.

    tasks = read_tasks("train.jsonl")                                   # task_files.py
    for task in endless(tasks, seed=1, shuffle=True): task.id, task.data
    for task in endless(tasks, seed=1, shuffle=True, given=await store.training.interrupt()): ...    # a resumed run

The id handed out carries the epoch, so that a
task met again in the next epoch forms a new group. The order is a pure function of (file, seed); the place in it is not kept anywhere: a
resumed run leaves out what the store says was given out, and completes first what was interrupted. So nothing is skipped and nothing
comes twice, also where a step was lost or the file has grown.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from areal.store.base import Given


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to try. data: its JSON object, handed to the agent unchanged. samples: how many sessions of it are wanted,
    None = as many as of every other task."""

    id: str
    data: dict[str, Any]
    samples: int | None = None


def endless(
    tasks: Sequence[Task], *, seed: int, shuffle: bool, given: Mapping[str, Given] | None = None
) -> Iterator[Task]:
    """Epoch after epoch, each shuffled by (seed, epoch); from the second epoch on ids end in `@epoch`. given: what was given out
    before; of that, only what its running groups still lack comes again."""
    groups = Counter({task_id: one.groups for task_id, one in (given or {}).items()})
    missing = {task_id: one.missing for task_id, one in (given or {}).items()}
    for epoch in count():
        order = list(tasks)
        if shuffle:
            random.Random(f"{seed}:{epoch}").shuffle(order)
        for task in order:
            own = task if epoch == 0 else Task(f"{task.id}@{epoch}", task.data)
            if groups[own.id] == 0:
                yield own
                continue
            groups[own.id] -= 1
            if wanted := missing.pop(own.id, 0):
                yield replace(own, samples=wanted)


def comes_from(tasks: Sequence[Task]) -> Callable[[str], bool]:
    """Whether an id that was handed out is one of these tasks, of whichever epoch."""
    ids = {task.id for task in tasks}
    return lambda task_id: task_id in ids or task_id.rpartition("@")[0] in ids
