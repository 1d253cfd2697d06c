"""Reads tasks from wherever train_dataset.path and evaluator.path say (config/task_source.py): JSON lines, Parquet, a list in an agent file,
or the procedural data sets of reasoning-gym.

    for task in read_tasks("train.jsonl"): task.id, task.data

A task is a JSON object; its `task_id`, else its place in the file, names it. A text in an agent file is {"prompt": text}. The same source gives
the same tasks in the same order every time, which is what a resumed run counts on. Used by assemble.py, before anything starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from areal.base.errors import ConfigError
from areal.config.agent_file import listed_tasks
from areal.config.task_source import Kind, TaskSource, task_source
from areal.rollout.datasets import Task

GYM_SIZE, GYM_SEED = 500, 1


def read_tasks(path: str) -> list[Task]:
    """All tasks. Raises ConfigError naming the file and the line that cannot be read."""
    source = task_source(path)
    if source.kind != "reasoning_gym" and not Path(path).is_file():
        raise ConfigError(f"task file {path} does not exist; give a JSONL file, one task a line")
    tasks = list(_READERS[source.kind](source))
    if not tasks:
        raise ConfigError(f"task file {path} holds no task; write one JSON object a line")
    return tasks


def _jsonl(source: TaskSource) -> Iterator[Task]:
    """Lines end at line feeds only: the other separators of Unicode may stand in a text."""
    with Path(source.path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                data = msgspec.json.decode(line, type=dict[str, Any])
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"{source.path}:{number} is not a JSON object ({error}); write one task a line"
                ) from error
            yield _task(data, f"{Path(source.path).stem}-{number}")


def _parquet(source: TaskSource) -> Iterator[Task]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"{source.path} needs pyarrow ({error}): pip install 'areal[parquet]'") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(source.path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield _task(_plain(source.path, number, row), f"{Path(source.path).stem}-{number}")
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{source.path}, after row {number}: it cannot be read as Parquet ({error})") from error


def _plain(path: str, number: int, row: dict[str, Any]) -> dict[str, Any]:
    """A row as JSON has it: times become texts, absent values go."""
    try:
        text = msgspec.json.encode({k: v for k, v in row.items() if v is not None}, enc_hook=_of_numpy)
        data: dict[str, Any] = msgspec.json.decode(text)
    except (TypeError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}, row {number}: a value is nothing that JSON has ({error})") from error
    return data


def _of_numpy(value: Any) -> Any:
    """Some data sets of reasoning-gym make their tasks with it."""
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} {value!r:.80}")


def _listed(source: TaskSource) -> Iterator[Task]:
    path = Path(source.path)
    for number, task in enumerate(listed_tasks(path), 1):
        data = {"prompt": task} if isinstance(task, str) else _plain(source.path, number, task)
        yield _task(data, f"{path.stem}-{number}")


def _gym(source: TaskSource) -> Iterator[Task]:
    """{"question", "answer", "metadata", "dataset"}; the answer is checked by the data set's own rule (docs/agents.md)."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            f"{source.path} needs the reasoning-gym package ({error}): pip install 'areal[reasoning-gym]'"
        ) from error
    from reasoning_gym.factory import DATASETS

    if source.name not in DATASETS:
        raise ConfigError(
            f"{source.path}: reasoning-gym has no data set {source.name}; it has {', '.join(sorted(DATASETS))}"
        )
    known = {each.name for each in dataclasses.fields(DATASETS[source.name][1])}
    if unknown := sorted(set(source.options) - known):
        raise ConfigError(
            f"{source.path}: {source.name} has no {', '.join(unknown)}; it has {', '.join(sorted(known))}"
        )
    options = {"size": GYM_SIZE, "seed": GYM_SEED} | source.options
    try:
        entries = list(reasoning_gym.create_dataset(source.name, **options))
    except (AssertionError, TypeError, ValueError) as error:  # how its settings are checked
        raise ConfigError(f"{source.path}: {source.name} cannot be made with these options: {error}") from error
    for number, entry in enumerate(entries):
        data = {name: entry[name] for name in ("question", "answer", "metadata")} | {"dataset": source.name}
        yield _task(_plain(source.path, number + 1, data), f"{source.name}-{options['seed']}-{number}")


def _task(data: dict[str, Any], name: str) -> Task:
    return Task(str(data.get("task_id", name)), data)


_READERS: dict[Kind, Callable[[TaskSource], Iterator[Task]]] = {
    "jsonl": _jsonl,
    "parquet": _parquet,
    "agent_file": _listed,
    "reasoning_gym": _gym,
}
