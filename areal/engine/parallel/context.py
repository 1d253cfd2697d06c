"""The context dimension: the tokens of a micro-batch lie in pieces on the ranks of c, and attention brings them together.

    tokens = Tokens(world, kind="ulysses")           # Tokens() in one process: the piece is the whole
    piece = tokens.piece(packed)                     # ids, positions and attention of this rank's tokens; its predictions
    outputs = tokens.joined(own_outputs, piece)      # [m] on every rank of c, in the order of the micro-batch

A micro-batch is cut into c contiguous pieces of one length. Tokens that fill it up to a multiple of c (and of t, which cuts a piece further between its
maps: tensor.py) see only themselves and predict nothing. A token's ancestors may lie on any rank. Two ways to attend:

allgather: every rank sees all keys and values, for its own queries. Any number of heads; keys and values of all tokens on each rank.
ulysses: heads for tokens, all tokens for c-th of the heads (arXiv:2309.14509). c must divide the query heads of a t rank; what travels shrinks with c,
and causal attention costs every rank the same.

What is said of a prediction is known where its source token lies; it is made known to all ranks of c, so that a loss sees whole answers and
knows nothing of c. Each rank goes backward from its own predictions, and gradients are summed over d and c (data.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.config.engine import ContextKind
from areal.engine.batch import PackedBatch, QueryBlock
from areal.engine.net import attend_blocks
from areal.engine.parallel.world import World
from areal.models.decoder import Attend


@dataclass(frozen=True, slots=True)
class Piece:
    """This rank's tokens, ids and positions [k], and how they attend. own: which of the micro-batch's m predictions are made here, None for
    all; source: the token of [k] that makes each. predictions: m. shared_by [k]: as in PackedBatch; 0 for the tokens that fill up."""

    ids: Tensor
    positions: Tensor
    shared_by: Tensor
    attend: Attend
    own: Tensor | None
    source: Tensor
    predictions: int

    def of(self, values: Tensor) -> Tensor:
        """What belongs to the predictions made here, of something [m]."""
        return values if self.own is None else values[self.own]


class Tokens:
    """How micro-batches lie on the ranks of c. sequence_parallel: between the maps of a layer, on those of t too (tensor.py)."""

    def __init__(
        self, world: World | None = None, kind: ContextKind = "allgather", *, sequence_parallel: bool = False
    ) -> None:
        self._group = world.group("c") if world else None
        self._ranks = world.size("c") if world else 1
        self._index = world.index("c") if world else 0
        self._kind = kind
        self._parts = world.size("t") if world and sequence_parallel else 1

    def between(self, packed: PackedBatch) -> int:
        """How many tokens of a micro-batch this rank has between the maps of a layer."""
        return -(-len(packed.ids) // (self._ranks * self._parts))

    def piece(self, packed: PackedBatch) -> Piece:
        """packed: on this rank's device."""
        length = self.between(packed) * self._parts
        if filling := length * self._ranks - len(packed.ids):
            packed = _filled(packed, filling)
        start = self._index * length
        end = start + length
        own, source, attend = None, packed.source, _alone(packed.blocks)
        if self._group is not None:
            own = ((source >= start) & (source < end)).nonzero()[:, 0]
            source = source[own] - start
            attend = self._exchanging(packed) if self._kind == "ulysses" else self._gathering(packed, start, end)
        return Piece(
            packed.ids[start:end],
            packed.positions[start:end],
            packed.shared_by[start:end],
            attend,
            own,
            source,
            predictions=len(packed.source),
        )

    def joined(self, values: Tensor, piece: Piece) -> Tensor:
        """[m] on every rank, of what each says of its own predictions; backward goes to the own ones only."""
        if piece.own is None or not piece.predictions:
            return values
        every: Tensor = _Joined.apply(values, piece.own, piece.predictions, self._group)  # type: ignore[no-untyped-call]
        return every

    def gathered(self, x: Tensor) -> Tensor:
        """Of all pieces [k, ...] the whole [n, ...]; backward sums what all ranks have to say of this piece."""
        whole: Tensor = _Gathered.apply(x, self._group)  # type: ignore[no-untyped-call]
        return whole

    def _gathering(self, packed: PackedBatch, start: int, end: int) -> Attend:
        blocks = tuple(_cut_blocks(packed.blocks, start, end))

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _attended(q, self.gathered(k), self.gathered(v), blocks)

        return attend

    def _exchanging(self, packed: PackedBatch) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            repeats = self._ranks // gcd(self._ranks, k.shape[1])
            if repeats > 1:  # each rank needs key heads of its own
                k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
            q, k, v = (_to_heads(each, self._group) for each in (q, k, v))
            return _to_tokens(_attended(q, k, v, packed.blocks), self._group)

        return attend


