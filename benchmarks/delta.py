"""How much of the weights a training step changes, and what sending only that costs: `weights.transfer=delta` beside `disk`.

    python -m benchmarks.delta [--model smollm2-135m] [--dtypes bfloat16,float32] [--rates 1e-6,1e-5,1e-4] [--steps 3] [--threads 1]

Per dtype and learning rate a net takes optimizer steps on rows that differ from step to step, and after each both transfers publish it into a
folder here and a server's side receives it. Printed: numbers whose bits changed, bytes of a version (less the header's room of 1 MiB a file), CPU seconds of both
sides, and `pays below`: the rate of the shared folder, in MB/s for writing once and reading once, under which the saved bytes are worth the
extra CPU seconds, all in one thread. Medians of the steps after the first, whose AdamW moments are empty. Each case in a process of its own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from areal.engine.engine import TrainEngine
from areal.models.fetch import resolve
from areal.weights import TRANSFERS
from areal.weights.tensor_file import HEADER_BYTES, bytes_of
from benchmarks.train import group_rows, settings


def once(name: str, engine: TrainEngine, folder: Path, version: int, pairs: dict[str, tuple]) -> tuple[int, float]:
    """Bytes of the version, CPU seconds of publishing and receiving it."""
    writer, reader = pairs[name]
    begun = time.process_time()
    manifest = writer.publish(engine.named_tensors(), version)
    received = reader.receive(manifest)
    seconds = time.process_time() - begun
    for got, (key, tensor) in zip(received.values(), engine.named_tensors(), strict=True):
        assert torch.equal(got, tensor), key
    writer.retire(version - 1)
    return sum(file["bytes"] - HEADER_BYTES - 8 for file in manifest["files"]), seconds


def changed(before: dict[str, Tensor], engine: TrainEngine) -> float:
    """The share of numbers whose bits are others."""
    moved = total = 0
    for name, tensor in engine.named_tensors():
        kind = {2: np.uint16, 4: np.uint32}[tensor.element_size()]
        moved += int((bytes_of(before[name]).view(kind) != bytes_of(tensor).view(kind)).sum())
        total += tensor.numel()
    return moved / total


def case(model_dir: str, dtype: str, rate: float, steps: int, threads: int) -> None:
    changes = {"dtype": dtype, "optimizer": {"lr": rate}, "max_tokens_per_mb": 256}
    engine = TrainEngine.load(settings(model_dir, threads, **changes))
    with tempfile.TemporaryDirectory() as folder:
        each = {name: Path(folder) / name for name in ("disk", "delta")}
        pairs = {name: (TRANSFERS[name].source(each[name]), TRANSFERS[name].sink(each[name])) for name in each}
        found: dict[str, list[tuple[int, float]]] = {name: [] for name in each}
        shares = []
        for step in range(steps + 2):
            before = {name: tensor.detach().clone() for name, tensor in engine.named_tensors()}
            if step:
                engine.train_step(group_rows(np.random.default_rng(step), groups=4), step, step)
            shares.append(changed(before, engine))
            for name in each:
                found[name].append(once(name, engine, each[name], step, pairs))
        for writer, _ in pairs.values():
            writer.close()
    share = statistics.median(shares[2:])
    size, seconds = (
        {name: statistics.median(one[place] for one in found[name][2:]) for name in found} for place in (0, 1)
    )
    saved, extra = 2 * (size["disk"] - size["delta"]) / 1e6, seconds["delta"] - seconds["disk"]
    print(
        f"{dtype:9} lr {rate:g}: {share:7.2%} changed, {size['delta'] / 1e6:6.1f} of {size['disk'] / 1e6:.0f} MB = {size['delta'] / size['disk']:.1%}; "
        f"{seconds['delta']:.1f} CPU s beside {seconds['disk']:.1f}; pays below {saved / max(extra, 1e-3):.0f} MB/s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="a model folder, or a name areal.models.fetch knows")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--rates", default="1e-6,1e-5,1e-4")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    dtypes, rates = options.dtypes.split(","), options.rates.split(",")
    if len(dtypes) == len(rates) == 1:
        case(str(resolve(options.model)), dtypes[0], float(rates[0]), options.steps, options.threads)
        return
    common = ["--model", options.model, "--steps", str(options.steps), "--threads", str(options.threads)]
    for dtype in dtypes:
        for rate in rates:
            subprocess.run(
                [sys.executable, "-m", "benchmarks.delta", *common, "--dtypes", dtype, "--rates", rate], check=True
            )


if __name__ == "__main__":
    main()
