"""The engine without a server: exact tokens and log-probs under batching, chunks, reuse, preemption and swaps."""

from __future__ import annotations

import dataclasses
import gc
import math
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from areal.base.errors import ArealError, BackendError, BadRequest
from areal.base.types import GenerateRequest, IntArray, SamplingParams, TokenChunk
from areal.inference.native.engine import Engine
from areal.inference.native.scheduler import EngineSettings, Sequence
from areal.models.dense import DenseNet, causal
from areal.models.dense_config import read_config
from areal.models.hf_weights import load_tensors
from areal.models.tiny import write_tiny

CPU = torch.device("cpu")
CONTEXT = 400
Spoken = dict[Sequence, list[TokenChunk | ArealError]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(folder: Path) -> DenseNet:
    return DenseNet.load(folder, dtype=torch.float32, device=CPU, positions=CONTEXT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("net")
    write_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def net(folder: Path) -> DenseNet:
    return load(folder)


def changed(net: DenseNet, folder: Path, by: float) -> DenseNet:
    torch.manual_seed(5)
    tensors = load_tensors(folder, net.config.parameter_shapes())
    tensors = {name: tensor + by * torch.randn_like(tensor) for name, tensor in tensors.items()}
    return DenseNet.from_tensors(net.config, tensors, dtype=net.dtype, device=CPU, positions=CONTEXT)


def engine_of(net: DenseNet, *, eos_ids: frozenset[int] = frozenset(), **settings: Any) -> Engine:
    return Engine(net, version=1, settings=EngineSettings(max_context=CONTEXT, **settings), eos_ids=eos_ids)


def add(engine: Engine, prompt: IntArray, *, seed: int = 0, **sampling: Any) -> Sequence:
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": 20, **sampling})
    sequence = engine.sequence_of(GenerateRequest(f"r{seed}", f"s{seed}", prompt, params, seed))
    engine.add(sequence)
    return sequence


def run(engine: Engine, spoken: Spoken | None = None, *, steps: int | None = None) -> Spoken:
    spoken = {} if spoken is None else spoken
    while engine.busy and steps != 0:
        for sequence, event in engine.step():
            spoken.setdefault(sequence, []).append(event)
        steps = None if steps is None else steps - 1
    return spoken


def chunks_of(spoken: Spoken, sequence: Sequence) -> list[TokenChunk]:
    events = spoken[sequence]
    assert all(isinstance(event, TokenChunk) for event in events), events
    return [event for event in events if isinstance(event, TokenChunk)]


def prompts(n: int, *, low: int = 1, high: int = 150, seed: int = 0) -> list[IntArray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 80, rng.integers(low, high)).astype(np.int32) for _ in range(n)]


@torch.inference_mode()
def recomputed(net: DenseNet, sequence: Sequence) -> torch.Tensor:
    """Log-probs of the output by one plain forward pass, at the request's temperature."""
    ids = torch.from_numpy(sequence.known.astype(np.int64))
    logits = net.logits(net.forward(ids, torch.arange(len(ids)), causal(net.config)))
    logits /= sequence.request.sampling.temperature or 1.0
    n = sequence.prompt_length
    return logits.log_softmax(-1)[n - 1 : -1].gather(1, ids[n:, None])[:, 0]


def assert_exact(net: DenseNet, spoken: Spoken, sequence: Sequence, *, version: int = 1) -> None:
    """What was recorded of this sequence is what the net of `version` says, for the tokens it labelled so."""
    chunks = chunks_of(spoken, sequence)
    assert [int(chunk.token_ids[0]) for chunk in chunks] == sequence.known[sequence.prompt_length :].tolist()
    logprobs = torch.tensor([float(chunk.logprobs[0]) for chunk in chunks])
    of_version = torch.tensor([int(chunk.versions[0]) == version for chunk in chunks])
    assert of_version.any()
    torch.testing.assert_close(logprobs[of_version], recomputed(net, sequence)[of_version], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
@torch.inference_mode()
def test_greedy_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = tmp_path / family
    write_tiny(folder, family=family)
    net = load(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    engine = engine_of(net)
    sequences = [add(engine, prompt, temperature=0.0, max_tokens=30) for prompt in prompts(6)]
    run(engine)
    for sequence in sequences:
        ids = torch.from_numpy(sequence.known[: sequence.prompt_length].astype(np.int64))[None]
        said = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=30,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert sequence.known.tolist() == said[0].tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prefill_chunk": 16, "max_batch": 5},
        {"prefix_reuse": False, "max_batch": 3},
        {"kv_tokens": 500, "prefill_chunk": 40},
        {"deterministic": True, "kv_tokens": 1200, "prefill_chunk": 32},
    ],
    ids=lambda settings: ",".join(settings) or "default",
)
def test_recorded_log_probs_are_those_of_a_plain_forward_pass(net: DenseNet, settings: dict[str, Any]) -> None:
    engine = engine_of(net, **settings)
    shared = prompts(1, low=60, high=61, seed=9)[0]
    sequences = [
        add(
            engine,
            np.concatenate([shared, prompt]) if i % 2 else prompt,
            seed=i,
            temperature=[1.0, 0.7, 0.0][i % 3],
            top_p=[1.0, 0.9][i % 2],
            max_tokens=30 + 4 * i,
        )
        for i, prompt in enumerate(prompts(16))
    ]
    spoken = run(engine)
    for sequence in sequences:
        chunks = chunks_of(spoken, sequence)
        assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert_exact(net, spoken, sequence)
    assert engine.scheduler.kv_tokens_free == engine.settings.kv_tokens


def test_the_shared_prompt_of_a_group_is_computed_once(net: DenseNet) -> None:
    engine = engine_of(net, prefill_chunk=64)
    prompt = prompts(1, low=100, high=101)[0]
    sequences = [add(engine, prompt, seed=i, max_tokens=5) for i in range(8)]
    spoken = run(engine)
    assert engine.scheduler.reused_tokens == 7 * 99
    assert engine.computed_tokens == 100 + 7 * 1 + 8 * 4
    for sequence in sequences:
        assert_exact(net, spoken, sequence)
    assert len({tuple(s.known.tolist()) for s in sequences}) > 1


def test_the_turns_of_a_session_reuse_what_was_computed_before(net: DenseNet) -> None:
    engine = engine_of(net)
    history = prompts(1, low=50, high=51)[0]
    for turn in range(4):
        before = engine.computed_tokens
        sequence = add(engine, history, seed=turn, max_tokens=10)
        spoken = run(engine)
        assert_exact(net, spoken, sequence)
        # 50 tokens at first; later the last sampled token of the turn before (never fed) and 7 new ones
        assert engine.computed_tokens - before == (50 if turn == 0 else 1 + 7) + 9
        history = np.concatenate([sequence.known, prompts(1, low=7, high=8, seed=turn)[0]])


def test_a_branch_reuses_the_common_part_only(net: DenseNet) -> None:
    engine = engine_of(net)
    base = prompts(1, low=80, high=81)[0]
    add(engine, base, max_tokens=1)
    run(engine)
    other = base.copy()
    other[50] = (other[50] + 1) % 80
    sequence = add(engine, other, seed=3)
    spoken = run(engine)
    assert engine.scheduler.reused_tokens == 50
    assert_exact(net, spoken, sequence)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_T065_across_a_swap_each_token_has_the_version_and_log_prob_of_its_weights(family: str, tmp_path: Path) -> None:
    """Settled 7: no KV of the old weights is read after the swap, by running requests or by later ones."""
    folder = tmp_path / "net"
    write_tiny(folder, family=family)
    net = load(folder)
    newer = changed(net, folder, 0.05)
    engine = engine_of(net, prefill_chunk=48)
    prompt = prompts(1, low=90, high=91)[0]
    group = [add(engine, prompt, seed=i, max_tokens=25) for i in range(4)]
    spoken = run(engine, steps=5)
    late = add(engine, prompts(1, low=149, high=150, seed=4)[0], seed=9)
    run(engine, spoken, steps=1)
    engine.swap(newer, 2)
    reused = engine.scheduler.reused_tokens
    assert engine.scheduler.prefixes.tokens == 0
    run(engine, spoken)
    for sequence in group:
        versions = [int(chunk.versions[0]) for chunk in chunks_of(spoken, sequence)]
        assert versions == sorted(versions)
        assert set(versions) == {1, 2}
        assert_exact(net, spoken, sequence, version=1)
        assert_exact(newer, spoken, sequence, version=2)
    assert_exact(newer, spoken, late, version=2)
    assert engine.scheduler.reused_tokens - reused >= 3 * 90  # the group's prompt again once under the new weights
    follow = add(engine, np.concatenate([group[0].known, prompt[:5]]), seed=77)
    assert_exact(newer, run(engine), follow, version=2)


def test_a_swap_frees_the_former_kv_at_once(net: DenseNet, folder: Path) -> None:
    """Without the cycle collector, which counts objects and lets gigabytes lie: several caches' worth at the demo's pace."""
    engine = engine_of(net)
    for seed, prompt in enumerate(prompts(4, low=60)):
        add(engine, prompt, seed=seed, max_tokens=25)
    run(engine, steps=12)
    scheduler = engine.scheduler
    held = [node.kv for node in scheduler.prefixes._nodes()] + [bank.storage for bank in scheduler._cache.banks]
    assert len(held) > 4
    former = [weakref.ref(tensor) for tensor in held]
    del held
    gc.collect()
    gc.disable()
    try:
        engine.swap(changed(net, folder, 0.05), 2)
        assert [ref for ref in former if ref() is not None] == []
    finally:
        gc.enable()


def test_sampled_tokens_do_not_depend_on_the_batch(net: DenseNet) -> None:
    wanted = prompts(6, seed=3)
    engine = engine_of(net)
    together = [add(engine, prompt, seed=i) for i, prompt in enumerate(wanted)]
    run(engine)
    for i, prompt in enumerate(wanted):
        engine = engine_of(net, prefix_reuse=False)
        alone = add(engine, prompt, seed=i)
        run(engine)
        assert alone.known.tolist() == together[i].known.tolist()


def test_deterministic_results_are_bit_identical_whatever_else_runs(net: DenseNet) -> None:
    wanted = prompts(10, seed=3, high=120)
    recorded = []
    for order, settings in ((1, {"max_batch": 8}), (-1, {"max_batch": 2}), (1, {"kv_tokens": 500})):
        engine = engine_of(net, deterministic=True, prefill_chunk=32, **settings)
        sequences = {i: add(engine, wanted[i], seed=i) for i in range(10)[::order]}
        spoken = run(engine)
        recorded.append(
            [(s.known.tolist(), [c.logprobs for c in chunks_of(spoken, s)]) for s in (sequences[i] for i in range(10))]
        )
    assert recorded[0] == recorded[1] == recorded[2]


def test_T053_every_end_id_stops_and_stays_in_the_output(net: DenseNet) -> None:
    def outcome(eos_ids: frozenset[int], **sampling: Any) -> tuple[list[int], str | None]:
        engine = engine_of(net, eos_ids=eos_ids)
        sequence = add(engine, np.array([5, 6], np.int32), seed=1, max_tokens=12, **sampling)
        chunks = chunks_of(run(engine), sequence)
        return [int(c.token_ids[0]) for c in chunks], chunks[-1].finish_reason

    free, reason = outcome(frozenset())
    assert reason == "length"
    third = free.index(free[3]) + 1
    unused = next(token for token in range(80) if token not in free)
    assert outcome(frozenset({unused, free[3]})) == (free[:third], "stop")
    assert outcome(frozenset({unused}), stop_token_ids=(free[3],)) == (free[:third], "stop")
    assert outcome(frozenset({unused}))[1] == "length"


def test_the_models_own_end_ids_hold_by_default(net: DenseNet, folder: Path) -> None:
    engine = Engine(net, version=1, settings=EngineSettings(max_context=CONTEXT))
    assert add(engine, np.array([5], np.int32)).ends == frozenset(read_config(folder).eos_ids) != frozenset()


def test_an_abort_frees_everything_wherever_the_request_is(net: DenseNet) -> None:
    engine = engine_of(net, max_batch=3, prefill_chunk=16)
    decoding = add(engine, np.array([1, 2, 3], np.int32), max_tokens=300)
    other = add(engine, np.array([4, 5], np.int32), max_tokens=30, seed=2)
    spoken = run(engine, steps=3)
    prefilling = add(engine, prompts(1, low=100, high=101)[0], seed=3)
    waiting = add(engine, np.array([6], np.int32), seed=4)
    run(engine, spoken, steps=1)
    assert decoding.decoding
    assert prefilling in engine.scheduler.running
    assert not prefilling.decoding
    assert waiting in engine.scheduler.waiting
    for sequence in (decoding, prefilling, waiting, waiting):
        engine.abort(sequence)
    run(engine, spoken)
    assert engine.scheduler.kv_tokens_free == engine.settings.kv_tokens
    assert {len(spoken[decoding]), len(spoken.get(waiting, []))} == {4, 0}
    assert_exact(net, spoken, other)
    engine.abort(other)


def test_first_come_first_served_and_the_oldest_goes_on_under_a_full_cache(net: DenseNet) -> None:
    engine = engine_of(net, kv_tokens=CONTEXT, prefix_reuse=False)
    sequences = [add(engine, prompt, seed=i, max_tokens=150) for i, prompt in enumerate(prompts(5, low=60, high=61))]
    ended = list(run(engine))
    assert ended == sequences
    finished: list[Sequence] = []
    engine = engine_of(net, kv_tokens=CONTEXT, prefix_reuse=False)
    sequences = [add(engine, prompt, seed=i, max_tokens=150) for i, prompt in enumerate(prompts(5, low=60, high=61))]
    while engine.busy:
        finished += [s for s, e in engine.step() if isinstance(e, TokenChunk) and e.finish_reason]
    assert finished == sequences


def test_nan_logits_fail_their_request_alone_and_poison_no_row(net: DenseNet, folder: Path) -> None:
    tensors = load_tensors(folder, net.config.parameter_shapes())
    embedding = tensors["model.embed_tokens.weight"].clone()
    embedding[79] = torch.inf  # token 79 alone leads to NaN
    config = dataclasses.replace(net.config, tied=False)
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    sick = DenseNet.from_tensors(
        config,
        {**tensors, **head, "model.embed_tokens.weight": embedding},
        dtype=torch.float32,
        device=CPU,
        positions=CONTEXT,
    )
    engine = engine_of(sick)
    healthy = [np.array([1, 2, 3, i], np.int32) for i in range(6)]
    bad = np.array([4, 79, 5], np.int32)
    first = [add(engine, prompt, temperature=0.0, seed=i) for i, prompt in enumerate(healthy)]
    failing = add(engine, bad, seed=9)
    spoken = run(engine)
    [failure] = spoken[failing]
    assert isinstance(failure, BackendError)
    assert "NaN or infinite under weights version 1 at output token 0" in str(failure)
    second = [add(engine, prompt, temperature=0.0, seed=i) for i, prompt in enumerate(healthy)]
    spoken |= run(engine)
    assert engine.scheduler.kv_tokens_free == engine.settings.kv_tokens
    for sequence in first + second:
        assert all(math.isfinite(float(chunk.logprobs[0])) for chunk in chunks_of(spoken, sequence))
    assert [s.known.tolist() for s in first] == [s.known.tolist() for s in second]


def test_a_temperature_too_small_to_divide_by_is_refused(net: DenseNet) -> None:
    for temperature in (1e-9, -0.5, math.nan, math.inf):
        with pytest.raises(BadRequest, match="temperature"):
            add(engine_of(net), np.array([1], np.int32), temperature=temperature)
