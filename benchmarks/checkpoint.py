"""What a recovery checkpoint costs training: held up by the copy in memory, against waiting for the whole write.

    python benchmarks/checkpoint.py [--model smollm2-135m] [--threads 1] [--repeats 3] [--folder DIR]

Weights, both moments and the random state of a policy that has taken steps, as a rank writes them: every file synced and marked. `copy` is what
training waits for, `write` what then runs in another thread, `step beside` a training step while that thread writes, `step alone` one
without it. The medians of the repeats. DIR: on the disk that is asked about (default: the working folder).
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from areal.engine import checkpoint
from areal.engine.checkpoint_files import damage
from areal.engine.commands import Row
from areal.engine.engine import TrainEngine
from areal.engine.settings import EngineSettings
from areal.models.fetch import resolve


def rows(count: int = 8, length: int = 48) -> list[Row]:
    rng = np.random.default_rng(0)
    trained = np.arange(length) >= length // 2
    return [
        Row(
            session_id=f"s{number}",
            sequence=number,
            ids=rng.integers(100, 40000, length).astype("<i4").tobytes(),
            trained=trained.tobytes(),
            logprobs=np.where(trained, -8.0, 0).astype("<f4").tobytes(),
            versions=np.where(trained, 0, -1).astype("<i4").tobytes(),
            temperatures=np.ones(length, "<f4").tobytes(),
            advantages=np.where(trained, rng.choice([-1.0, 1.0]), 0).astype("<f4").tobytes(),
        )
        for number in range(count)
    ]


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path())
    options = parser.parse_args()
    model_dir = str(resolve(options.model))
    settings = {"model_dir": model_dir, "algorithm": "grpo", "threads": options.threads, "total_steps": 100}
    engine = TrainEngine.load(EngineSettings.model_validate(settings | {"optimizer": {"lr": 1e-9}}))
    batch = rows()
    engine.train_step(batch, 0, 0)
    found: dict[str, list[float]] = {"copy": [], "write": [], "step alone": [], "step beside": [], "check": []}
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch, ThreadPoolExecutor(1) as pool:
        target = Path(scratch) / "step-000001"
        for repeat in range(options.repeats + 1):
            shutil.rmtree(target, ignore_errors=True)
            alone = seconds(lambda: engine.train_step(batch, 1, 1))
            started = time.perf_counter()
            held = engine.hold(1, full=True)
            copied = time.perf_counter() - started
            write = partial(checkpoint.write, target, held, model_dir, step=1)
            writing = pool.submit(seconds, write)
            beside = []
            while not writing.done():
                beside.append(seconds(lambda: engine.train_step(batch, 1, 1)))
            checked = seconds(lambda: damage(target, recovery=True))
            if repeat:  # the first warms up
                for name, value in zip(
                    found, (copied, writing.result(), alone, statistics.median(beside), checked), strict=True
                ):
                    found[name].append(value)
        size = held.bytes
    median = {name: statistics.median(values) for name, values in found.items()}
    print(f"{options.model}, {options.threads} threads, {size / 1e6:.0f} MB")
    print("  " + "   ".join(f"{name} {value:.3f} s" for name, value in median.items()))
    whole = median["copy"] + median["write"]
    print(f"  training is held {median['copy']:.3f} s instead of {whole:.3f} s: {100 * median['copy'] / whole:.1f} %")


if __name__ == "__main__":
    main()
