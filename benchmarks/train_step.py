"""Train-step speed and memory: our packed step beside a plain transformers + AdamW loop on the same rows.

    python benchmarks/train_step.py [--model smollm2-135m] [--threads 2] [--repeats 2] [--only ragged,groups,memory]

Cases: `ragged` (no two rows share a prefix, lengths 16..160), `groups` (8 prompts of 35 tokens x 8 samples of <= 12 tokens), each as
row tokens per second, with the ratio to the plain loop; `groups` also without prefix sharing. `memory`: peak RSS of a fresh process
during steps of 64 rows x 48 tokens. Both sides alternate within one process, so that other load hits them alike; the best of the
repeats counts. The plain loop pads each micro-batch of 8 rows to its longest, takes full logits and one AdamW step;
`plain+` is the same but keeps logits of the completion part only.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal.engine import engine as engine_module
from areal.engine.batch import pack
from areal.engine.commands import Row
from areal.engine.engine import TrainEngine
from areal.engine.rows import decode_row
from areal.engine.settings import EngineSettings

Step = Callable[[], None]


def make_row(ids: list[int], prompt: int, sequence: int) -> Row:
    n = len(ids)
    trained = np.arange(n) >= prompt
    rng = np.random.default_rng(sequence)
    return Row(
        session_id=f"s{sequence}",
        sequence=sequence,
        ids=np.array(ids, "<i4").tobytes(),
        trained=trained.tobytes(),
        logprobs=np.where(trained, -8.0, 0).astype("<f4").tobytes(),
        versions=np.where(trained, 0, -1).astype("<i4").tobytes(),
        temperatures=np.ones(n, "<f4").tobytes(),
        advantages=np.where(trained, rng.choice([-1.0, 1.0]), 0).astype("<f4").tobytes(),
    )


def ragged_rows(rng: np.random.Generator, count: int = 24) -> list[Row]:
    rows = []
    for k in range(count):
        prompt, output = int(rng.integers(8, 60)), int(rng.integers(8, 100))
        rows.append(make_row([k + 100, *rng.integers(100, 40000, prompt + output - 1).tolist()], prompt, k))
    return rows


def group_rows(rng: np.random.Generator, groups: int = 8, samples: int = 8) -> list[Row]:
    rows = []
    for g in range(groups):
        stem = [g + 100, *rng.integers(100, 40000, 34).tolist()]
        for s in range(samples):
            rows.append(make_row(stem + rng.integers(100, 40000, rng.integers(4, 13)).tolist(), 35, g * samples + s))
    return rows


def settings(model_dir: str, threads: int, **changes: Any) -> EngineSettings:
    base: dict[str, Any] = {"model_dir": model_dir, "algorithm": "grpo", "threads": threads, "total_steps": 100}
    return EngineSettings.model_validate(base | {"optimizer": {"lr": 1e-9}} | changes)


def plain_loop(model_dir: str, rows: list[Row], *, keep_completion_only: bool) -> Step:
    """What one writes without this project: pad, forward, full log_softmax, backward, AdamW."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, betas=(0.9, 0.95), weight_decay=0.0)
    arrays = [decode_row(row) for row in rows]
    total = sum(int(row.trained.sum()) for row in arrays)

    def step() -> None:
        for start in range(0, len(arrays), 8):
            part = arrays[start : start + 8]
            width = max(len(row.ids) for row in part)

            def padded(name: str, part: list[Any] = part, width: int = width) -> torch.Tensor:
                return torch.tensor(np.array([np.pad(getattr(row, name), (0, width - len(row.ids))) for row in part]))

            ids, mask = padded("ids").long(), padded("trained")
            attention = (torch.arange(width)[None] < torch.tensor([[len(row.ids)] for row in part])).long()
            first = int(mask.any(0).int().argmax()) if keep_completion_only else 1
            logits = model(
                input_ids=ids, attention_mask=attention, use_cache=False, logits_to_keep=width - first + 1
            ).logits[:, :-1]
            new = logits.log_softmax(-1).gather(2, ids[:, first:, None])[..., 0]
            ratio = (new - new.detach()).exp()
            weight = (new.detach() - padded("logprobs")[:, first:]).exp().clamp(max=5)
            advantage = padded("advantages")[:, first:]
            objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) * weight
            (-(objective * mask[:, first:]).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def our_step(engine: TrainEngine, rows: list[Row], *, share: bool = True) -> Step:
    def packed_apart(rows: Any, *, max_tokens: int) -> Any:
        return pack(rows, max_tokens=max_tokens, share_prefixes=False)

    def step() -> None:
        engine_module.pack = pack if share else packed_apart  # type: ignore[attr-defined,assignment]
        engine.train_step(rows, 0, 0)

    return step


def measured(steps: dict[str, Step], repeats: int) -> dict[str, tuple[float, float]]:
    """Least wall and CPU seconds of each step, alternating, after one to warm up."""
    best = dict.fromkeys(steps, (float("inf"), float("inf")))
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            if repeat:
                now = (time.perf_counter() - wall, time.process_time() - cpu)
                best[name] = (min(best[name][0], now[0]), min(best[name][1], now[1]))
    return best


def compare(case: str, model_dir: str, rows: list[Row], threads: int, repeats: int) -> None:
    engine = TrainEngine.load(settings(model_dir, threads))
    steps = {
        "ours": our_step(engine, rows),
        "plain": plain_loop(model_dir, rows, keep_completion_only=False),
        "plain+": plain_loop(model_dir, rows, keep_completion_only=True),
    }
    if case == "groups":
        steps["ours, prefixes not shared"] = our_step(engine, rows, share=False)
    tokens = sum(len(row.ids) // 4 for row in rows)
    best = measured(steps, repeats)
    print(f"{case}, {threads} threads, {len(rows)} rows, {tokens} row tokens")
    for name, (wall, cpu) in best.items():
        ratios = f"ours is x{wall / best['ours'][0]:.2f} (wall), x{cpu / best['ours'][1]:.2f} (CPU)"
        print(f"  {name:26} {tokens / wall:8.1f} tokens/s {wall:7.2f} s {cpu:7.2f} CPU s   {ratios}", flush=True)


def memory(model_dir: str, threads: int) -> None:
    """Peak RSS since the start of this process, loading included."""
    rng = np.random.default_rng(0)
    engine = TrainEngine.load(settings(model_dir, threads))
    rows = [make_row([k + 100, *rng.integers(100, 40000, 47).tolist()], 24, k) for k in range(64)]
    stats = [engine.train_step(rows, step, 0) for step in range(2)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"memory, {threads} threads, 64 rows x 48 tokens: peak RSS {peak:.2f} GiB, {stats[-1]['seconds']:.1f} s a step"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="a model folder, or a name areal.models.fetch knows")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only", default="ragged,groups,memory")
    parser.add_argument("--child", choices=("ragged", "groups", "memory"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is None:
        model_dir = options.model
        if not Path(model_dir).is_dir():
            from areal.models.fetch import resolve

            model_dir = str(resolve(model_dir))
        print(f"{model_dir}, {options.threads} threads, load {os.getloadavg()[0]:.1f}", flush=True)
        common = ["--model", model_dir, "--threads", str(options.threads), "--repeats", str(options.repeats)]
        for case in options.only.split(","):  # each in a process of its own: three nets with moments fill 10 GB
            subprocess.run([sys.executable, __file__, *common, "--child", case], check=True)
        return
    torch.set_num_threads(options.threads)
    if options.child == "memory":
        memory(options.model, options.threads)
    else:
        rows = (ragged_rows if options.child == "ragged" else group_rows)(np.random.default_rng(1))
        compare(options.child, options.model, rows, options.threads, options.repeats)


if __name__ == "__main__":
    main()
