"""A set of weights as one or more tensor files: what shared_memory.py and disk.py have in common.

    done = write_shards(lambda k: folder / f"part-{k}", tensors, shard_bytes=4 << 30)     # all or nothing
    tensors = read_shards(folder, entries)

Tied weights (two names, one memory) are written once, under the first name (house: "tied weights once").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from areal.base.errors import ShapeError, WeightsRefused
from areal.weights.tensor_file import TensorFileWriter, read_tensor_file

SHARD_BYTES = 4 << 30
"""Largest file of a set; what hub checkpoints use."""

_weak_reference: Callable[[torch.UntypedStorage], StorageWeakRef] = StorageWeakRef  # the class is untyped


class TiedTensors:
    """Tells whether a tensor is one that was seen before under another name: same storage, place, shape and strides.

    Holds weak references, so that a gathered tensor which was freed is never mistaken for the next at its address.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[Any, ...], StorageWeakRef] = {}

    def seen(self, tensor: torch.Tensor) -> bool:
        storage = _weak_reference(tensor.untyped_storage())
        key = (storage.cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and key in self._seen:
            return True
        self._seen[key] = storage  # the weak reference keeps this address from being given to another storage
        return False


class ShardWriter:
    """Writes `path_of(0)`, `path_of(1)`, … of at most shard_bytes (a larger tensor gets a file of its own), tied tensors once."""

    def __init__(self, path_of: Callable[[int], Path], shard_bytes: int = SHARD_BYTES) -> None:
        self._path_of = path_of
        self._shard_bytes = shard_bytes
        self._names: set[str] = set()
        self._tied = TiedTensors()
        self._done: list[tuple[Path, dict[str, Any]]] = []
        self._writer = TensorFileWriter(path_of(0))

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Raises ShapeError for a repeated name, OSError when the medium is full."""
        if name in self._names or name == "__metadata__":
            raise ShapeError(f"weights: {name} comes twice or is no parameter name")
        self._names.add(name)
        if self._tied.seen(tensor):
            return
        if not self._writer.has_room(name, tensor, self._shard_bytes):
            self._done.append((self._writer.path, self._writer.close()))
            self._writer = TensorFileWriter(self._path_of(len(self._done)))
        self._writer.add(name, tensor)

    def close(self) -> list[tuple[Path, dict[str, Any]]]:
        """Path and manifest entry of each file. Raises ShapeError where there is no tensor."""
        if not self._names:
            raise ShapeError("weights: there is no tensor to publish")
        return [*self._done, (self._writer.path, self._writer.close())]

    def discard(self) -> None:
        """Give up before `close` has returned: nothing is left behind."""
        self._writer.discard()
        for path, _ in self._done:
            path.unlink(missing_ok=True)


def write_shards(
    path_of: Callable[[int], Path], tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int = SHARD_BYTES
) -> list[tuple[Path, dict[str, Any]]]:
    """All of `tensors` through a ShardWriter. On any error nothing is left behind. Raises as that does."""
    writer = ShardWriter(path_of, shard_bytes)
    try:
        for name, tensor in tensors:
            writer.add(name, tensor)
        return writer.close()
    except BaseException:  # also Ctrl-C: a half-written file of gigabytes must not stay
        writer.discard()
        raise


def read_shards(folder: Path, entries: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """All tensors of a set. Raises WeightsRefused if a file is absent, altered, or a name comes twice."""
    tensors: dict[str, torch.Tensor] = {}
    for entry in entries:
        part = read_tensor_file(folder / entry["name"], entry)
        if twice := tensors.keys() & part.keys():
            raise WeightsRefused(
                "load", f"weights {folder}: {min(twice)} stands in two files; publish the version again"
            )
        tensors |= part
    return tensors


def checked_entries(manifest: Mapping[str, Any], transfer: str, names: re.Pattern[str]) -> list[Mapping[str, Any]]:
    """The `files` of a manifest, which came over a wire: right transfer, right types, and only names of our own making.

    Raises WeightsRefused otherwise. The folder is the caller's to check.
    """
    files = manifest.get("files")
    typed = (
        isinstance(manifest.get("version"), int) and isinstance(manifest.get("path"), str) and isinstance(files, list)
    )
    if manifest.get("transfer") != transfer or not typed or not files:
        raise WeightsRefused(
            "load",
            f"this is not a manifest of the {transfer} transfer: {dict(manifest)!r:.200}; "
            "trainer and server must run with the same weights.transfer",
        )
    for entry in files:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("bytes"), int):
            raise WeightsRefused(
                "load", f"weights manifest: {entry!r:.200} is not a file entry; publish the version again"
            )
        if not isinstance(entry.get("name"), str) or not names.fullmatch(entry["name"]):
            raise WeightsRefused(
                "load",
                f"weights manifest names {entry.get('name')!r:.200}, which is no file of this run; it is not read",
            )
        if not isinstance(entry.get("checksum"), str):
            raise WeightsRefused(
                "load", f"weights manifest: {entry['name']} has no checksum; publish the version again"
            )
    return list(files)
