"""What a rank writes to disk: a model folder that transformers loads, and beside it the state to go on from, bit for bit.

    held = hold(named_tensors, config_files)                   # a copy in host memory: training may go on
    held = hold(named_tensors, config_files, state, facts)     # with optimizer moments, masters and RNG
    write(path, held, source_dir, step=120, about={})      # config.json, model.safetensors, tokenizer files, the mark last
    weights, recovery = read(path, net, world)             # checked: they are this net's, and every byte is what was written

A folder is complete or absent: it is written aside, synced, marked (checkpoint_files.py), then renamed; an older folder of that
name goes only after that. Tied weights stand once, under their first name. Everything is safetensors and JSON: nothing in a
checkpoint can run code when it is loaded, and every byte is checked against the mark before it is used.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal.base.atomic import sync_folder
from areal.base.errors import CheckpointError, ConfigError
from areal.engine.checkpoint_files import FORMAT, MARK, STATE, File, Mark, damage, describe, read_mark, write_mark
from areal.engine.net import Net
from areal.engine.parallel.world import World
from areal.models.hf_names import part_shape
from areal.weights.tensor_file import write_tensor_file

WEIGHTS = "model.safetensors"
OPTIMIZER = "recovery/optimizer.safetensors"
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx", ".pkl", ".index.json")


@dataclass(frozen=True, slots=True)
class Recovery:
    """tensors: optimizer moments, masters, RNG. facts: JSON values (step, optimizer steps, ...)."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Held:
    """A net's state as it was, in host memory that nothing else refers to; config: of its model, as JSON files."""

    weights: Mapping[str, Tensor]
    config: Mapping[str, bytes]
    recovery: Recovery | None

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        tensors = [*self.weights.values(), *(self.recovery.tensors.values() if self.recovery else ())]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@torch.no_grad()
def hold(
    weights: Iterable[tuple[str, Tensor]],
    config: Mapping[str, bytes],
    state: Iterable[tuple[str, Tensor]] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Held:
    """Copy everything that a later training step may change. state and facts: of the Recovery, where there is to be one."""
    recovery = None if state is None else Recovery(_copies(state), dict(facts or {}))
    return Held(_copies(weights), config, recovery)


def write(
    path: str | os.PathLike[str], held: Held, source_dir: str, *, step: int, about: Mapping[str, Any] | None = None
) -> None:
    """Write the folder `path`. source_dir: where tokenizer, template and generation settings are copied from. about: for the mark.

    Raises CheckpointError with the path and the reason, a full disk for example; then `path` is as it was before."""
    target = Path(path)
    aside = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(mode=0o700)
        _copy_companions(Path(source_dir), aside)
        for name, data in held.config.items():
            (aside / name).write_bytes(data)
        large = {WEIGHTS: _tensor_file(aside / WEIGHTS, held.weights)}
        if held.recovery is not None:
            (aside / "recovery").mkdir(mode=0o700)
            large[OPTIMIZER] = _tensor_file(aside / OPTIMIZER, held.recovery.tensors)
            (aside / STATE).write_text(json.dumps(dict(held.recovery.facts), indent=1))
        small = [file for file in sorted(aside.rglob("*")) if file.is_file() and file.suffix != ".safetensors"]
        files = {str(file.relative_to(aside)): describe(file) for file in small} | large
        _sync(small)
        for folder in {aside / name for name in files}:
            sync_folder(folder.parent)
        write_mark(aside, Mark(FORMAT, step, files, dict(about or {})))
        put_in_place(aside, target)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error.strerror or error}; free space there") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def read(
    path: str | os.PathLike[str], policy: Net, world: World | None = None
) -> tuple[dict[str, Tensor], Recovery | None]:
    """The folder's weights, which are known to fit the policy, and its recovery state if it has one, all whole and named as on disk. Changes nothing. Every
    process of the policy's world reads, and raises what any other does.

    Raises ConfigError if the folder belongs to another model, CheckpointError if it is no checkpoint or not what was written."""
    folder = Path(path)
    mark = read_mark(folder)
    if found := damage(folder, recovery=False):
        raise CheckpointError(f"{found}; resume from an earlier checkpoint")
    tensors = _read(folder / WEIGHTS)
    own = {
        on_disk: part_shape(place, tuple(tensor.shape))
        for name, tensor in policy.named_tensors()
        for on_disk, place in policy.parts(name).items()
    }
    if difference := sorted(_names(own, world) ^ tensors.keys()):
        raise ConfigError(f"{folder} belongs to another model: {difference[0]!r} is in only one of both")
    for name, shape in own.items():
        if shape != tuple(tensors[name].shape):
            shapes = f"{tuple(tensors[name].shape)}, not {shape}"
            raise ConfigError(f"{folder} belongs to another model: {name} has shape {shapes}")
    if not mark.resumable:
        return tensors, None
    return tensors, Recovery(_read(folder / OPTIMIZER), json.loads((folder / STATE).read_text()))


def put_in_place(aside: Path, target: Path) -> None:
    """Rename; what was there before stands as `.NAME.former` until the new folder has the name."""
    former = target.with_name(f".{target.name}.former")
    shutil.rmtree(former, ignore_errors=True)
    if target.exists():
        os.rename(target, former)
    os.rename(aside, target)
    sync_folder(target.parent)
    shutil.rmtree(former, ignore_errors=True)


def _copies(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}


def _names(own: Iterable[str], world: World | None) -> set[str]:
    """Of all tensors of the net; of a pipeline, each process has some of them."""
    said = json.dumps(list(own)).encode()
    return {name for message in (world or World.alone()).gather(said) for name in json.loads(message)}


def _tensor_file(path: Path, tensors: Mapping[str, Tensor]) -> File:
    entry = write_tensor_file(path, tensors)
    return File(entry["bytes"], entry["checksum"])


def _read(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Tensor] = load_file(file)
    except SafetensorError as error:
        raise CheckpointError(f"{file} is damaged ({error}); resume from an earlier checkpoint") from None
    return tensors


def _copy_companions(source: Path, target: Path) -> None:
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.startswith(".") and not file.name.endswith((*_NOT_COPIED, MARK)):
            shutil.copyfile(file, target / file.name)


def _sync(files: list[Path]) -> None:
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
