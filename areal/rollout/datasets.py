"""Tasks for agents that the service runs itself: JSON lines, in an order fixed by the seed, for as many epochs as needed.

    tasks = read_tasks("train.jsonl")
    for task in endless(tasks, seed=1, shuffle=True, skip=0): task.id, task.data

A line is a JSON object; its `task_id` (or its line number) names the task. The id handed out carries the epoch, so that a
task met again in the next epoch forms a new group. The order is a pure function of (file, seed): a resumed run skips what
its earlier steps took and goes on from there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from areal.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to try. data: the line's JSON object, handed to the agent unchanged."""

    id: str
    data: dict[str, Any]


def read_tasks(path: str) -> list[Task]:
    """All tasks of a JSONL file. Raises ConfigError naming the line that cannot be read."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"task file {path} does not exist; give a JSONL file, one task a line")
    tasks = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            data = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}:{number} is not a JSON object ({error}); write one task a line") from error
        tasks.append(Task(str(data.get("task_id", f"{file.stem}-{number}")), data))
    if not tasks:
        raise ConfigError(f"task file {path} holds no task; write one JSON object a line")
    return tasks


def endless(tasks: Sequence[Task], *, seed: int, shuffle: bool, skip: int = 0) -> Iterator[Task]:
    """Epoch after epoch, each shuffled by (seed, epoch); from the second epoch on ids end in `@epoch`. skip: tasks of the
    order that are left out at its beginning."""
    epoch, skip = divmod(skip, len(tasks))
    while True:
        order = list(tasks)
        if shuffle:
            random.Random(f"{seed}:{epoch}").shuffle(order)
        for task in order[skip:]:
            yield task if epoch == 0 else Task(f"{task.id}@{epoch}", task.data)
        epoch, skip = epoch + 1, 0
