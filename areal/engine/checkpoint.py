"""What the ranks of a net write to disk: a model folder that transformers loads, and beside it the state to go on from, bit for bit.

    held = hold(named_tensors, config_files)                         # a copy in host memory: training may go on
    held = hold(named_tensors, config_files, state, facts)           # with optimizer moments, masters and RNG
    write(path, held, source_dir, step=120, about={})                # config.json, model.safetensors, tokenizer files, the mark last
    with opened(path, net, world) as saved: ...                      # checked: it is this net's, and every byte is what was written

Of a net on several processes each holds its own pieces and nothing is gathered. `write` falls into three: begin(path) makes the folder, on
the leader; write_own(path, rank, held) writes a rank's pieces into it, on every rank; finish(...), on the leader, makes model.safetensors from
the pieces of the weights, which lie there for that long, one tensor in memory at a time, and sets the mark. The ranks see one file system.

A folder is complete or absent: it is written aside, synced, marked (checkpoint_files.py), then renamed; an older folder of that
name goes only after that. Tied weights stand once, under their first name. Everything is safetensors and JSON: nothing in a
checkpoint can run code when it is loaded, and every byte is checked against the mark before it is used.

Of a net with an adapter the weights are the adapter's: they lie in adapter/ as peft has them, and a model.safetensors is written beside them,
merged, where a model is wanted; a recovery state alone goes without (adapter_files.py).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from areal.base.atomic import sync_folder
from areal.base.errors import CheckpointError, ConfigError
from areal.engine.adapter_files import AdapterBase, check_same_adapter, write_merged
from areal.engine.checkpoint_files import (
    ADAPTER,
    FORMAT,
    MARK,
    MODEL,
    STATE,
    File,
    Mark,
    damage,
    describe,
    read_mark,
    write_mark,
)
from areal.engine.net import Net
from areal.engine.parallel.pieces import fill
from areal.engine.parallel.world import World
from areal.engine.piece_files import HeldPiece, SavedPieces, own_pieces, write_pieces
from areal.models.adapter import CONFIG, FOLDER, WEIGHTS, read_adapter
from areal.models.hf_names import Parts, part_shape, to_disk
from areal.models.hf_weights import WeightFiles
from areal.weights.tensor_file import write_tensor_stream

_PIECES = "recovery/pieces-{}.safetensors"
_WEIGHT_PIECES = ".weights-{}.safetensors"  # gone when the checkpoint is whole
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx", ".pkl", ".index.json")


@dataclass(frozen=True, slots=True)
class Recovery:
    """pieces: of optimizer moments, masters, RNG, what this process writes. facts: JSON values (step, optimizer steps, ...)."""

    pieces: Mapping[str, HeldPiece]
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Held:
    """What this process writes of a net's state as it was, in host memory that nothing else refers to. parts: what lies on disk of one of
    the weights. config: of the model, as JSON files. alone: there are no other processes, so the weights are whole. base: of an adapter,
    which the weights then are."""

    weights: Mapping[str, HeldPiece]
    parts: Callable[[str], Parts]
    config: Mapping[str, bytes]
    recovery: Recovery | None
    alone: bool
    base: AdapterBase | None = None

    @property
    def bytes(self) -> int:
        """Of all numbers."""
        pieces = [*self.weights.values(), *(self.recovery.pieces.values() if self.recovery else ())]
        return sum(held.piece.bytes for held in pieces)


def hold(
    weights: Iterable[tuple[str, Tensor]],
    config: Mapping[str, bytes],
    state: Iterable[tuple[str, Tensor]] | None = None,
    facts: Mapping[str, Any] | None = None,
    *,
    parts: Callable[[str], Parts] = lambda name: {name: ()},
    base: AdapterBase | None = None,
    world: World | None = None,
) -> Held:
    """Copy everything that a later training step may change, each distinct piece on the first process that has it. state and facts: of the
    Recovery, where there is to be one. Every process of the world calls it; what they tell each other is who has what."""
    world = world or World.alone()
    recovery = None if state is None else Recovery(own_pieces(state, world), dict(facts or {}))
    return Held(own_pieces(weights, world), parts, config, recovery, world.mesh is None, base)


def write(
    path: str | os.PathLike[str],
    held: Held,
    source_dir: str,
    *,
    step: int,
    model: bool = True,
    about: Mapping[str, Any] | None = None,
    world: World | None = None,
) -> None:
    """Write the folder `path`; of several processes all do it together. source_dir: where tokenizer, template and generation settings are
    copied from. model: see `finish`. about: for the mark.

    Raises CheckpointError with the path and the reason, a full disk for example, on every process; then `path` is as it was before."""
    world = world or World.alone()
    files: dict[str, File] = {}
    try:
        _all_do(world, lambda: begin(path) if world.leader else None)
        for said in _all_do(world, lambda: write_own(path, world.rank, held)):
            files |= msgspec.convert(said, dict[str, File])
        last = partial(finish, path, held, files, source_dir, step=step, model=model, about=about)
        _all_do(world, lambda: last() if world.leader else 0)
    finally:
        if world.leader:
            abandon(path)


def begin(path: str | os.PathLike[str]) -> None:
    """Make the folder that is written into. Raises CheckpointError where that cannot be."""
    target = Path(path)
    with _named(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        abandon(target)
        (_aside(target) / "recovery").mkdir(mode=0o700, parents=True)
        _aside(target).chmod(0o700)


def write_own(path: str | os.PathLike[str], rank: int, held: Held) -> dict[str, File]:
    """Write what this process holds into the folder that the leader began; on disk when it returns the files' entries."""
    target, files = Path(path), {}
    aside = _aside(target)
    with _named(target):
        if held.weights and not held.alone:
            name = _WEIGHT_PIECES.format(rank)
            files[name] = write_pieces(aside / name, held.weights, durable=False)
        if held.recovery is not None and held.recovery.pieces:
            name = _PIECES.format(rank)
            files[name] = write_pieces(aside / name, held.recovery.pieces)
    return files


