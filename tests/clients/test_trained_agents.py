"""Real agents that the trainer starts itself, through their drivers, unmodified, with the real small model: trained for some steps, and
every token that was recorded is accounted for. What the model says is its own affair. OpenClaw's prompt takes 8,200 tokens, which is more
than that model holds and than a CPU trains in minutes: it gets the model's first two layers, with room for them, and one step."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal.base.metrics import read_metrics
from areal.models.fetch import resolve
from tests.books import balanced
from tests.clients.installs import CLAUDE_CODE, NODE_24, OPENCLAW, PYTHON_AGENTS, Agents

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(1500)]
ROOT = Path(__file__).resolve().parents[2]
STEPS, SAMPLES = 2, 2
BEYOND = re.compile(r"\.layers\.(?![01]\.)")
SMALL = [
    f"total_train_steps={STEPS}",
    "train_dataset.batch_size=1",
    f"gconfig.n_samples={SAMPLES}",
    "rollout.max_head_offpolicyness=0",
    "rollout.agent.gateway_port=0",
    "recover.freq_secs=null",
    "actor.optimizer.lr=1e-6",
]


PROCESSES = ["rollout.agent.process.max_running=2", "rollout.agent.process.timeout_seconds=900"]
BY_FUNCTION = ["rollout.agent.reward_source=function", "rollout.reward.path=tests.clients.programs.spread:spread"]


def train(folder: Path, tasks: list[dict[str, Any]], *overrides: str, **environment: str) -> None:
    """A whole run, to its end."""
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


def check(folder: Path, steps: int = STEPS) -> None:
    """Every session of every step was trained with tokens of its own, and moved the weights; sums hold."""
    books = balanced(folder / "run").books
    assert books.trained.sessions >= steps * SAMPLES
    assert books.trained.tokens > 0
    assert books.trained.interactions >= steps * SAMPLES
    assert max(read_metrics(folder / "run" / "logs" / "metrics.jsonl").series("train/grad_norm").values) > 0


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
    check(tmp_path)


def test_claude_code_in_processes_of_its_own(tmp_path: Path, installed: Callable[[Agents], Path]) -> None:
    programs = installed(CLAUDE_CODE) / "node_modules" / ".bin"
    train(
        tmp_path,
        [{"prompt": "Say hello."}],
        "agent.framework=claude_code",
        *BY_FUNCTION,
        "rollout.agent.max_turns=1",
        *PROCESSES,
        f"rollout.agent.chat_template={ROOT / 'tests' / 'clients' / 'templates' / 'chatml_tools.jinja'}",
        "actor.path=smollm2-135m",
        "rollout.agent.export_style=concat",  # its further calls go on in the row of the first: a fifth of the tokens to compute
        "actor.max_tokens_per_mb=2048",
        "actor.gradient_checkpointing=full",
        "gconfig.max_new_tokens=24",
        "rollout.native.max_context=4096",
        "rollout.native.kv_tokens=12288",
        PATH=f"{programs}{os.pathsep}{os.environ['PATH']}",
    )
    check(tmp_path)


def test_openclaw_in_processes_of_its_own(tmp_path: Path, installed: Callable[[Agents], Path]) -> None:
    programs = [installed(agents) / "node_modules" / ".bin" for agents in (OPENCLAW, NODE_24)]
    train(
        tmp_path,
        [{"prompt": "Say hello."}],
        "agent.framework=openclaw",
        "total_train_steps=1",
        *BY_FUNCTION,
        *PROCESSES,
        f"rollout.agent.chat_template={ROOT / 'tests' / 'clients' / 'templates' / 'chatml_tools.jinja'}",
        f"actor.path={two_layers(tmp_path / 'two_layers')}",
        "actor.gradient_checkpointing=full",
        "gconfig.max_new_tokens=16",
        "rollout.native.max_context=16384",
        "rollout.native.kv_tokens=40960",
        PATH=os.pathsep.join([*map(str, programs), os.environ["PATH"]]),
    )
    check(tmp_path, steps=1)


def two_layers(folder: Path) -> Path:
    """Of smollm2-135m, with its tokenizer, for contexts of 16,384 tokens."""
    from safetensors.numpy import load_file, save_file

    whole = resolve("smollm2-135m")
    shutil.copytree(whole, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "max_position_embeddings": 16384}
    (folder / "config.json").write_text(json.dumps(config))
    for path in folder.glob("*.safetensors"):
        kept = {name: value for name, value in load_file(path).items() if not BEYOND.search(name)}
        path.unlink()
        save_file(kept, path, metadata={"format": "pt"})
    return folder
