"""Whole tensors out of cut ones, one at a time: for weights on their way to the backends, and for checkpoints.

    for name, tensor in whole(net.named_tensors(), world): ...      # every rank of the net goes through it; all get the tensor

No rank ever holds more than one whole tensor beside its own pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal.engine.parallel.world import World


def whole(named: Iterable[tuple[str, Tensor]], world: World) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) pairs, as they are where they are not distributed. Of a pipeline each rank gives what its own stages have, and all get all."""
    own = dict(named)
    if world.size("p") == 1:
        yield from ((name, _full(tensor)) for name, tensor in own.items())
        return
    facts = [_Fact(name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in own.items()]
    told = [_decoder.decode(message) for message in world.gather(msgspec.msgpack.encode(facts))]
    each_stage = world.spec.size // world.size("p")
    for stage in range(world.size("p")):
        for fact in told[stage * each_stage]:
            if stage == world.index("p"):
                tensor = _full(own[fact.name]).contiguous()
            else:
                tensor = torch.empty(fact.shape, dtype=getattr(torch, fact.dtype), device=world.device)
            dist.broadcast(tensor, group=world.group("p"), group_src=stage)
            yield fact.name, tensor


class _Fact(msgspec.Struct, frozen=True, array_like=True):
    name: str
    shape: list[int]
    dtype: str


_decoder = msgspec.msgpack.Decoder(list[_Fact])


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
