"""Tasks from every kind of source: the same every time, and what cannot be read is named with its file and line."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from areal.base.errors import ConfigError
from areal.rollout.task_files import read_tasks


def test_json_lines_end_at_line_feeds_only_and_need_no_id(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"task_id": "a", "x": "one\u2028line\x85"}\r\n\n{"x": 2}', encoding="utf-8")
    tasks = read_tasks(str(path))
    assert [(task.id, task.data["x"]) for task in tasks] == [("a", "one\u2028line\x85"), ("some-3", 2)]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"x": 1}\n[1]\n', r"some\.jsonl:2 is not a JSON object"),
        (b'{"x": 1}\n\n{"x": \n', r"some\.jsonl:3 is not a JSON object"),
        (b'{"x": "\xff"}\n', r"some\.jsonl:1 is not a JSON object"),
        (b"\n", r"some\.jsonl holds no task"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / "some.jsonl").write_bytes(data)
    with pytest.raises(ConfigError, match=says):
        read_tasks(str(tmp_path / "some.jsonl"))


def test_parquet_rows_are_tasks(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    rows = [
        {"task_id": "a", "deep": {"n": [1, 2]}, "day": date(2026, 1, 2)},
        {"task_id": None, "deep": None, "day": None},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    first, second = read_tasks(str(path))
    assert (first.id, first.data) == ("a", {"task_id": "a", "deep": {"n": [1, 2]}, "day": "2026-01-02"})
    assert (second.id, second.data) == ("rows-2", {})
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(ConfigError, match=r"rows\.parquet, after row 0: it cannot be read as Parquet"):
        read_tasks(str(path))


def test_a_list_in_an_agent_file(tmp_path: Path) -> None:
    path = tmp_path / "agent_config.py"
    path.write_text('AGENT_CONFIG = {"tasks": ["say hi", {"task_id": "b", "prompt": "say bye"}]}\n')
    assert [(task.id, task.data["prompt"]) for task in read_tasks(str(path))] == [
        ("agent_config-1", "say hi"), ("b", "say bye"),
    ]  # fmt: skip
    path.write_text('AGENT_CONFIG = {"tasks": ["say hi", 7]}\n')
    with pytest.raises(ConfigError, match=r"tasks\[1\] is 7; a task is a text or an object"):
        read_tasks(str(path))


def test_reasoning_gym_by_name() -> None:
    import reasoning_gym

    source = "reasoning-gym:chain_sum?size=3&seed=7&min_terms=2&max_terms=2"
    tasks, again = read_tasks(source), read_tasks(source)
    assert tasks == again
    assert [task.id for task in tasks] == [f"chain_sum-7-{number}" for number in range(3)]
    entries = reasoning_gym.create_dataset("chain_sum", size=3, seed=7, min_terms=2, max_terms=2)
    assert [(task.data["question"], task.data["answer"]) for task in tasks] == [
        (e["question"], e["answer"]) for e in entries
    ]
    assert entries.score_answer(tasks[0].data["answer"], tasks[0].data) == 1.0
    [first, *_] = read_tasks("reasoning-gym:knights_knaves?size=2")
    assert isinstance(first.data["answer"], str), "some data sets are made with numpy"
    for wrong, says in (
        ("nothing", "has no data set nothing; it has "),
        ("chain_sum?sice=3", "chain_sum has no sice; it has .*size"),
        ("chain_sum?min_terms=0", "cannot be made with these options: min_terms must be positive"),
    ):
        with pytest.raises(ConfigError, match=says):
            read_tasks(f"reasoning-gym:{wrong}")
