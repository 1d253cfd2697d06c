"""A run that trains an adapter, through the whole service: it learns, publishes little, is taken up again and made again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from areal.base.metrics import read_metrics
from areal.engine.checkpoint_files import read_mark
from areal.models.adapter import read_adapter
from areal.models.fetch import resolve
from tests.books import balanced

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
STEPS = 20
LORA = (
    "actor.lora.rank=8",
    "actor.lora.alpha=16",
    "actor.optimizer.lr=2e-3",
    "actor.kl_ctl=0.001",
    "ref.path=tiny-qwen3-warm",
)


def train(folder: Path, steps: int, *overrides: str) -> None:
    command = [sys.executable, "-m", "areal.train", "--config", "configs/tiny.yaml", "--output-dir", str(folder)]
    own = [f"total_train_steps={steps}", "rollout.agent.gateway_port=0", f"cluster.fileroot={folder.parent}"]
    done = subprocess.run(
        [*command, *own, *LORA, *overrides],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "run"
    train(folder, STEPS)
    return folder


def test_an_adapter_learns_and_what_is_sampled_is_what_is_trained(folder: Path) -> None:
    table = read_metrics(folder / "logs" / "metrics.jsonl")
    rewards = table.series("train/reward").values
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
    assert max(table.series("train/logprob_gap_max").values) < 1e-4
    kl = table.series("train/ref_kl").values
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert kl[-1] > 1e-4, "the reference stayed where it was"
    assert not (folder / "logs" / "reference-0.log").exists(), "the policy without its adapter is the reference"
    assert len(balanced(folder).books.trained_by_version) == STEPS


def test_the_saved_model_is_the_base_and_the_adapter(folder: Path) -> None:
    saved = folder / "checkpoints" / f"step-{STEPS:06d}"
    base, adapter = load_file(resolve("tiny-qwen3-warm") / "model.safetensors"), read_adapter(saved / "adapter")
    merged = load_file(saved / "model.safetensors")
    assert {name for name in base if not merged[name].equal(base[name])} == adapter.pairs.keys()
    assert all(merged[name].equal(adapter.on(name, tensor)) for name, tensor in base.items())
    with safe_open(saved / "adapter" / "adapter_model.safetensors", "pt") as file:
        numbers = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    assert numbers < 0.15 * sum(tensor.numel() for tensor in base.values())


def test_it_goes_on_with_its_weights_on_the_host_and_a_step_is_made_again(folder: Path) -> None:
    """Two more steps under offload; the servers started from base and adapter say the same as what goes on training."""
    train(folder, STEPS + 2, "actor.offload=all", "recover.freq_steps=1", "recover.freq_secs=null")
    table = read_metrics(folder / "logs" / "metrics.jsonl")
    gaps = table.series("train/logprob_gap_max")
    assert len(gaps.values) == STEPS + 2
    assert max(gaps.values) < 1e-4
    between = read_mark(folder / "checkpoints" / f"step-{STEPS + 1:06d}")
    assert between.has_adapter
    assert between.resumable
    assert not between.has_model
    command = [sys.executable, "-m", "areal.replay", str(folder), "--step", str(STEPS + 1)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"step {STEPS + 1}: bit-equal" in done.stdout
