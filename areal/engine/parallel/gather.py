"""Whole tensors out of cut ones, one at a time: for weights on their way to the backends, and for checkpoints.

    for name, tensor in whole(net.named_tensors()): ...      # every rank of the net goes through it; all get the tensor

No rank ever holds more than one whole tensor beside its own pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.distributed.tensor import DTensor


def whole(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) pairs, as they are where they are not distributed."""
    for name, tensor in named:
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
