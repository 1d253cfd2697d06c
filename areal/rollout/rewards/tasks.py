"""What the run knows of a task by its id: the data of those that it gave out itself.

    tasks = KnownTasks([*train_tasks, *held_out])
    tasks.data("sum-17@2")        # of the task "sum-17" in the third epoch; also "sum-17.eval-40", its evaluation after step 40

Sessions keep task ids alone. A task that came over HTTP is known by nothing else, so its data are empty here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from areal.rollout.datasets import Task

_GIVEN_OUT = re.compile(r"(?:@\d+|\.eval-\d+)$")  # what endless() and Evaluation append


class KnownTasks:
    """By id, the first of those that have the same."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._data: dict[str, Mapping[str, Any]] = {}
        for task in tasks:
            self._data.setdefault(task.id, task.data)

    def data(self, task_id: str) -> Mapping[str, Any]:
        """Empty for a task that the run did not give out."""
        known = self._data.get(task_id)
        return known if known is not None else self._data.get(_GIVEN_OUT.sub("", task_id), {})