def _alone(blocks: tuple[QueryBlock, ...]) -> Attend:
    return lambda q, k, v: _attended(q, k, v, blocks)


def _attended(q: Tensor, k: Tensor, v: Tensor, blocks: tuple[QueryBlock, ...]) -> Tensor:
    query, key, value = (each.transpose(0, 1)[None] for each in (q, k, v))
    return attend_blocks(query, key, value, blocks)[0].transpose(0, 1)


def _filled(packed: PackedBatch, filling: int) -> PackedBatch:
    """With so many tokens more that see only themselves."""
    n = len(packed.ids)
    none = packed.ids.new_zeros(filling)
    itself = torch.eye(filling, dtype=torch.bool, device=packed.ids.device)
    return replace(
        packed,
        ids=torch.cat([packed.ids, none]),
        positions=torch.cat([packed.positions, none]),
        shared_by=torch.cat([packed.shared_by, packed.shared_by.new_zeros(filling)]),
        blocks=(*packed.blocks, QueryBlock(n, n + filling, slice(n, n + filling), itself)),
    )


def _cut_blocks(blocks: tuple[QueryBlock, ...], start: int, end: int) -> Iterator[QueryBlock]:
    """What these blocks say of the queries start:end, which are numbered from 0."""
    for block in blocks:
        first, last = max(block.start, start), min(block.end, end)
        if first < last:
            mask = block.mask[first - block.start : last - block.start]
            yield QueryBlock(first - start, last - start, block.keys, mask)


def _to_heads(x: Tensor, group: Any) -> Tensor:
    """[k, h, e] of this rank's tokens -> [n, h / c, e] of all tokens."""
    exchanged: Tensor = _Exchanged.apply(x, group, True)  # type: ignore[no-untyped-call]
    return exchanged


def _to_tokens(x: Tensor, group: Any) -> Tensor:
    """The way back."""
    exchanged: Tensor = _Exchanged.apply(x, group, False)  # type: ignore[no-untyped-call]
    return exchanged


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        whole = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
        dist.all_gather_single(whole, x.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        [grad] = grads
        own = grad.new_empty(grad.shape[0] // dist.get_world_size(ctx.group), *grad.shape[1:])
        dist.reduce_scatter_single(own, grad.contiguous(), group=ctx.group)
        return own, None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchange(x, group, to_heads=to_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grads[0], ctx.group, to_heads=not ctx.to_heads), None, None


def _exchange(x: Tensor, group: Any, *, to_heads: bool) -> Tensor:
    """Pieces [c, k, h / c, e] go out: one for each rank's heads, or for each rank's tokens."""
    ranks = dist.get_world_size(group)
    pieces = torch.stack(x.chunk(ranks, dim=1)) if to_heads else x.reshape(ranks, -1, *x.shape[1:])
    outgoing = pieces.contiguous()
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    return incoming.flatten(0, 1) if to_heads else torch.cat(incoming.unbind(), dim=1)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, own: Tensor, predictions: int, group: Any) -> Tensor:
        ctx.own = own
        every = values.new_zeros(predictions)
        every[own] = values
        dist.all_reduce(every, group=group)
        return every

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0][ctx.own], None, None, None
