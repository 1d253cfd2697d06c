"""Training: our packed step beside a plain transformers + AdamW loop, prefixes computed once beside every row by itself, layouts beside one process.

    python benchmarks/train.py [--model smollm2-135m] [--threads 2] [--repeats 2] [--only ragged,groups,turns,vocabulary,memory,layouts]
    python benchmarks/train.py --device cuda --dtype bfloat16 --only ragged,turns          # prints MFU too

ragged: no two rows share a prefix, lengths 16..160. groups: 8 prompts of 35 tokens x 8 samples of <= 12 tokens. turns: 2 sessions of 16 turns, each turn
a row with all that came before. Row tokens per second, with ratios; the plain loop pads each micro-batch of 8 rows to its longest, takes full
logits and one AdamW step, `plain+` keeps logits of the completion part only. vocabulary: what log-probs of 1,024 tokens add to a process's peak, in
chunks and with whole logits. memory: peak RSS during steps of 64 rows x 48 tokens. layouts: row tokens per second and the largest rank's peak above what imports
take, beside the plain loop's (`plain`, the completion's logits alone), on the CPU, each rank a process of one thread. Both sides of a ratio alternate within one process, so that other load hits them alike; the best of the repeats counts. Each case has processes of its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal.algorithms.logprobs import token_logprobs
from areal.config.backend_spec import parse_backend
from areal.engine.batch import pack
from areal.engine.commands import Row
from areal.engine.engine import TrainEngine
from areal.engine.parallel import data as data_module
from areal.engine.parallel.meeting import Meeting
from areal.engine.parallel.world import World
from areal.engine.place import Place
from areal.engine.rows import decode_row
from areal.engine.settings import EngineSettings
from areal.tools.plan.devices import DEVICES

Step = Callable[[], None]
LAYOUTS = ("plain", "fsdp:d1", "archon:d1", "fsdp:d2", "archon:d2", "archon:p2", "archon:c2", "archon:t3")
CASES = ("ragged", "groups", "turns", "vocabulary", "memory", "layouts")


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


def turn_rows(rng: np.random.Generator, sessions: int = 2, turns: int = 16) -> list[Row]:
    """As exported one by one: a row for each turn, which begins with all the turns before it."""
    rows = []
    for session in range(sessions):
        ids = [session + 100]
        for _ in range(turns):
            ids += rng.integers(100, 40000, 16).tolist()
            prompt = len(ids)
            ids += rng.integers(100, 40000, 16).tolist()
            rows.append(make_row(list(ids), prompt, session))
    return rows


ROWS = {"ragged": ragged_rows, "groups": group_rows, "turns": turn_rows}


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
        data_module.pack = pack if share else packed_apart  # type: ignore[assignment]
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


def compare(
    case: str, model_dir: str, rows: list[Row], threads: int, repeats: int, device: str, dtype: str = "float32"
) -> None:
    engine = TrainEngine.load(settings(model_dir, threads, dtype=dtype), World.alone(torch.device(device)))
    steps = {"ours": our_step(engine, rows)}
    if case != "ragged":
        steps["ours, prefixes not shared"] = our_step(engine, rows, share=False)
    if case != "turns" and device == "cpu":
        steps["plain"] = plain_loop(model_dir, rows, keep_completion_only=False)
        steps["plain+"] = plain_loop(model_dir, rows, keep_completion_only=True)
    tokens = sum(len(row.ids) // 4 for row in rows)
    best = measured(steps, repeats)
    data_module.pack = pack
    stats = engine.train_step(rows, 0, 0)
    shared = f"{stats['computed_tokens']:.0f} computed, {stats['row_tokens'] / stats['computed_tokens']:.1f} times fewer than row by row"
    print(f"{case}, {threads} threads, {len(rows)} rows, {tokens} row tokens, {shared}")
    for name, (wall, cpu) in best.items():
        ratios = f"ours is x{wall / best['ours'][0]:.2f} (wall), x{cpu / best['ours'][1]:.2f} (CPU)"
        print(f"  {name:26} {tokens / wall:8.1f} tokens/s {wall:7.2f} s {cpu:7.2f} CPU s   {ratios}", flush=True)
    if device == "cuda":
        parameters = sum(p.numel() for _, p in engine.policy.trained_parameters())
        print(mfu(parameters, stats["computed_tokens"], best["ours"][0], torch.cuda.get_device_name(), dtype))


def mfu(parameters: int, tokens: float, seconds: float, device: str, dtype: str) -> str:
    """A line with the model FLOP utilisation: 6 floating-point operations per parameter and computed token, of what the device could do."""
    done = 6 * parameters * tokens / seconds
    peak = next((one.flops(dtype) for name, one in DEVICES.items() if name in device.lower()), None)
    if peak is None:
        return f"  MFU unknown: {done / 1e12:.2f} TFLOP/s on a {device}, whose peak areal/tools/plan/devices.py does not have"
    return f"  MFU {100 * done / peak:.1f} %: {done / 1e12:.2f} of {peak / 1e12:.0f} TFLOP/s in {dtype} on a {device}"


def vocabulary(tokens: int = 1024, size: int = 49152, width: int = 576) -> None:
    """Each way in a process of its own, which says its peak above what the inputs take."""
    peaks = {}
    for way in ("chunks", "whole"):
        asked = [sys.executable, __file__, "--child", f"logprobs-{way}-{tokens}-{size}-{width}"]
        peaks[way] = float(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)
    print(
        f"log-probs of {tokens} tokens over {size} ids, forward and backward: {peaks['chunks']:.0f} MiB in chunks, {peaks['whole']:.0f} MiB with whole "
        f"logits, x{peaks['whole'] / peaks['chunks']:.1f}"
    )


def logprobs_peak(way: str, tokens: int, size: int, width: int) -> float:
    """MiB."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, width, requires_grad=True), torch.randn(size, width, requires_grad=True)
    targets, temperatures = torch.randint(0, size, (tokens,)), torch.ones(tokens)
    weight.grad, hidden.grad = torch.zeros_like(weight), torch.zeros_like(hidden)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    if way == "chunks":
        token_logprobs(hidden, weight, targets, temperatures)[0].sum().backward()
    else:
        (hidden @ weight.T).float().log_softmax(-1).gather(1, targets[:, None]).sum().backward()
    return (status("VmHWM") - before) / 2**20


