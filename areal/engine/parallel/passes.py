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
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal.engine.batch import PackedBatch
from areal.engine.net import Net

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

    def train(self, packs: Sequence[PackedBatch], loss: Loss) -> None:
        for packed in packs:
            outputs, entropy = self._net(packed)
            loss(packed, outputs, entropy).backward()  # type: ignore[no-untyped-call]
        complete_gradients(self._net)

    @torch.no_grad()
    def score(self, packs: Sequence[PackedBatch]) -> list[Tensor | None]:
        return [self._net(packed)[0] for packed in packs]


def complete_gradients(net: Net) -> None:
    """Sum what the ranks of t know of the gradients of parameters that all of them have whole: once, after the last micro-batch."""
    for _, p in net.trained_parameters():
        if isinstance(p, DTensor) and isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
            p.grad = p.grad.redistribute(placements=p.placements)
