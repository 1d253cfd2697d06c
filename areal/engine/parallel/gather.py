"""Whole tensors out of cut ones, on the leader alone and a few at a time: weights on their way to the backends, checkpoints.

    for name, tensor in whole(net.named_tensors(), world): ...   # every rank of the net goes through it to its end; the leader gets tensors
    for piece in shares(pieces, world): ...                      # which of its pieces each rank is to write, each once
    cut = cut_as(moment, parameter)                              # a plain local tensor, known as a part of the same cut

Who holds what is told first, as bytes; then bucket by bucket every piece that the leader lacks is sent to it, many small ones in one message. What
several ranks hold is sent once, what a pipeline's later stages hold comes from there. The leader has at most one bucket of whole tensors, or one
tensor where that is larger, beside its own pieces; the others have one message.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal.base.errors import ShapeError
from areal.engine.parallel.pieces import Runs, overlaps, runs_of, sizes_of, whole_runs
from areal.engine.parallel.world import World, local

BUCKET_BYTES = 64 << 20
_ALIGN = 16  # bytes: so that any part of a message can be seen as numbers of any type


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """What one rank holds of a tensor of this whole shape. runs: per dimension (start, length) of the indices it holds, in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    runs: tuple[Runs, ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        return sizes_of(self.runs)

    @property
    def complete(self) -> bool:
        return self.local_shape == self.shape

    @property
    def bytes(self) -> int:
        return math.prod(self.local_shape) * _dtype(self).itemsize


class _Wanted(msgspec.Struct, frozen=True):
    """A tensor and who sends what of it: (rank, piece), each part of it once."""

    parts: list[tuple[int, Piece]]

    @property
    def first(self) -> Piece:
        return self.parts[0][1]

    @property
    def bytes(self) -> int:
        return math.prod(self.first.shape) * _dtype(self.first).itemsize


_pieces = msgspec.msgpack.Decoder(list[Piece])


def whole(named: Iterable[tuple[str, Tensor]], world: World) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) pairs on the leader; nothing on the others, which must exhaust it all the same. Raises ShapeError, on every rank alike,
    where the pieces of a tensor do not make it up."""
    if world.mesh is None:
        yield from named
        return
    own = dict(named)
    for bucket in _buckets(_everywhere([described(name, tensor) for name, tensor in own.items()], world)):
        if world.leader:
            yield from _received(bucket, own, world)
        else:
            _send(bucket, own, world)


def shares(own: Sequence[Piece], world: World) -> list[Piece]:
    """Which of the pieces that this rank holds are its own to write, so that all ranks together write every tensor once. Raises as `whole`."""
    return [piece for one in _everywhere(own, world) for rank, piece in one.parts if rank == world.rank]


def cut_as(held: Tensor, like: Tensor) -> Tensor:
    """`held`, which has the shape of this rank's part of `like`, as a tensor that is cut as that is, and lies where `held` does: from_local would
    bring it to the device of the mesh."""
    if not isinstance(like, DTensor):
        return held
    cut: Tensor = DTensor(held, like._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return cut


def described(name: str, tensor: Tensor) -> Piece:
    """What this rank holds of it. Raises ShapeError where that is no part of it."""
    return Piece(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), runs_of(tensor, name))


def _everywhere(own: Sequence[Piece], world: World) -> list[_Wanted]:
    said = msgspec.msgpack.encode(own)
    return _wanted([_pieces.decode(message) for message in world.gather(said)])


def _wanted(every: Sequence[Sequence[Piece]]) -> list[_Wanted]:
    """In the order of the leader's names, then of the others'."""
    holders: dict[str, dict[tuple[Runs, ...], tuple[int, Piece]]] = {}
    for rank, pieces in enumerate(every):
        for held in pieces:
            holders.setdefault(held.name, {}).setdefault(held.runs, (rank, held))
    found = []
    for name, parts in holders.items():
        complete = [part for part in parts.values() if part[1].complete]
        wanted = _Wanted(complete[:1] or [part for part in parts.values() if part[1].bytes])
        if not wanted.parts or sum(part.bytes for _, part in wanted.parts) != wanted.bytes:
            raise ShapeError(f"the ranks do not hold {name} exactly once between them; this is a bug of the layout")
        found.append(wanted)
    return found


def _buckets(wanted: Sequence[_Wanted]) -> Iterator[list[_Wanted]]:
    bucket: list[_Wanted] = []
    for one in wanted:
        if bucket and sum(each.bytes for each in bucket) + one.bytes > BUCKET_BYTES:
            yield bucket
            bucket = []
        bucket.append(one)
    if bucket:
        yield bucket


def _senders(bucket: Sequence[_Wanted]) -> list[int]:
    """Ranks other than the leader that have something to send, in order."""
    return sorted({rank for one in bucket for rank, _ in one.parts if rank})


def _send(bucket: Sequence[_Wanted], own: dict[str, Tensor], world: World) -> None:
    mine = [part for one in bucket for rank, part in one.parts if rank == world.rank]
    if not mine:
        return
    message = torch.empty(sum(_aligned(part.bytes) for part in mine), dtype=torch.uint8, device=world.device)
    start = 0
    for part in mine:
        message[start : start + part.bytes] = local(own[part.name]).detach().contiguous().view(-1).view(torch.uint8)
        start += _aligned(part.bytes)
    dist.send(message, dst=0)


def _received(bucket: Sequence[_Wanted], own: dict[str, Tensor], world: World) -> Iterator[tuple[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    for one in bucket:
        name, rank = one.first.name, one.parts[0][0]
        if one.first.complete and rank == 0:
            tensors[name] = local(own[name])
            continue
        tensors[name] = torch.empty(one.first.shape, dtype=_dtype(one.first))
        for _, part in (each for each in one.parts if each[0] == 0):
            _put(tensors[name], part, local(own[name]))
    for sender in _senders(bucket):
        parts = [part for one in bucket for rank, part in one.parts if rank == sender]
        message = torch.empty(sum(_aligned(part.bytes) for part in parts), dtype=torch.uint8, device=world.device)
        dist.recv(message, src=sender)
        message, start = message.cpu(), 0
        for part in parts:
            numbers = message[start : start + part.bytes].view(_dtype(part)).view(part.local_shape)
            _put(tensors[part.name], part, numbers)
            start += _aligned(part.bytes)
    yield from tensors.items()


def _put(target: Tensor, part: Piece, numbers: Tensor) -> None:
    """Into the places that the piece has in the whole."""
    for here, there in overlaps(part.runs, whole_runs(part.shape)):
        target[there] = numbers[here]


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _dtype(held: Piece) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, held.dtype)
    return dtype