def finish(
    path: str | os.PathLike[str],
    held: Held,
    pieces: Mapping[str, File],
    source_dir: str,
    *,
    step: int,
    model: bool = True,
    about: Mapping[str, Any] | None = None,
) -> int:
    """Make a checkpoint of the folder. held: the leader's; pieces: what write_own returned on all processes. model: false leaves an adapter's model
    out. Returns the bytes of its tensors."""
    target = Path(path)
    aside = _aside(target)
    with _named(target):
        if model or held.base is None:
            _copy_companions(Path(source_dir), aside)
            for name, data in held.config.items():
                (aside / name).write_bytes(data)
        large = {name: file for name, file in pieces.items() if name.startswith("recovery/")}
        parted = [aside / name for name in pieces if name not in large]
        if held.base is None:
            large[MODEL] = _write_weights(aside / MODEL, held, parted)
        else:
            large |= _write_adapter(aside, held, held.base, parted, model=model)
        for file in parted:
            file.unlink()
        if held.recovery is None:
            (aside / "recovery").rmdir()
        else:
            (aside / STATE).write_text(json.dumps(dict(held.recovery.facts), indent=1))
        small = [file for file in sorted(aside.rglob("*")) if file.is_file() and file.suffix != ".safetensors"]
        files = {str(file.relative_to(aside)): describe(file) for file in small} | large
        _sync(small)
        for folder in {(aside / name).parent for name in files}:
            sync_folder(folder)
        write_mark(aside, Mark(FORMAT, step, files, dict(about or {})))
        put_in_place(aside, target)
    return sum(file.bytes for file in large.values())


def abandon(path: str | os.PathLike[str]) -> None:
    """What was begun and is not finished goes."""
    shutil.rmtree(_aside(Path(path)), ignore_errors=True)


class Saved:
    """An open checkpoint. facts: its JSON values, None where it is a model and nothing more."""

    def __init__(self, folder: Path, weights: WeightFiles, state: SavedPieces, facts: Mapping[str, Any] | None) -> None:
        self._folder = folder
        self._weights = weights
        self._state = state
        self.facts = facts

    def state(self, places: Mapping[str, Tensor], *, prefix: str, world: World) -> dict[str, Tensor]:
        """What this process holds of the state: `places` says which tensors it may have and how each is cut; those that begin with `prefix`
        are wanted whole. On the CPU. Every process of the world calls it.

        Raises ConfigError, on every process, if it is another net's."""
        shapes = self._state.shapes
        for name in places.keys() & shapes.keys():
            if shapes[name] != (shape := tuple(places[name].shape)):
                raise ConfigError(
                    f"{name} of {self._folder} has shape {shapes[name]}, the model's {shape}; it belongs to another model"
                )
        known = _names(places, world)
        if strange := sorted(name for name in shapes if name not in known and not name.startswith(prefix)):
            raise ConfigError(
                f"{self._folder} holds {strange[0]!r}, which this net does not have: it belongs to another model, or, with experts, to the other of "
                "fsdp: and archon:, which stack them differently; set actor.backend back, or begin another run with actor.path set to it"
            )
        found = {name: self._state.read(name, like=place) for name, place in places.items() if name in shapes}
        return found | {name: self._state.whole(name) for name in shapes if name.startswith(prefix)}

    def weights_into(self, parts: Parts, tensor: Tensor) -> None:
        """Read what this process holds of one of the net's tensors."""
        fill(tensor, parts, self._weights)


