"""A run with more nets than the policy: a reference and a critic in ranks of their own, learned, saved and taken up again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
        [*command, *own, *overrides], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=580
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, taken up again for two more."""
    folder = tmp_path_factory.mktemp("nets") / "run"
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
    return folder


def test_a_critic_and_a_reference_serve_a_run_and_its_resumption(folder: Path) -> None:
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


def replayed(folder: Path, step: int) -> list[str]:
    command = [sys.executable, "-m", "areal.replay", str(folder), "--step", str(step)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    return [" ".join(line.split()[:3]) for line in done.stdout.splitlines()]


@pytest.mark.heavy
def test_steps_with_a_critic_and_a_reference_are_made_again_bit_for_bit(folder: Path) -> None:
    assert replayed(folder, 3) == ["step 3: from", "step 2: bit-equal:", "step 3: bit-equal:"]


@pytest.mark.heavy
def test_a_replay_crosses_from_one_life_of_a_run_into_the_next(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    for name in ("step-000002", "critic-000002"):
        shutil.rmtree(copy / "checkpoints" / name)
    assert replayed(copy, 3)[1:] == [f"step {step}: bit-equal:" for step in range(4)]
