"""A process that trains the bundled 135M on rows of so many tokens, and prints how far its memory grew over what imports alone take.

    python tests/tools/measure_step.py TOKENS [float32|bfloat16] [none|full] [LORA_RANK]

A short first step makes the optimizer's moments; the second one, of two full micro-batches, is measured as every later step would be.
`grown_in_pool` does the same in each rank of a layout.
Linux and glibc: VmRSS and VmHWM of /proc/self/status, the latter reset through clear_refs.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from areal.models.fetch import resolve

if TYPE_CHECKING:
    from areal.engine.parallel.world import World

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


def imported(adapted: bool = False) -> int:
    """Bytes that this process takes with all that loading and training import: the baseline."""
    for name in (
        "safetensors.torch",
        "transformers.models.llama.modeling_llama",
        "transformers.models.auto.modeling_auto",
        *(["peft"] if adapted else []),
    ):
        importlib.import_module(name)
    importlib.import_module("areal.engine.engine")
    return status("VmRSS")


def grown(world: World | None, changes: Mapping[str, Any], tokens: int, micro_batches: int, baseline: int) -> int:
    """Bytes of this rank's peak above the baseline in a step of so many full micro-batches for each data rank."""
    from areal.engine.engine import TrainEngine
    from areal.engine.settings import EngineSettings

    folder = resolve("smollm2-135m", progress=lambda line: print(line, file=sys.stderr))
    settings = {
        "model_dir": str(folder),
        "algorithm": "grpo",
        "threads": 1,
        "total_steps": 9,
        "max_tokens_per_mb": tokens,
    }
    engine = TrainEngine.load(EngineSettings.model_validate(settings | dict(changes)), world)
    ranks = 1 if world is None else world.size("d")
    engine.train_step([row_of(number, 8, VOCABULARY) for number in range(ranks)], step=0, current_version=0)
    Path("/proc/self/clear_refs").write_text("5")
    rows = [row_of(number, tokens, VOCABULARY) for number in range(1, 1 + ranks * micro_batches)]
    stats = engine.train_step(rows, step=1, current_version=1)
    assert stats["computed_tokens"] == tokens * len(rows), "no micro-batch is to be less than full"
    return status("VmHWM") - baseline


_baseline = 0  # of this process of a pool, before its first layout


def grown_in_pool(world: World, backend: str, tokens: int, micro_batches: int) -> int:
    """The same in a process that may have been a rank of another layout, for Pool.call: what that left is given back first."""
    global _baseline
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    _baseline = _baseline or imported()
    return grown(world, {"backend": backend}, tokens, micro_batches, _baseline)


def main(tokens: int, dtype: str = "float32", checkpointing: str = "none", rank: str = "0") -> None:
    changes = {"dtype": dtype, "gradient_checkpointing": checkpointing == "full"}
    changes |= {"lora": {"rank": int(rank)} if int(rank) else None}
    peak = grown(None, changes, tokens, 2, imported(adapted=bool(int(rank))))
    print(json.dumps({"tokens": tokens, "dtype": dtype, "peak_growth": peak}))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
