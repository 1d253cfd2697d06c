"""Native engine against transformers' generate: same model, same machine, same prompts, side by side in one run.

    python benchmarks/native_generate.py                      # the bundled 135M model; --model DIR for another
    python benchmarks/native_generate.py --quick              # fewer tokens, one round

Prints new tokens per second of both and their ratio at each batch size, alternating the two so that other load on the
machine meets both; then multi-turn sessions with prefix reuse on and off. The machine's load stands beside each line.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from areal.base.types import GenerateRequest, IntArray, SamplingParams
from areal.inference.native.engine import Engine
from areal.inference.native.scheduler import EngineSettings
from areal.models.dense import DenseNet
from areal.models.fetch import resolve

CONTEXT = 2048


def run_engine(engine: Engine, prompts: list[IntArray], new_tokens: int) -> list[IntArray]:
    """Sample new_tokens at temperature 1 after each prompt; returns prompt + output of each."""
    sampling = SamplingParams(max_tokens=new_tokens, temperature=1.0)
    sequences = [
        engine.sequence_of(GenerateRequest(str(i), str(i), prompt, sampling, rng_seed=i))
        for i, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        engine.add(sequence)
    while engine.busy:
        engine.step()
    return [sequence.known.copy() for sequence in sequences]


def run_transformers(model: PreTrainedModel, prompts: list[IntArray], new_tokens: int) -> None:
    ids = torch.from_numpy(np.stack(prompts).astype(np.int64))
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=True,
        top_k=0,
        pad_token_id=0,
    )


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def batch_lines(net: DenseNet, model: PreTrainedModel, new_tokens: int, rounds: int) -> None:
    rng = np.random.default_rng(0)
    settings = EngineSettings(max_context=CONTEXT, prefix_reuse=False)
    print(f"prompt 40, {new_tokens} new tokens, float32, {torch.get_num_threads()} threads")
    for batch in (1, 8, 32):
        prompts = [rng.integers(10, net.config.vocab_size, 40).astype(np.int32) for _ in range(batch)]
        engine = Engine(net, version=0, settings=settings, eos_ids=frozenset())
        run_engine(engine, prompts, 4)
        run_transformers(model, prompts, 4)
        ours, theirs = [], []
        for _ in range(rounds):
            ours.append(seconds(lambda: run_engine(engine, prompts, new_tokens)))  # noqa: B023
            theirs.append(seconds(lambda: run_transformers(model, prompts, new_tokens)))  # noqa: B023
        tokens = batch * new_tokens
        mine, other = tokens / statistics.median(ours), tokens / statistics.median(theirs)
        print(
            f"batch {batch:3d}: native {mine:7.1f} tok/s, transformers {other:7.1f} tok/s, ratio {mine / other:.2f}"
            f"   load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


def session_line(net: DenseNet, sessions: int, turns: int, rounds: int) -> None:
    """Each turn: the whole conversation so far + 60 tokens of a user or tool, then 16 sampled tokens."""
    spent: dict[bool, list[float]] = {True: [], False: []}
    for round_ in range(rounds):
        for reuse in (True, False):
            engine = Engine(
                net, version=0, settings=EngineSettings(max_context=CONTEXT, prefix_reuse=reuse), eos_ids=frozenset()
            )
            rng = np.random.default_rng(round_)
            history: list[IntArray] = [np.empty(0, np.int32)] * sessions
            started = time.perf_counter()
            for _ in range(turns):
                said = [rng.integers(10, net.config.vocab_size, 60).astype(np.int32) for _ in history]
                prompts = [np.concatenate(pair) for pair in zip(history, said, strict=True)]
                history = run_engine(engine, prompts, 16)
            spent[reuse].append(time.perf_counter() - started)
    on, off = statistics.median(spent[True]), statistics.median(spent[False])
    print(
        f"{sessions} sessions of {turns} turns (60 in, 16 out): prefix reuse on {on:.1f} s, off {off:.1f} s, "
        f"ratio {off / on:.2f}   load {os.getloadavg()[0]:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="bundled name, folder or hub id")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folder = Path(resolve(arguments.model))
    net = DenseNet.load(folder, dtype=torch.float32, device=torch.device("cpu"), positions=CONTEXT)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    new_tokens, rounds = (16, 1) if arguments.quick else (48, 3)
    batch_lines(net, model, new_tokens, rounds)
    session_line(net, sessions=4, turns=3 if arguments.quick else 8, rounds=1 if arguments.quick else 2)


if __name__ == "__main__":
    main()