def status(name: str) -> int:
    """Bytes, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def layouts(model_dir: str, repeats: int) -> None:
    found = {}
    for layout in LAYOUTS:
        with tempfile.TemporaryDirectory() as folder:
            asked = [sys.executable, __file__, "--model", model_dir, "--repeats", str(repeats), "--layout", layout]
            asked += ["--meeting", f"{folder}/meeting"]
            ranks = [
                subprocess.Popen([*asked, "--child", f"rank-{rank}"], stdout=subprocess.PIPE, text=True)
                for rank in range(1 if layout == "plain" else parse_backend(layout).size)
            ]
            said = [rank.communicate()[0] for rank in ranks]
        own = found[layout] = json.loads(said[0])
        beside = [
            f"x{found[other]['seconds'] / own['seconds']:.2f} in speed and x{own['peak'] / found[other]['peak']:.2f} in memory of {name}"
            for other, name in (("fsdp:d1", "one process"), ("plain", "the plain loop"))
            if other in found and other != layout
        ]
        print(
            f"  {layout:10} {own['tokens'] / own['seconds']:7.1f} tokens/s, peak of a rank {own['peak'] / 2**20:.0f} MiB; {', '.join(beside)}",
            flush=True,
        )


def rank(layout: str, number: int, model_dir: str, repeats: int, meeting: str) -> None:
    rows = ragged_rows(np.random.default_rng(1), count=12)
    world = World.alone()
    if layout == "plain":
        torch.set_num_threads(1)
        importlib.import_module("transformers.models.auto.modeling_auto")
        baseline = status("VmRSS")
        step = plain_loop(model_dir, rows, keep_completion_only=True)
    else:
        spec = parse_backend(layout)
        if spec.size > 1:
            names = tuple(f"rank-{each}" for each in range(spec.size))
            world = Meeting(Place(rank=number, names=names, meeting=meeting)).join(spec, timeout_s=600)
        baseline = status("VmRSS")
        engine = TrainEngine.load(settings(model_dir, 1, backend=layout, max_tokens_per_mb=512), world)
        step = our_step(engine, rows)
    [(wall, _)] = measured({"step": step}, repeats).values()
    peaks = [int(each) for each in world.gather(str(status("VmHWM") - baseline).encode())]
    tokens = sum(len(row.ids) // 4 for row in rows)
    print(json.dumps({"seconds": wall, "peak": max(peaks), "tokens": tokens}) if number == 0 else "")


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
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of our step")
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--layout", help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is None:
        in_processes_of_their_own(options)
        return
    kind, *numbers = options.child.split("-")
    if kind == "rank":
        rank(options.layout, int(numbers[0]), options.model, options.repeats, options.meeting)
        return
    if kind == "logprobs":
        print(logprobs_peak(numbers[0], *map(int, numbers[1:])))
        return
    torch.set_num_threads(options.threads)
    if kind == "memory":
        memory(options.model, options.threads)
    elif kind == "vocabulary":
        vocabulary()
    elif kind == "layouts":
        layouts(options.model, options.repeats)
    else:
        rows = ROWS[kind](np.random.default_rng(1))
        compare(kind, options.model, rows, options.threads, options.repeats, options.device, options.dtype)


def in_processes_of_their_own(options: argparse.Namespace) -> None:
    """Three nets with moments fill 10 GB."""
    model_dir = options.model
    if not Path(model_dir).is_dir():
        from areal.models.fetch import resolve

        model_dir = str(resolve(model_dir))
    print(f"{model_dir}, {options.threads} threads, load {os.getloadavg()[0]:.1f}", flush=True)
    common = ["--model", model_dir, "--threads", str(options.threads), "--repeats", str(options.repeats)]
    common += ["--device", options.device, "--dtype", options.dtype]
    for case in options.only.split(","):
        subprocess.run([sys.executable, __file__, *common, "--child", case], check=True)


if __name__ == "__main__":
    main()
