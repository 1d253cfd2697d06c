"""`make demo` for three steps: the real model, two programs that share a URL, and a checkpoint at the end."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.heavy


@pytest.mark.timeout(1500)
def test_the_demo_trains_the_bundled_model() -> None:
    command = [sys.executable, "examples/math_agent/demo.py", "total_train_steps=3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    folders = re.findall(r"checkpoint are in (\S+)", done.stdout)
    assert len(folders) == 1, done.stdout[-2000:]
    run = Path(folders[0])
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 3
    assert 0.0 < summary["eval_reward_before"] < 1.0
    assert summary["logprob_gap_max"] < 1e-3
    assert summary["lag_max"] <= 1
    for picture in ("reward.png", "loss.png"):
        assert (run / picture).read_bytes().startswith(b"\x89PNG")
    assert re.search(r"played \d+ tasks", (run / "logs" / "play.log").read_text())

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(summary["checkpoint"])
    assert model.config.vocab_size == 49152
    shutil.rmtree(run)
