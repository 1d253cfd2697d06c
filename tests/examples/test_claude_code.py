"""examples/claude_code: the agent in its own folder per try, a check that rewards it, over HTTP and inside the service."""

from __future__ import annotations

import stat
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.examples.service import Running, calls, run

CONFIG = "claude_code/config.yaml"
AGENT, TASKS = "examples.claude_code.agent:ClaudeCode", "examples/claude_code/tasks.jsonl"
FIX = r"printf 'def mean(numbers):\n    return sum(numbers) / len(numbers)\n' > mean.py && cat mean.py"
SCRIPT: list[dict[str, Any]] = [
    {"when": r"mean\.py is wrong", "pieces": ["I see.\n", calls("Bash", command=FIX), "<|im_end|>"]},
    {"when": r"mean\.py is wrong", "pieces": ["Fixed.", "<|im_end|>"]},
    {"pieces": ["I cannot do that.", "<|im_end|>"]},
]


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    """A `claude` that this machine has for sure."""
    program = tmp_path / "claude"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("claude_stand_in.py")} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


def check(service: Running, task_id: str, reward: float, turns: int, tries: int) -> None:
    found = [each for each in service.sessions() if each[0].session.task_id == task_id]
    assert len(found) == tries
    for summary, recorded in found:
        assert (summary.session.ending, summary.reward) == ("ended", reward)
        parents = [None, *(one.id for one in recorded[:-1])]
        assert [one.token_parent for one in recorded] == parents, "its own sampled tokens go on"
        assert len(recorded) == turns
        assert [one.tags for one in recorded] == [()] * turns


def test_each_try_is_rewarded_by_its_check_and_by_nobody_else(tmp_path: Path, stand_in: str) -> None:
    with run(tmp_path, CONFIG, script=SCRIPT) as service:
        missing = service.play(AGENT, TASKS, CLAUDE="/nowhere/claude")
        assert missing.returncode != 0
        assert "npm install -g @anthropic-ai/claude-code" in missing.stderr
        played = service.play(AGENT, TASKS, "--samples", "4", "--groups", "2", "--limit", "2", CLAUDE=stand_in)
        assert (played.returncode, played.stdout) == (0, "played 2 tasks\n"), played.stderr
        check(service, "mean", reward=1.0, turns=2, tries=4)
        check(service, "greet", reward=0.0, turns=1, tries=4)


def test_the_service_runs_it_by_itself(tmp_path: Path, stand_in: str) -> None:
    inline = ("rollout.agent.mode=inline", f"rollout.agent.path={AGENT}", f"train_dataset.path={TASKS}")
    overrides = (*inline, "gconfig.n_samples=2", "train_dataset.shuffle=false", "rollout.max_concurrent_rollouts=1")
    with run(tmp_path, CONFIG, *overrides, script=SCRIPT, CLAUDE=stand_in) as service:
        deadline = time.monotonic() + 120
        while not any(one.session.task_id == "greet" and one.session.ending for one, _ in service.sessions()):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        check(service, "mean", reward=1.0, turns=2, tries=2)
