"""Where tasks come from, as `train_dataset.path` and `evaluator.path` name it.

    task_source("tasks.jsonl").kind                                    # "jsonl", also for any other ending
    task_source("tasks.parquet").kind                                  # "parquet"
    task_source("agent.py")       .kind                                # "agent_file": its AGENT_CONFIG["tasks"]
    task_source("reasoning-gym:chain_sum?size=200&min_terms=3")         # "reasoning_gym", name and options

Read by rollout/task_files.py; checked by own_agents.py before anything starts.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl

from areal.base.errors import ConfigError
from areal.config.yaml_text import boolean, number

Kind = Literal["jsonl", "parquet", "agent_file", "reasoning_gym"]
_GYM = ("reasoning-gym", "reasoning_gym")
_ENDINGS: dict[str, Kind] = {".parquet": "parquet", ".py": "agent_file"}


@dataclass(frozen=True, slots=True)
class TaskSource:
    """path: as it is written. name, options: of a reasoning-gym data set; size and seed are options too."""

    kind: Kind
    path: str
    name: str = ""
    options: dict[str, Any] = field(default_factory=dict)


def task_source(path: str) -> TaskSource:
    """Raises ConfigError for a reasoning-gym name that is written wrongly."""
    gym, mark, rest = path.partition(":")
    if gym in _GYM and mark:
        name, _, query = rest.partition("?")
        if not name.isidentifier():
            raise ConfigError(f"{path}: write it as reasoning-gym:NAME, for example reasoning-gym:chain_sum?size=500")
        pairs = parse_qsl(query, keep_blank_values=True)
        return TaskSource("reasoning_gym", path, name, {key: _value(text) for key, text in pairs})
    return TaskSource(_ENDINGS.get(Path(path).suffix.lower(), "jsonl"), path)


def source_problem(key: str, path: str) -> str | None:
    """Why tasks cannot be read from there, as far as that is known without reading them: a sentence with the remedy."""
    try:
        source = task_source(path)
    except ConfigError as error:
        return f"{key}={error}"
    if source.kind == "reasoning_gym":
        missing = not importlib.util.find_spec("reasoning_gym")
        return f"{key}={path} needs the reasoning-gym package: pip install 'areal[reasoning-gym]'" if missing else None
    if not Path(path).is_file():
        return (
            f"{key}={path} is no file (looked in {Path.cwd()}); name a JSONL or Parquet file with one task a line, or a generated data set "
            "as in reasoning-gym:chain_sum"
        )
    if source.kind == "parquet" and not importlib.util.find_spec("pyarrow"):
        return f"{key}={path} needs pyarrow: pip install 'areal[parquet]', or write the tasks as JSON lines"
    return None


def _value(text: str) -> Any:
    for read in (number, boolean):
        if (found := read(text)) is not None:
            return found
    return text
