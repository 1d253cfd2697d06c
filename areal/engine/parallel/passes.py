"""How micro-batches go through a net: forward and backward, one after the other.

    passes = Straight(net)
    passes.train(packs, loss)                    # gradients add up in the parameters
    outputs = passes.score(packs)                # [m] of each micro-batch, no gradients

`loss(packed, outputs, entropy)` makes a scalar of one micro-batch's outputs [m]; it is called where they are known, in the order of the
micro-batches. Of a pipeline, the last stage alone has outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from areal.engine.batch import PackedBatch
from areal.engine.net import Net
from areal.engine.parallel.data import in_pieces, sum_over_replicas

Loss = Callable[[PackedBatch, Tensor, Tensor], Tensor]
"""(micro-batch, outputs [m] with gradient, entropies [m]) -> the scalar to go backward from."""


class Passes(Protocol):
    """See the module's docstring."""

    def train(self, packs: Sequence[PackedBatch], loss: Loss) -> None:
        """Forward and backward of all of them; then gradients are complete (`complete_gradients`)."""
        ...

    def score(self, packs: Sequence[PackedBatch]) -> list[Tensor | None]:
        """Outputs [m] of each; None where this process is not the one that has them."""
        ...


class Straight:
    """All layers are here."""

    def __init__(self, net: Net) -> None:
        self._net = net
        self._wrapped = in_pieces(net)

    def train(self, packs: Sequence[PackedBatch], loss: Loss) -> None:
        for number, packed in enumerate(packs, 1):
            sum_over_replicas(self._wrapped, now=number == len(packs))
            outputs, entropy = self._net(packed)
            loss(packed, outputs, entropy).backward()  # type: ignore[no-untyped-call]
        complete_gradients(self._net)

    @torch.no_grad()
    def score(self, packs: Sequence[PackedBatch]) -> list[Tensor | None]:
        return [self._net(packed)[0] for packed in packs]


def complete_gradients(net: Net) -> None:
    """Sum what the ranks of t know of the gradients of parameters that all of them have whole: once, after the last micro-batch, in one
    message and in float32."""
    partial = [(p, p.grad) for _, p in net.trained_parameters() if isinstance(p.grad, DTensor) and _is_partial(p.grad)]
    if not partial:
        return
    own = [grad.to_local() for _, grad in partial]
    mesh = partial[0][1].device_mesh
    summed = torch.cat([each.flatten().float() for each in own]).to(net.device)
    dist.all_reduce(summed, group=mesh.get_group())
    sums = torch.split(summed, [each.numel() for each in own])
    for (p, grad), piece in zip(partial, sums, strict=True):
        p.grad = DTensor.from_local(piece.view(grad.shape).to(grad.dtype), mesh, [Replicate()], run_check=False)


def _is_partial(grad: DTensor) -> bool:
    return any(placement.is_partial() for placement in grad.placements)
