"""A run with more nets than the policy: a reference and a critic in ranks of their own, learned, saved and taken up again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from areal.base.metrics import read_metrics
from tests.books import balanced

ROOT = Path(__file__).resolve().parents[2]
NETS = (
    "actor.algorithm=ppo",
    "actor.kl_ctl=0.01",
    "actor.gae_lambda=0.95",
    "ref.path=tiny-qwen3-warm",
    "critic.path=tiny-qwen3-warm",
    "critic.optimizer.lr=1e-3",
)


def train(folder: Path, steps: int, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "areal.train", "--config", "configs/tiny.yaml", "--output-dir", str(folder)]
    own = [f"total_train_steps={steps}", "rollout.agent.gateway_port=0", f"cluster.fileroot={folder.parent}"]
    own += ["train_dataset.batch_size=4", "saver.keep=1"]
    return subprocess.run(
        [*command, *own, *overrides], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=280
    )


def test_a_critic_and_a_reference_serve_a_run_and_its_resumption(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = train(folder, 2, *NETS)
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "critic-000002",
        "latest",
        "step-000002",
    ]
    balanced(folder)
    second = train(folder, 4, *NETS)
    assert second.returncode == 0, second.stdout[-3000:] + second.stderr[-3000:]
    assert len(balanced(folder).books.trained_by_version) == 4
    table = read_metrics(folder / "logs" / "metrics.jsonl")
    assert len(table.series("train/ref_kl").values) == 4
    errors = table.series("train/critic_value_error").values
    assert len(errors) == 4
    assert all(error > 0 for error in errors)
    assert (folder / "logs" / "critic-0.log").exists()
    assert (folder / "logs" / "reference-0.log").exists()
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "critic-000002",
        "critic-000004",
        "latest",
        "step-000002",
        "step-000004",
    ]
