"""Every rank reads what it holds of each weight and nothing else: where that lies, and what it costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen3Config

from areal.engine.parallel.pieces import fill, materialise, runs_of
from areal.models.dense_config import read_config
from areal.models.hf_names import Parts, part_shape, to_disk
from areal.models.hf_weights import WeightFiles
from areal.models.tiny import write_tiny
from tests.models.hf_parts import from_disk

FUSED: Parts = {f"{kind}.{e}": (e, slice(3 * g, 3 * g + 3)) for g, kind in enumerate(("gate", "up")) for e in range(4)}
STACKED: Parts = {f"down.{e}": (e,) for e in range(4)}


@pytest.mark.parametrize(
    ("parts", "shape"), [(FUSED, (4, 6, 5)), (STACKED, (4, 3, 5)), ({"plain": ()}, (7, 3)), ({"scalar": ()}, ())]
)
def test_a_parameter_is_filled_from_its_parts_and_goes_back_into_them(
    parts: Parts, shape: tuple[int, ...], tmp_path: Path
) -> None:
    whole = torch.randn(shape)
    on_disk = {name: tensor.contiguous() for name, tensor in to_disk(parts, whole)}
    assert {name: tuple(t.shape) for name, t in on_disk.items()} == {n: part_shape(p, shape) for n, p in parts.items()}
    assert torch.equal(from_disk(parts, shape, on_disk.__getitem__), whole)
    save_file(on_disk, tmp_path / "model.safetensors")
    empty = torch.full(shape, torch.nan, dtype=torch.bfloat16)
    assert runs_of(empty) == tuple(((0, size),) for size in shape)
    fill(empty, parts, WeightFiles(tmp_path))
    assert torch.equal(empty, whole.bfloat16())


def test_what_is_tied_on_meta_is_tied_afterwards() -> None:
    with torch.device("meta"):
        embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        head.weight = embedding.weight
    net = nn.ModuleList([embedding, head])
    net.register_buffer("kept", torch.arange(3))
    materialise(net, torch.device("cpu"))
    assert head.weight is embedding.weight
    assert not head.weight.is_meta
    assert net.kept.tolist() == [0, 1, 2]


def _write(folder: Path) -> int:
    """208 MB; no tensor has more than 17. Returns the bytes of all."""
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=14,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    )
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    tensors = {name: torch.full(shape, 0.01) for name, shape in read_config(folder).parameter_shapes().items()}
    save_file(tensors, folder / "model.safetensors")
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@pytest.mark.heavy
def test_a_rank_never_holds_more_than_its_pieces_and_one_tensor_while_it_loads_or_a_bucket_while_it_gives(
    tmp_path: Path,
) -> None:
    """fsdp: and archon:, cut along d, t and p. What else a process allocates meanwhile is allowed 16 MB. On the way out there are a bucket, or one
    tensor where that is larger, and the messages that it is made of."""
    big, tiny = tmp_path / "big", tmp_path / "tiny"
    big.mkdir()
    whole = _write(big)
    write_tiny(tiny)
    for backend in ("fsdp:d2", "archon:t2", "archon:p2"):
        store = tmp_path / backend.replace(":", "-")
        command = [sys.executable, "-m", "tests.engine.parallel.loading", backend]
        ranks = [
            subprocess.Popen([*command, str(rank), str(store), str(tiny), str(big)], stdout=subprocess.PIPE)
            for rank in range(2)
        ]
        said = [rank.communicate(timeout=500)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0]
        for answer in map(json.loads, said):
            assert 0.45 * whole < answer["held"] < 0.6 * whole
            assert answer["peak"] < answer["held"] + 17e6 + 16e6, (backend, answer)
            assert answer["given"] < 2 * 17e6 + 16e6 < 0.25 * whole, (backend, answer)
