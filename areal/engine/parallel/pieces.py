"""What a process holds of a tensor that is cut, and how it gets there: from files, slice by slice.

    runs_of(parameter)                           # per axis the (start, length) stretches that this rank holds, in order
    materialise(module, device)                  # parameters on meta become empty ones here, tied ones stay tied
    fill(parameter, parts, files)                # reads what this rank holds of it, and nothing else
    for there, here in overlaps(runs, others): ...        # what two pieces of one tensor have in common, whatever cut each of them

Nets are made on meta and cut there, so that no rank ever holds more of the weights than its pieces and what is read of one parameter.
Neighbours: gather.py (the way out), engine/piece_files.py (checkpoints), models/hf_names.py (parts), models/hf_weights.py (files).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from areal.base.errors import ShapeError
from areal.engine.parallel.world import local
from areal.models.hf_names import Parts, Place
from areal.models.hf_weights import WeightFiles

Runs = tuple[tuple[int, int], ...]
"""Of one axis: (start, length) of what a process has, in order."""

Slices = tuple[slice, ...]


def runs_of(tensor: Tensor, name: str = "a tensor") -> tuple[Runs, ...]:
    """Placements apply from the first mesh axis to the last, each to what the ones before left. Raises ShapeError for a partial sum."""
    indices: dict[int, Tensor] = {}
    if isinstance(tensor, DTensor):
        coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
        for size, place, placement in zip(tensor.device_mesh.shape, coordinate, tensor.placements, strict=True):
            if placement.is_partial():
                raise ShapeError(f"{name} is a sum that was never finished ({placement}); it cannot be taken whole")
            if isinstance(placement, Shard | _StridedShard):
                before = indices.get(placement.dim, torch.arange(tensor.shape[placement.dim]))
                indices[placement.dim] = _part(before, size, place, getattr(placement, "split_factor", 1))
    return tuple(_runs(indices[axis]) if axis in indices else ((0, size),) for axis, size in enumerate(tensor.shape))


def materialise(module: nn.Module, device: torch.device) -> None:
    """In place. What is not on meta moves to the device."""
    ties: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                ties.setdefault(id(parameter), []).append((owner, name))
    module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))  # type: ignore[no-untyped-call]
    for (first, name), *others in ties.values():
        for owner, other in others:
            setattr(owner, other, getattr(first, name))


@torch.no_grad()
def fill(parameter: Tensor, parts: Parts, files: WeightFiles) -> None:
    """Raises ConfigError where a file cannot be read. Names and shapes are known to fit."""
    held, runs = local(parameter), runs_of(parameter)
    with files.opened() as read:
        for name, place in parts.items():
            indices = sum(
                isinstance(each, int) for each in place
            )  # they come first, and the tensor on disk lacks these axes
            for there, here in overlaps(_runs_at(place, parameter.shape), runs):
                held[here].copy_(read(name, there[indices:]).view(held[here].shape))


def overlaps(there: Sequence[Runs], here: Sequence[Runs]) -> Iterator[tuple[Slices, Slices]]:
    """Of two pieces of one tensor: where what both have lies in the one, and in the other."""
    for combination in product(*map(_in_common, there, here)):
        yield tuple(first for first, _ in combination), tuple(second for _, second in combination)


def _in_common(there: Runs, here: Runs) -> list[tuple[slice, slice]]:
    found, offset = [], 0
    for start, length in there:
        other_offset = 0
        for other, other_length in here:
            low, high = max(start, other), min(start + length, other + other_length)
            if low < high:
                first = slice(offset + low - start, offset + high - start)
                found.append((first, slice(other_offset + low - other, other_offset + high - other)))
            other_offset += other_length
        offset += length
    return found


def sizes_of(runs: Sequence[Runs]) -> tuple[int, ...]:
    """The shape of the piece."""
    return tuple(sum(length for _, length in each) for each in runs)


def whole_runs(shape: Sequence[int]) -> tuple[Runs, ...]:
    """Of a tensor that is not cut."""
    return tuple(((0, size),) for size in shape)


def _runs_at(place: Place, shape: Sequence[int]) -> tuple[Runs, ...]:
    """What a tensor on disk has of the parameter that it lies at `place` of."""
    runs = list(whole_runs(shape))
    for axis, each in enumerate(place):
        runs[axis] = ((each, 1),) if isinstance(each, int) else ((each.start, each.stop - each.start),)
    return tuple(runs)


def _part(indices: Tensor, size: int, place: int, factor: int) -> Tensor:
    """As torch cuts: each of `factor` parts in `size` chunks, of which the last may be short or missing."""
    chunks = [part.chunk(size) for part in indices.chunk(factor)]
    return torch.cat([part[place] if place < len(part) else part[0][:0] for part in chunks])


def _runs(indices: Tensor) -> Runs:
    if not len(indices):
        return ((0, 0),)
    breaks = (indices.diff() != 1).nonzero()[:, 0] + 1
    starts, ends = [0, *breaks.tolist()], [*breaks.tolist(), len(indices)]
    return tuple((int(indices[start]), end - start) for start, end in zip(starts, ends, strict=True))
