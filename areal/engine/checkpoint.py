"""What a rank writes to disk: a model folder that transformers loads, and beside it the state to go on from, bit for bit.

    save(path, policy, source_dir, recovery=None)                    # config.json, model.safetensors, tokenizer files
    save(path, policy, source_dir, recovery=Recovery(tensors, facts))   # + recovery/optimizer.safetensors, recovery/state.json
    recovery = load(path, policy)

A folder is complete or absent: it is written aside, synced, then renamed; an older folder of that name goes only after that. Tied weights stand
once, under their first name. Everything is safetensors and JSON: nothing in a checkpoint can run code when it is loaded.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from areal.base.errors import ConfigError
from areal.engine.critic import Net

WEIGHTS = "model.safetensors"
FORMAT = 1
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx", ".pkl", ".index.json")


@dataclass(frozen=True, slots=True)
class Recovery:
    """tensors: optimizer moments, masters, RNG. facts: JSON values (step, optimizer steps, ...)."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]


def save(path: str | os.PathLike[str], policy: Net, source_dir: str, recovery: Recovery | None = None) -> None:
    """Write the folder `path`. source_dir: where tokenizer, template and generation settings are copied from.

    Raises OSError with the path when the disk is full; then `path` is as it was before."""
    from safetensors.torch import save_file

    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(mode=0o700)
        _copy_companions(Path(source_dir), aside)
        policy.model.config.save_pretrained(aside)
        tensors = {name: tensor.cpu().contiguous() for name, tensor in policy.named_tensors()}
        save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
        if recovery is not None:
            folder = aside / "recovery"
            folder.mkdir()
            save_file({k: t.cpu().contiguous() for k, t in recovery.tensors.items()}, folder / "optimizer.safetensors")
            (folder / "state.json").write_text(json.dumps({"format": FORMAT, **recovery.facts}, indent=1))
        _sync_tree(aside)
        _put_in_place(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def load(path: str | os.PathLike[str], policy: Net) -> Recovery | None:
    """Put the folder's weights into the policy; returns the recovery state if it has one.

    Raises ConfigError if the folder is no checkpoint or belongs to another model."""
    folder = Path(path)
    if not (folder / WEIGHTS).is_file():
        raise ConfigError(f"{folder} is no checkpoint: {WEIGHTS} is missing; name a folder that areal saved")
    tensors = _read(folder / WEIGHTS)
    own = dict(policy.named_tensors())
    if difference := sorted(own.keys() ^ tensors.keys()):
        raise ConfigError(f"{folder} belongs to another model: {difference[0]!r} is in only one of both")
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            shapes = f"{tuple(tensors[name].shape)}, not {tuple(tensor.shape)}"
            raise ConfigError(f"{folder} belongs to another model: {name} has shape {shapes}")
    recovery = _recovery(folder / "recovery")
    for name, tensor in own.items():
        tensor.copy_(tensors[name])
    return recovery


def _recovery(folder: Path) -> Recovery | None:
    state = folder / "state.json"
    if not state.is_file():
        return None
    facts = json.loads(state.read_text())
    if facts.pop("format", None) != FORMAT:
        raise ConfigError(f"{state} is not of format {FORMAT}; resume with the version of areal that wrote it")
    return Recovery(_read(folder / "optimizer.safetensors"), facts)


def _read(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Tensor] = load_file(file)
    except SafetensorError as error:
        raise ConfigError(f"{file} is damaged ({error}); resume from an earlier checkpoint") from None
    return tensors


def _copy_companions(source: Path, target: Path) -> None:
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.startswith(".") and not file.name.endswith(_NOT_COPIED):
            shutil.copyfile(file, target / file.name)


def _sync_tree(folder: Path) -> None:
    for file in [*folder.rglob("*"), folder]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _put_in_place(aside: Path, target: Path) -> None:
    former = target.with_name(f".{target.name}.{os.getpid()}.former")
    shutil.rmtree(former, ignore_errors=True)
    if target.exists():
        os.rename(target, former)
    os.rename(aside, target)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    shutil.rmtree(former, ignore_errors=True)
