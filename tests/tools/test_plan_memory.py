"""The planner's bytes against what the engine really holds: saved tensors of small nets, and (heavy) a real step's peak at 135M."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal.algorithms import logprobs
from areal.config.backend_spec import BackendSpec, parse_backend
from areal.engine import batch
from areal.engine.place import LARGE_BLOCKS_APART
from areal.tools.plan import memory
from areal.tools.plan.devices import device_named
from areal.tools.plan.layout import Job
from areal.tools.plan.memory import kept_activations, rank_memory
from areal.tools.plan.shape import Shape, read_shape
from tests.engine.parallel.pool import Pool
from tests.tools.measure_step import grown_in_pool, row_of

HERE = Path(__file__).parent


def test_constants_are_the_engines() -> None:
    assert memory.QUERY_BLOCK == batch.BLOCK
    assert memory.HEAD_CHUNK == logprobs.CHUNK
    assert memory.KEPT_BYTES == logprobs.KEEP_BYTES


def write_net(folder: Path, family: str, layers: int) -> Shape:
    """A random net with few tokens and, for its size, wide layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig
    from transformers import Qwen3MoeForCausalLM as Sparse

    torch.manual_seed(3)
    widths = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6, "num_key_value_heads": 2}
    widths |= {"vocab_size": 97, "num_hidden_layers": layers, "head_dim": 24}
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True}
    net = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**widths, tie_word_embeddings=True)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**widths, tie_word_embeddings=True)),
        "qwen3_moe": lambda: Sparse(Qwen3MoeConfig(**widths, **experts, tie_word_embeddings=True)),
    }[family]()
    net.save_pretrained(folder)
    return read_shape(str(folder))


def saved_bytes(folder: Path, backend: str, dtype: str, checkpointing: bool, tokens: int, rank: int = 0) -> int:
    """What autograd keeps over the forward pass of one micro-batch, each memory once, the parameters aside."""
    import torch

    from areal.engine.engine import TrainEngine
    from areal.engine.settings import EngineSettings

    settings = {
        "model_dir": str(folder),
        "algorithm": "grpo",
        "threads": 1,
        "total_steps": 9,
        "dtype": dtype,
        "backend": backend,
    }
    settings |= {"max_tokens_per_mb": tokens, "gradient_checkpointing": checkpointing}
    settings |= {"lora": {"rank": rank} if rank else None}
    engine = TrainEngine.load(EngineSettings.model_validate(settings))
    parameters = {tensor.untyped_storage().data_ptr() for tensor in engine.policy.parameters()}
    held: dict[int, torch.Tensor] = {}
    forward = True

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if forward and (at := tensor.untyped_storage().data_ptr()) not in parameters:
            held[at] = tensor
        return tensor

    def give(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal forward
        forward = False
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, give):
        engine.train_step([row_of(0, tokens, 97)], step=0, current_version=0)
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


