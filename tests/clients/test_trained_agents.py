"""Real agents that the trainer starts itself, through their drivers, unmodified, with the real small model: trained for some steps, and
every token that was recorded is accounted for. What the model says is its own affair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.books import balanced
from tests.clients.installs import CLAUDE_CODE, PYTHON_AGENTS, Agents

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(1500)]
ROOT = Path(__file__).resolve().parents[2]
STEPS, SAMPLES = 2, 2
SMALL = [
    f"total_train_steps={STEPS}",
    "train_dataset.batch_size=1",
    f"gconfig.n_samples={SAMPLES}",
    "rollout.max_head_offpolicyness=0",
    "rollout.agent.gateway_port=0",
    "rollout.agent.process.max_running=2",
    "recover.freq_secs=null",
    "actor.optimizer.lr=1e-6",
]


def train(folder: Path, tasks: list[dict[str, Any]], *overrides: str, **environment: str) -> dict[str, Any]:
    """A whole run. Its metrics by step, and its books, which balance."""
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    words = [
        "--output-dir",
        str(folder / "run"),
        f"cluster.fileroot={folder}",
        f"train_dataset.path={folder / 'tasks.jsonl'}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "areal.train", *words, *SMALL, *overrides],
        cwd=ROOT,
        env={**os.environ, "XDG_STATE_HOME": str(folder / "state"), "LANGSMITH_TRACING": "false", **environment},
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )
    logs = {path.name: path.read_text()[-3000:] for path in (folder / "run" / "logs").glob("*.log")}
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-2000:]}{logs}"
    return logs


def check(folder: Path, answers: int) -> None:
    """Every session of every step was trained with tokens of its own, at least so many answers; sums hold."""
    books = balanced(folder / "run").books
    assert books.trained.sessions >= STEPS * SAMPLES
    assert books.trained.tokens > 0
    assert books.trained.interactions >= answers


def test_a_langchain_agent_in_the_workers_own_loop(tmp_path: Path, installed: Callable[[Agents], Path]) -> None:
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = installed(PYTHON_AGENTS) / "lib" / version / "site-packages"
    train(
        tmp_path,
        [{"prompt": "Say a number.", "wanted": 7}],
        "agent.framework=langchain",
        "rollout.agent.path=tests.clients.programs.graph:build",
        "rollout.agent.max_turns=3",
        "actor.path=smollm2-135m",
        "gconfig.max_new_tokens=16",
        "rollout.native.max_context=1024",
        "rollout.native.kv_tokens=4096",
        PYTHONPATH=os.fspath(packages),
    )
    check(tmp_path, answers=STEPS * SAMPLES)


def test_claude_code_in_processes_of_its_own(tmp_path: Path, installed: Callable[[Agents], Path]) -> None:
    programs = installed(CLAUDE_CODE) / "node_modules" / ".bin"
    train(
        tmp_path,
        [{"prompt": "Say hello.", "check": ["true"]}],
        "agent.framework=claude_code",
        "rollout.agent.max_turns=2",
        "rollout.agent.reward_key=admin",
        "rollout.agent.process.timeout_seconds=300",
        f"rollout.agent.chat_template={ROOT / 'tests' / 'clients' / 'templates' / 'chatml_tools.jinja'}",
        "actor.path=smollm2-135m",
        "actor.max_tokens_per_mb=2048",
        "gconfig.max_new_tokens=24",
        "rollout.native.max_context=4096",
        "rollout.native.kv_tokens=12288",
        PATH=f"{programs}{os.pathsep}{os.environ['PATH']}",
    )
    check(tmp_path, answers=STEPS * SAMPLES)
