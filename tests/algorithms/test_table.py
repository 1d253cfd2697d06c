"""The config's names and the tables agree (house rule 6)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import get_args

import pytest

from areal.algorithms import ALGORITHMS
from areal.algorithms.schedules import SCHEDULES, learning_rate
from areal.config.algorithms import TRAITS
from areal.config.engine import LrSchedule
from areal.config.objective import AlgorithmName


def test_the_names_in_the_config_are_the_table() -> None:
    assert set(get_args(AlgorithmName)) - {"auto"} == set(ALGORITHMS) == set(TRAITS)
    assert all(name == algorithm.name for name, algorithm in ALGORITHMS.items())
    assert set(get_args(LrSchedule)) == set(SCHEDULES)


def rates(schedule: str, steps: int, **settings: float) -> list[float]:
    chosen = {"warmup_steps": 2, "total_steps": 10, "min_lr_ratio": 0.1} | settings
    return [learning_rate(step, lr=1.0, schedule=schedule, **chosen) for step in range(steps)]  # type: ignore[arg-type]


def test_warm_up_then_the_shape() -> None:
    assert rates("constant", 4) == [0.5, 1.0, 1.0, 1.0]
    assert rates("linear", 12) == pytest.approx([0.5, 1.0] + [1 - 0.9 * k / 8 for k in range(8)] + [0.1, 0.1])
    naive = [0.1 + 0.45 * (1 + math.cos(math.pi * k / 8)) for k in range(9)]
    assert rates("cosine", 11) == pytest.approx([0.5, 1.0, *naive])


def test_no_warm_up_starts_at_the_top() -> None:
    assert rates("linear", 1, warmup_steps=0) == [1.0]


def test_every_algorithm_has_its_section_in_the_docs() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "algorithms.md").read_text()
    sections = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    assert [name for name in sections if name in ALGORITHMS] == list(ALGORITHMS)
    for algorithm in ALGORITHMS:
        text = page.partition(f"## {algorithm}\n")[2].partition("\n## ")[0]
        assert "L = " in text or "loss" in text or "grpo" in text
        assert "http" in text or "same paper" in text, f"{algorithm} has no source"
