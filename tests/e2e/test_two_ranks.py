"""A real model on two ranks through the whole service, on one machine: it trains, publishes, saves, and fits into memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal.base.metrics import read_metrics
from tests.books import balanced

ROOT = Path(__file__).resolve().parents[2]
GIGABYTE = 2**30


def resident_bytes(folder: Path) -> int:
    """Of all processes of the run, what several map counted once in each."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder) in (process / "cmdline").read_text():
                total += int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:  # it ended while we looked
            continue
    return total


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_smollm2_trains_on_two_ranks_in_less_than_ten_gigabytes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "areal.train", "--config", "configs/tiny.yaml", "--output-dir", str(folder)]
    overrides = [
        "actor.path=smollm2-135m",
        "actor.backend=fsdp:d2",
        "actor.max_tokens_per_mb=256",
        "total_train_steps=2",
    ]
    overrides += [
        "train_dataset.batch_size=2",
        "gconfig.n_samples=4",
        "evaluator.path=null",
        "rollout.agent.gateway_port=0",
    ]
    overrides += [
        "rollout.agent.path=tests.faults.test_resumed_run:Uneven"
    ]  # rewards that differ between answers of any kind
    (tmp_path / "hold").write_text("")
    run = subprocess.Popen(
        [*command, *overrides, f"cluster.fileroot={tmp_path}"],
        cwd=ROOT,
        env=os.environ | {"HOLD": str(tmp_path / "hold")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    most = 0
    while run.poll() is None:
        most = max(most, resident_bytes(folder))
        time.sleep(0.2)
    _, said = run.communicate()
    assert run.returncode == 0, said[-3000:]
    print(f"at most {most / GIGABYTE:.1f} GB")
    assert most < 10 * GIGABYTE
    table = read_metrics(folder / "logs" / "metrics.jsonl")
    assert len(table.series("train/loss").values) == 2
    assert max(table.series("train/logprob_gap_max").values) < 1e-3, "what the ranks publish is what they train"
    assert max(table.series("train/grad_norm").values) > 0
    assert len(balanced(folder).books.trained_by_version) == 2