@contextmanager
def opened(path: str | os.PathLike[str], policy: Net, world: World | None = None) -> Iterator[Saved]:
    """The checkpoint, whose weights are known to fit the policy. Nothing is changed. Every process of the policy's world opens it, whatever
    layout wrote it, and raises what any other does; each checks some of the files.

    Raises ConfigError if the folder belongs to another model, CheckpointError if it is no checkpoint or not what was written."""
    folder, world = Path(path), world or World.alone()
    mark = read_mark(folder)
    found = damage(folder, recovery=False, part=(world.rank, world.spec.size)) or ""
    if said := [message.decode() for message in world.gather(found.encode()) if message]:
        raise CheckpointError(f"{said[0]}; resume from an earlier checkpoint")
    state = [folder / name for name in mark.files if name.startswith("recovery/") and name.endswith(".safetensors")]
    facts = json.loads((folder / STATE).read_text()) if mark.resumable else None
    if facts is not None:
        check_same_adapter(folder, facts.get("adapter"), policy.base)
    weights = WeightFiles(folder) if policy.base is None else WeightFiles(folder / FOLDER, WEIGHTS)
    _check_fits(folder, weights, policy, world)
    with SavedPieces(state) as pieces:
        yield Saved(folder, weights, pieces, facts)


def put_in_place(aside: Path, target: Path) -> None:
    """Rename; what was there before stands as `.NAME.former` until the new folder has the name."""
    former = target.with_name(f".{target.name}.former")
    shutil.rmtree(former, ignore_errors=True)
    if target.exists():
        os.rename(target, former)
    try:
        os.rename(aside, target)
    except OSError:
        if former.exists():
            os.rename(former, target)
        raise
    sync_folder(target.parent)
    shutil.rmtree(former, ignore_errors=True)


def _names(own: Iterable[str], world: World) -> set[str]:
    """Of all tensors of the net; of a pipeline, each process has some of them."""
    said = json.dumps(list(own)).encode()
    return {name for message in world.gather(said) for name in json.loads(message)}


def _all_do(world: World, work: Callable[[], Any]) -> list[Any]:
    """What `work` gave on every process, as JSON has it. Raises on all where it failed on one."""
    failed, given = "", None
    try:
        given = work()
    except CheckpointError as error:
        failed = str(error)
    every = [msgspec.json.decode(message) for message in world.gather(msgspec.json.encode((failed, given)))]
    if reasons := [reason for reason, _ in every if reason]:
        raise CheckpointError(reasons[0])
    return [each for _, each in every]


def _check_fits(folder: Path, weights: WeightFiles, policy: Net, world: World) -> None:
    own = {
        on_disk: part_shape(place, tuple(tensor.shape))
        for name, tensor in policy.named_tensors()
        for on_disk, place in policy.parts(name).items()
    }
    if difference := sorted(_names(own, world) ^ weights.shapes.keys()):
        what = "belongs to another model"
        if difference[0].endswith("e_score_correction_bias"):
            what = "was saved under another actor.moe_bias_rate (0 or above), set it back, or begin another run with actor.path set to it"
        raise ConfigError(f"{folder} {what}: {difference[0]!r} is in only one of both")
    wrong = [name for name, shape in own.items() if shape != weights.shapes[name]]
    wrong = [f"{name} has shape {weights.shapes[name]}, not {own[name]}" for name in wrong[:1]]
    if said := [message.decode() for message in world.gather("".join(wrong).encode()) if message]:
        raise ConfigError(f"{folder} belongs to another model: {said[0]}")


def _write_adapter(aside: Path, held: Held, base: AdapterBase, parted: list[Path], *, model: bool) -> dict[str, File]:
    """Returns the files with tensors. model: beside it, what it makes of its base."""
    (aside / FOLDER).mkdir(mode=0o700)
    (aside / FOLDER / CONFIG).write_bytes(base.config())
    files = {ADAPTER: _write_weights(aside / FOLDER / WEIGHTS, held, parted)}
    if model:
        entry = write_merged(aside / MODEL, base, read_adapter(aside / FOLDER))
        files[MODEL] = File(entry["bytes"], entry["checksum"])
    return files


def _write_weights(path: Path, held: Held, parted: list[Path]) -> File:
    """The weights under their names on disk, whole. parted: files that have their pieces; none where all are in memory."""
    with SavedPieces(parted) as saved:
        metas = {name: torch.empty(shape, device="meta") for name, shape in saved.shapes.items()}
        tensors = {name: each.numbers for name, each in held.weights.items()} if held.alone else metas
        known = {name: part for whole in tensors for name, part in to_disk(held.parts(whole), tensors[whole])}
        stream = (
            pair
            for name in tensors
            for pair in to_disk(held.parts(name), tensors[name] if held.alone else saved.whole(name))
        )
        entry = write_tensor_stream(path, stream, known)
    return File(entry["bytes"], entry["checksum"])


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


@contextmanager
def _named(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error.strerror or error}; free space there") from error


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
