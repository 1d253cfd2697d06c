"""Pieces of cut tensors in safetensors files, one file of each process, and the way back into whatever cut reads them.

    own = own_pieces(net.named_tensors(), world)               # every process calls it; copies in host memory of what this one writes
    entry = write_pieces(path, own)
    with SavedPieces([path, ...]) as saved:                    # the files of all processes, or one of whole tensors
        saved.shapes["exp_avg.model.norm.weight"]              # of the whole
        saved.read(name, like=parameter)                       # what this process holds of it, and no more is read
        saved.whole(name)

A piece is known by the name and shape of the whole and by the indices that it has along each axis, as stretches; they stand in the header, which
the checkpoint's mark covers. So layouts need not know of each other: what two pieces share is a matter of intervals. Every distinct piece is
written once, by the first process that holds it. A tensor without such an entry is whole. Neighbours: parallel/gather.py (who holds
what; whole tensors over the wire), checkpoint.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from areal.base.errors import CheckpointError
from areal.engine.checkpoint_files import File
from areal.engine.parallel.gather import Piece, described, shares
from areal.engine.parallel.pieces import Runs, overlaps, runs_of, sizes_of, whole_runs
from areal.engine.parallel.world import World, local
from areal.weights.tensor_file import DTYPES, write_tensor_file

PIECES = "areal.pieces"
"""Key in a safetensors header's __metadata__: name -> whole shape and runs."""


class _Entry(msgspec.Struct, frozen=True):
    """What a header says of one piece; runs as in gather.Piece."""

    shape: tuple[int, ...]
    runs: tuple[Runs, ...]


@dataclass(frozen=True, slots=True)
class HeldPiece:
    """A piece and its numbers, in host memory that nothing else refers to."""

    piece: Piece
    numbers: Tensor


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a piece lies."""

    file: Any
    path: Path
    runs: tuple[Runs, ...]
    dtype: str


_entries = msgspec.json.Decoder(dict[str, _Entry])


@torch.no_grad()
def own_pieces(named: Iterable[tuple[str, Tensor]], world: World) -> dict[str, HeldPiece]:
    """Raises ShapeError, on every process alike, where the pieces of a tensor do not make it up."""
    own = dict(named)
    mine = shares([described(name, tensor) for name, tensor in own.items()], world)
    return {
        piece.name: HeldPiece(piece, local(own[piece.name]).detach().to("cpu", copy=True).contiguous())
        for piece in mine
    }


def write_pieces(path: Path, pieces: Mapping[str, HeldPiece], *, durable: bool = True) -> File:
    """Raises OSError where the medium is full; then nothing is left behind."""
    entries = {
        name: {"shape": held.piece.shape, "runs": held.piece.runs}
        for name, held in pieces.items()
        if not held.piece.complete
    }
    metadata = {PIECES: json.dumps(entries, separators=(",", ":"))} if entries else {}
    tensors = {name: held.numbers for name, held in pieces.items()}
    entry = write_tensor_file(path, tensors, metadata=metadata, durable=durable)
    return File(entry["bytes"], entry["checksum"])


class SavedPieces(AbstractContextManager["SavedPieces"]):
    """Files stay open until it is left; until then what was read of them may be counted as this process's memory."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = list(paths)
        self._files = ExitStack()
        self._stored: dict[str, list[_Stored]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Of all tensors, whole."""

    def __enter__(self) -> SavedPieces:
        """Raises CheckpointError where a file is none of ours, or where some of a tensor is missing."""
        with ExitStack() as stack:
            for path in self._paths:
                try:
                    self._take(path, stack.enter_context(safe_open(path, framework="pt")))
                except (SafetensorError, msgspec.MsgspecError) as error:
                    raise CheckpointError(f"{path} is damaged ({error}); resume from an earlier checkpoint") from None
            for name, stored in self._stored.items():
                there = sum(math.prod(sizes_of(runs)) for runs in {one.runs for one in stored})
                if there != math.prod(self.shapes[name]):
                    folder = self._paths[0].parent
                    raise CheckpointError(
                        f"the files in {folder} do not make up {name}; resume from an earlier checkpoint"
                    )
            self._files = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.close()

    def whole(self, name: str) -> Tensor:
        """On the CPU, memory of its own."""
        return self._read(name, whole_runs(self.shapes[name]))

    def read(self, name: str, like: Tensor) -> Tensor:
        """What this process holds of a tensor that is cut as `like` is, on the CPU. Its whole shape is that of `like`."""
        return self._read(name, runs_of(like))

    def dtype(self, name: str) -> torch.dtype:
        """As it is stored."""
        return DTYPES[self._stored[name][0].dtype]

    def _read(self, name: str, runs: Sequence[Runs]) -> Tensor:
        target = torch.empty(sizes_of(runs), dtype=self.dtype(name))
        for stored in self._stored[name]:
            for there, here in overlaps(stored.runs, runs):
                target[here] = stored.file.get_slice(name)[there] if there else stored.file.get_tensor(name)
        return target

    def _take(self, path: Path, file: Any) -> None:
        entries = _entries.decode((file.metadata() or {}).get(PIECES, "{}"))
        for name in file.keys():  # noqa: SIM118  (no mapping)
            unread = file.get_slice(name)
            held = tuple(unread.get_shape())
            entry = entries.get(name) or _Entry(held, whole_runs(held))
            known = self.shapes.setdefault(name, entry.shape)
            stored = _Stored(file, path, entry.runs, unread.get_dtype())
            others = self._stored.setdefault(name, [])
            if sizes_of(entry.runs) != held or known != entry.shape or any(one.dtype != stored.dtype for one in others):
                raise CheckpointError(
                    f"{path} does not belong to the files beside it: its piece of {name} is of shape {held}, its entry says "
                    f"{sizes_of(entry.runs)} of {entry.shape}, another file {known}; resume from an earlier checkpoint"
                )
            others.append(stored)