@pytest.mark.parametrize(
    ("family", "backend", "dtype", "checkpointing", "rank"),
    [
        ("llama", "fsdp:d1", "float32", False, 0),
        ("llama", "fsdp:d1", "float32", True, 0),
        ("llama", "fsdp:d1", "bfloat16", False, 0),
        ("qwen3", "fsdp:d1", "bfloat16", False, 0),
        ("qwen3", "archon:d1", "float32", False, 0),
        ("llama", "archon:d1", "bfloat16", False, 0),
        ("qwen3_moe", "archon:d1", "float32", False, 0),
        ("qwen3_moe", "fsdp:d1", "bfloat16", False, 0),
        ("llama", "fsdp:d1", "float32", False, 16),
        ("qwen3", "fsdp:d1", "bfloat16", False, 16),
    ],
)
def test_what_a_layer_keeps_is_what_autograd_keeps(
    family: str, backend: str, dtype: str, checkpointing: bool, rank: int, tmp_path: Path, restored_threads: None
) -> None:
    """The difference of four layers and one, so that what stands outside of the layers does not count."""
    tokens = 300  # two blocks of queries
    found = []
    for layers in (1, 4):
        shape = write_net(tmp_path / str(layers), family, layers)
        found.append(saved_bytes(tmp_path / str(layers), backend, dtype, checkpointing, tokens, rank))
    measured = (found[1] - found[0]) / 3
    job = Job(tokens, tokens, tokens, dtype, lora_rank=rank)
    spec, device = parse_backend(backend), device_named("cpu", 1)
    planned = kept_activations(shape, spec, job, device, "full" if checkpointing else "none", experts=shape.experts > 0)
    assert planned == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(
    ("backend", "blocks"),
    [
        ("fsdp:d1", 0),
        (
            "fsdp:d2",
            6 * 4 * 30 * 3_540_096,
        ),  # four blocks of each gathered layer's parameters, two of its gradients; not the embedding
        ("archon:t3", 9 * 4 * 30 * 512 * 576),
        ("archon:p2", 0),
    ],
)
def test_holes_are_left_by_what_exchanges_take_from_one_heap_too(backend: str, blocks: int) -> None:
    """Bytes at SmolLM2-135M; a GPU's allocator keeps blocks of one size apart."""
    shape, job = read_shape("smollm2-135m"), Job(512, 512, 4096, "float32")
    for device in (device_named("cpu", 1), device_named("h100", 1)):
        planned = rank_memory(shape, parse_backend(backend), job, device, "none")
        expected = planned.activations + planned.gradients + (blocks if device.one_heap else 0)
        assert planned.allocator == pytest.approx(device.holes * expected, rel=1e-3)


@pytest.fixture
def restored_threads() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("tokens", "rank"), [(256, 0), (512, 0), (512, 16)])
def test_the_sum_is_the_measured_peak_of_a_step_at_135m(tokens: int, rank: int) -> None:
    """The growth over the import baseline, within 15 %: docs/parallel_plan.md has the numbers. rank: of adapters, 0 where all is trained."""
    done = subprocess.run(
        [sys.executable, str(HERE / "measure_step.py"), str(tokens), "float32", "none", str(rank)],
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1])} | (LARGE_BLOCKS_APART if rank else {}),  # as a run does
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    job = Job(tokens, tokens, 2 * tokens, measured["dtype"], lora_rank=rank)
    planned = rank_memory(read_shape("smollm2-135m"), BackendSpec("fsdp"), job, device_named("cpu", 1), "none")
    assert planned.total == pytest.approx(measured["peak_growth"], rel=0.15)


POOLS = [(("archon:t3", 2), ("archon:p2", 3)), (("archon:c2", 2),), (("fsdp:d2", 2),)]
"""Layouts, with how many micro-batches a data rank has: of a pipeline more than are in flight, so that gradients are there before the last ones
come. One pool for those that do not gather parameters; after another layout's holes in the heap those that do would take up to a sixth more."""
LAYOUTS = [layout for pool in POOLS for layout in pool]


@pytest.fixture(scope="module")
def measured_layouts() -> dict[str, int]:
    """The growth of the rank that needs most."""
    found = {}
    for layouts in POOLS:
        with Pool(max(parse_backend(backend).size for backend, _ in layouts)) as pool:
            for backend, number in layouts:
                found[backend] = max(pool.call(backend, grown_in_pool, backend, 512, number))
    return found


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("backend", "micro_batches"), LAYOUTS)
def test_a_layouts_sum_is_the_measured_peak_of_its_largest_rank_at_135m(
    backend: str, micro_batches: int, measured_layouts: dict[str, int]
) -> None:
    """Within 15 %, as one process."""
    spec = parse_backend(backend)
    job = Job(512, 512, 512 * micro_batches * spec.d, "float32")
    planned = rank_memory(read_shape("smollm2-135m"), spec, job, device_named("cpu", spec.size), "none").total
    assert planned == pytest.approx(measured_layouts[backend], rel=0.15)
