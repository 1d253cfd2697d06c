"""examples/claude_code: the agent in its own folder per try, a check that rewards it, started by the run."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.examples.service import ROOT, Running, calls, run

CONFIG = "claude_code/config.yaml"
FIX = r"printf 'def mean(numbers):\n    return sum(numbers) / len(numbers)\n' > mean.py && cat mean.py"
SCRIPT: list[dict[str, Any]] = [
    {"when": r"mean\.py is wrong", "pieces": ["I see.\n", calls("Bash", command=FIX), "<|im_end|>"]},
    {"when": r"mean\.py is wrong", "pieces": ["Fixed.", "<|im_end|>"]},
    {"pieces": ["I cannot do that.", "<|im_end|>"]},
]


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A `claude` that this machine has for sure, in a folder of its own."""
    program = tmp_path / "bin" / "claude"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("claude_stand_in.py")} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def check(service: Running, task_id: str, reward: float, turns: int, tries: int) -> None:
    found = [each for each in service.sessions() if each[0].session.task_id == task_id]
    assert len(found) == tries
    for summary, recorded in found:
        assert (summary.session.ending, summary.reward) == ("ended", reward)
        parents = [None, *(one.id for one in recorded[:-1])]
        assert [one.token_parent for one in recorded] == parents, "its own sampled tokens go on"
        assert len(recorded) == turns
        assert [one.tags for one in recorded] == [()] * turns


def test_the_run_starts_it_for_each_try_and_its_check_and_nobody_else_rewards(tmp_path: Path, stand_in: Path) -> None:
    overrides = ("train_dataset.shuffle=false", "rollout.max_concurrent_rollouts=2")
    with run(
        tmp_path, CONFIG, *overrides, script=SCRIPT, PATH=f"{stand_in.parent}{os.pathsep}{os.environ['PATH']}"
    ) as service:
        wait_for(service, "greet", 4)
        check(service, "mean", reward=1.0, turns=2, tries=4)
        check(service, "greet", reward=0.0, turns=1, tries=4)
        log = (service.folder / "logs" / "agents-w0.log").read_text()
        assert "greet | ModuleNotFoundError" in log
        assert "sk-model-" not in log


def test_without_it_nothing_starts_and_the_install_line_is_said(tmp_path: Path) -> None:
    words = ["--config", f"examples/{CONFIG}", "--output-dir", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "areal.train", *words],
        cwd=ROOT,
        env={**os.environ, "PATH": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "npm install -g @anthropic-ai/claude-code" in done.stderr
    assert not (tmp_path / "run").exists()


def wait_for(service: Running, task_id: str, sessions: int) -> None:
    """Until so many sessions of a task have ended."""
    deadline = time.monotonic() + 240
    while (
        sum(one.session.task_id == task_id and one.session.ending is not None for one, _ in service.sessions())
        < sessions
    ):
        assert time.monotonic() < deadline
        assert service.process.poll() is None
        time.sleep(0.2)
