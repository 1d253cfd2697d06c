"""The data dimension: parameters, gradients and optimizer state lie in pieces on the ranks of d and c (torch's FSDP2).

    shard_over_data(net, world, experts)         # in place; the identity where d and c are 1, but for experts
    shard_over_data(net, world, replicas=2)      # each half of these ranks, neighbours, has all pieces; gradients are summed over both (HSDP)
    shard_over_data(net, world, offload=True)    # pieces, their gradients too, lie in host memory; what is computed with is gathered on the device
    packs = share(rows, ranks=4, rank=0, max_tokens=4096)  # this rank's micro-batches, as many on every rank

Losses arrive normalised over the whole optimizer step, so gradients are summed and never divided. Each rank must take part in every gather of
parameters, so all have the same number of micro-batches; who has fewer goes through empty ones. Rows are spread by cost, not by number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from areal.engine.batch import PackedBatch, empty_batch, pack
from areal.engine.net import Net
from areal.engine.parallel.expert import shard_experts
from areal.engine.parallel.world import World
from areal.engine.rows import RowArrays


def shard_over_data(
    net: Net, world: World, experts: DeviceMesh | None = None, *, replicas: int = 1, offload: bool = False
) -> None:
    """Wraps each layer, then the rest. Everything that is trained must be on its device, with offload in host memory. experts: their mesh, see
    expert.py. replicas: divides d. offload: also where there is one piece, for which the world needs its mesh."""
    if world.mesh is None:
        return
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    kept = CPUOffloadPolicy(pin_memory=world.device.type != "cpu") if offload else OffloadPolicy()
    apart = shard_experts(net, experts, policy, kept)
    if world.size("d") * world.size("c") > 1 or offload:
        mesh = world.mesh["d", "c"]._flatten("fsdp")
        if replicas > 1:
            mesh = mesh._unflatten(0, (replicas, mesh.size() // replicas), ("replicas", "pieces"))
        for module in (*net.layers(), *net.roots()):
            for one in (*_of_another_dtype(module), module):
                fully_shard(one, mesh=mesh, mp_policy=policy, offload_policy=kept, ignored_params=apart)
    for wrapped in in_pieces(net):
        wrapped.set_gradient_divide_factor(1.0)
        wrapped.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum


def _of_another_dtype(module: nn.Module) -> list[nn.Module]:
    """What is kept in float32 within a bfloat16 layer, as some families' routers are: FSDP gathers numbers of one dtype together."""
    trained = [p for p in module.parameters() if p.requires_grad]
    usual = max(trained, key=lambda p: p.numel()).dtype if trained else None
    inside = [each for each in module.modules() if each is not module and not isinstance(each, FSDPModule)]
    return [
        each for each in inside if any(p.dtype != usual and p.requires_grad for p in each.parameters(recurse=False))
    ]


def in_pieces(module: nn.Module) -> list[FSDPModule]:
    """What of it was wrapped."""
    return [each for each in module.modules() if isinstance(each, FSDPModule)]


def sum_over_replicas(wrapped: Iterable[FSDPModule], *, now: bool) -> None:
    """Whether the next backward pass sums over the replicas all gradients since the last sum, or keeps those of each replica, in float32. Once per
    optimizer step is enough, and that with its last micro-batch."""
    for module in wrapped:
        module.set_requires_all_reduce(now, recurse=False)


def share(rows: Sequence[RowArrays], *, ranks: int, rank: int, max_tokens: int) -> list[PackedBatch]:
    """The micro-batches of data rank `rank` of the rows, which every rank has.

    Where the rows would fill fewer micro-batches than there are data ranks, the budget is lowered, so that all have work as far as rows can be parted."""
    packs = list(pack(rows, max_tokens=max_tokens))
    if ranks == 1:
        return packs
    tokens = sum(len(each.ids) for each in packs)
    rounds = max(1, -(-len(packs) // ranks))
    packs = list(pack(rows, max_tokens=min(max_tokens, -(-tokens // (ranks * rounds)))))
    shares = balanced([cost(each) for each in packs], ranks)
    own = [packs[number] for number in shares[rank]]
    return own + [empty_batch()] * (max(map(len, shares)) - len(own))


def cost(packed: PackedBatch) -> float:
    """Of forward and backward, in units of one token through the linear maps: attention grows with the keys that are looked at."""
    looked_at = sum(block.mask.numel() for block in packed.blocks)
    return len(packed.ids) + looked_at / 4096


def balanced(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Numbers of the items that each rank takes: the dearest first, each to whoever has least (longest processing time first, within 4/3 of
    the best). Items of one rank keep their order."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    for number in sorted(range(len(costs)), key=lambda each: (-costs[each], each)):
        least = min(range(ranks), key=lambda rank: (totals[rank], rank))
        shares[least].append(number)
        totals[least] += costs[number]
    return [sorted(share) for share in shares]
