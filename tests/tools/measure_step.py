"""A process that trains the bundled 135M on rows of so many tokens, and prints how far its memory grew over what imports alone take.

    python tests/tools/measure_step.py TOKENS [float32|bfloat16] [none|full] [LORA_RANK]

A short first step makes the optimizer's moments; the second one, of two full micro-batches, is measured as every later step would be.
Linux: VmRSS and VmHWM of /proc/self/status, the latter reset through clear_refs.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np

VOCABULARY = 49152


def row_of(number: int, tokens: int, vocabulary: int):  # type: ignore[no-untyped-def]
    """A commands.Row with `tokens` forwarded tokens, all of which predict."""
    from areal.engine.commands import Row

    rng, n = np.random.default_rng(number), tokens + 1
    trained = np.arange(n) > 0
    return Row(
        session_id=f"s-{number}",
        sequence=number,
        ids=rng.integers(2, vocabulary, n).astype("<i4").tobytes(),
        trained=trained.tobytes(),
        logprobs=np.where(trained, -3, 0).astype("<f4").tobytes(),
        versions=np.where(trained, 0, -1).astype("<i4").tobytes(),
        temperatures=np.ones(n, "<f4").tobytes(),
        advantages=trained.astype("<f4").tobytes(),
    )


def status(name: str) -> int:
    """Bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def main(tokens: int, dtype: str = "float32", checkpointing: str = "none", rank: str = "0") -> None:
    # All that loading and training import belongs to the baseline.
    for name in (
        "safetensors.torch",
        "transformers.models.llama.modeling_llama",
        "transformers.models.auto.modeling_auto",
        *(["peft"] if int(rank) else []),
    ):
        importlib.import_module(name)
    from areal.engine.engine import TrainEngine
    from areal.engine.settings import EngineSettings
    from areal.models.fetch import resolve

    folder = resolve("smollm2-135m", progress=lambda line: print(line, file=sys.stderr))
    baseline = status("VmRSS")
    settings = {"model_dir": str(folder), "algorithm": "grpo", "threads": 1, "total_steps": 9, "dtype": dtype}
    settings |= {"max_tokens_per_mb": tokens, "gradient_checkpointing": checkpointing == "full"}
    settings |= {"lora": {"rank": int(rank)} if int(rank) else None}
    engine = TrainEngine.load(EngineSettings.model_validate(settings))
    engine.train_step([row_of(0, 8, VOCABULARY)], step=0, current_version=0)
    Path("/proc/self/clear_refs").write_text("5")
    rows = [row_of(number, tokens, VOCABULARY) for number in (1, 2)]
    engine.train_step(rows, step=1, current_version=1)
    print(json.dumps({"tokens": tokens, "dtype": dtype, "peak_growth": status("VmHWM") - baseline}))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
