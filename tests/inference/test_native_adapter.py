"""Versions that are an adapter alone: what is served is the base with it, every time made of the base anew."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from areal import weights
from areal.base.errors import ConfigError, WeightsRefused
from areal.base.types import GenerateRequest, SamplingParams
from areal.inference.native.base_model import BaseModel
from areal.inference.native.runner import NativeBackend, receive_through
from areal.inference.native.server import ServerSpec, build_engine
from areal.models.adapter import CONFIG, WEIGHTS, Adapter, adapter_name
from areal.models.dense import causal
from areal.models.fingerprint import fingerprint
from areal.models.tiny import write_tiny

RANK, SCALE = 4, 0.5
MAPS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj")
IDS = torch.arange(40) % 37


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("net")
    write_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def base(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def adapter_tensors(base: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    found = {}
    for module in (f"model.layers.{layer}.{name}" for layer in range(2) for name in MAPS):
        out, width = base[f"{module}.weight"].shape
        found |= {adapter_name(module, "A"): 0.1 * torch.randn(RANK, width)}
        found |= {adapter_name(module, "B"): 0.1 * torch.randn(out, RANK)}
    return found


@pytest.fixture
def transfer() -> str:
    return "shared_memory"


@pytest.fixture
def publish(folder: Path, transfer: str) -> Any:
    """publish(tensors, label, **changes) -> the manifest of an adapter."""
    source = weights.source(transfer, folder)
    beside = {"scale": SCALE, "dtype": "float32", "base": fingerprint(folder)["weights"]}
    yield (
        lambda tensors, label, **changes: (
            source.publish(tensors.items(), label) | {"adapter": beside | changes.pop("adapter", {})} | changes
        )
    )
    source.close()


def served(folder: Path, **spec: Any) -> NativeBackend:
    base = BaseModel(folder)
    job = ServerSpec(model_dir=str(folder), max_context=256, **spec)
    return NativeBackend(build_engine(job, base), name="tiny", receive=receive_through(folder), threads=1, base=base)


@torch.inference_mode()
def logits_of(backend: NativeBackend) -> Tensor:
    net = backend._engine.net
    return net.logits(net.forward(IDS, torch.arange(len(IDS)), causal(net.config)))


def merged_folder(folder: Path, base: dict[str, Tensor], tensors: dict[str, Tensor], target: Path) -> Path:
    """The model that base and adapter make, by the definition, in double precision."""
    shutil.copytree(folder, target)
    merged = dict(base)
    for name in base:
        a, b = (tensors.get(adapter_name(name.removesuffix(".weight"), half)) for half in "AB")
        if a is not None and b is not None:
            merged[name] = (base[name].double() + SCALE * b.double() @ a.double()).float()
    save_file(merged, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize("transfer", list(weights.TRANSFERS))
async def test_what_is_served_is_base_and_adapter_and_nothing_of_versions_before(
    folder: Path, base: dict[str, Tensor], publish: Any, tmp_path: Path
) -> None:
    """After ten versions as after one, to the bit: merged weights are never made of merged ones. Whatever transfer brings the adapter."""
    backend, tensors = served(folder), adapter_tensors(base, 1)
    untrained = logits_of(backend)
    manifest = publish(tensors, 1)
    assert await backend.load_weights(manifest, 1) == 1
    first = logits_of(backend)
    whole = served(merged_folder(folder, base, tensors, tmp_path / "merged"))
    torch.testing.assert_close(first, logits_of(whole), atol=1e-5, rtol=0)
    assert (first - untrained).abs().max() > 0.1
    for label in range(2, 10):
        await backend.load_weights(publish(adapter_tensors(base, label), label), label)
    await backend.load_weights(publish(tensors, 10), 10)
    assert torch.equal(logits_of(backend), first)
    request = GenerateRequest("r", "s", np.full(3, 5, np.int32), SamplingParams(temperature=1.0, max_tokens=2), 0)
    assert {version async for chunk in backend.generate(request) for version in chunk.versions} == {10}
    await asyncio.gather(backend.close(), whole.close())


async def test_a_server_that_starts_with_an_adapter_serves_what_the_others_do(
    folder: Path, base: dict[str, Tensor], publish: Any, tmp_path: Path
) -> None:
    tensors = adapter_tensors(base, 2)
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text('{"r": 4, "lora_alpha": 2}')
    running, started = served(folder), served(folder, version=7, adapter=str(tmp_path))
    await running.load_weights(publish(tensors, 7), 7)
    assert torch.equal(logits_of(started), logits_of(running))
    later = publish(adapter_tensors(base, 3), 8)
    for backend in (running, started):
        await backend.load_weights(later, 8)
    assert torch.equal(logits_of(started), logits_of(running))
    (tmp_path / CONFIG).write_text('{"r": 4, "lora_alpha": 2, "use_dora": true}')
    with pytest.raises(ConfigError, match="no plain LoRA"):
        served(folder, adapter=str(tmp_path))
    await asyncio.gather(running.close(), started.close())


def _of(module: str, half: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    name = adapter_name(module, half)
    return lambda tensors: {name: tensors[name]}


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "manifest", "arrow", "said"),
    [
        (lambda t: t, {"adapter": {"base": "another"}}, "load", "trained beside other weights than those in"),
        (lambda t: t, {"adapter": {"scale": -1.0}}, "load", "says of the adapter"),
        (lambda t: t, {"adapter": {"dtype": "float8"}}, "load", "trained beside other weights"),
        (_of(Q, "A"), {}, "verify", "is no pair"),
        (
            lambda t: t | {adapter_name(Q, "B"): torch.full_like(t[adapter_name(Q, "B")], torch.nan)},
            {},
            "verify",
            "holds NaN",
        ),
        (
            lambda t: t | {adapter_name(Q, "B"): torch.zeros(3, RANK)},
            {},
            "verify",
            r"by \[3, 128\], the model has \(128, 128\)",
        ),
        (
            lambda t: {n.replace("layers.1", "layers.9"): v for n, v in t.items()},
            {},
            "verify",
            "it belongs to another model",
        ),
        (lambda t: t | {"model.norm.weight": torch.zeros(128)}, {}, "verify", "is no matrix of a LoRA adapter"),
        (lambda t: t, {"adapter": None}, "verify", "weights lack"),
    ],
)
async def test_T065_an_adapter_that_does_not_fit_changes_nothing(
    folder: Path, base: dict[str, Tensor], publish: Any, change: Any, manifest: dict[str, Any], arrow: str, said: str
) -> None:
    backend = served(folder)
    before, tensors = logits_of(backend), change(adapter_tensors(base, 4))
    made = publish(tensors, 1) | manifest if manifest.get("adapter", 0) is None else publish(tensors, 1, **manifest)
    with pytest.raises(WeightsRefused, match=said) as refused:
        await backend.load_weights(made, 1)
    assert refused.value.arrow == arrow
    assert torch.equal(logits_of(backend), before)
    assert (await backend.health()).version == 0
    await backend.close()


async def test_a_flipped_byte_of_an_adapter_is_refused_by_the_name_of_its_tensor(
    folder: Path, base: dict[str, Tensor], publish: Any
) -> None:
    backend, manifest = served(folder), publish(adapter_tensors(base, 5), 1)
    path = Path(manifest["path"]) / manifest["files"][0]["name"]
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(WeightsRefused, match=r"tensor base_model\.model\.model\.layers\.1\..* differs") as refused:
        await backend.load_weights(manifest, 1)
    assert refused.value.arrow == "verify"
    await backend.close()


def test_merging_is_the_definition(base: dict[str, Tensor]) -> None:
    tensors = adapter_tensors(base, 6)
    adapter = Adapter(tensors, scale=SCALE)
    name = f"{Q}.weight"
    a, b = tensors[adapter_name(Q, "A")], tensors[adapter_name(Q, "B")]
    naive = base[name].double() + SCALE * b.double() @ a.double()
    torch.testing.assert_close(adapter.on(name, base[name]).double(), naive, atol=1e-6, rtol=0)
    norm = "model.norm.weight"
    assert adapter.on(norm, base[norm]) is base[norm]
