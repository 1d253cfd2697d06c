"""The expert dimension: each rank has some of every sparse layer's experts, and tokens travel to them and back.

    mesh = split_experts(net, world)             # in place, before the other cuts; None where nothing is left to shard
    apart = shard_experts(net, mesh, policy)     # last but for the data dimension, which leaves these parameters alone

The ranks of one pipeline stage (d * c * t, tensor peers next to each other) are counted anew as ereplicas * efsdp * e * et. Every one of them has tokens of its own: other
rows (d), another stretch of the context (c), another part of it between the maps (t, sequence parallel). It routes these itself and sends each token's hidden state
to the e-th part of the experts that it chose (all-to-all with uneven splits, counts first), or, where a single expert is cut into et
parts along its inner width, to all parts, whose results it adds up. The same experts lie on efsdp ranks, in pieces between uses (FSDP2 on their own mesh),
so their gradients are complete and lie in pieces, as all others do. Where the net is held whole several times, so are they: ereplicas of the ranks that
have the same experts hold all pieces of them, as many as the replicas allow (1 where e spreads them over all). No rank can do without another: a rank without tokens sends and receives
nothing, yet takes part, forward and backward. e is innermost but for et, so that tokens stay within a host as long as can be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from areal.engine.archon import ArchonNet
from areal.engine.net import Net
from areal.engine.parallel.world import World, local
from areal.models.experts import Experts, Routing, SparseMlp


def split_experts(net: Net, world: World, *, replicas: int = 1) -> DeviceMesh | None:
    """Every rank has the whole parameters, on their device; the layout fits. Returns the mesh (ereplicas, efsdp, e, et)."""
    if world.mesh is None or world.spec.stage_size == 1 or not (isinstance(net, ArchonNet) and net.config.experts):
        return None
    spec, stage = world.spec, world.mesh["d", "c", "t"]._flatten("stage")
    same = spec.stage_size // (spec.e * spec.et)
    whole = gcd(same, replicas)
    mesh = stage._unflatten(0, (whole, same // whole, spec.e, spec.et), ("ereplicas", "efsdp", "e", "et"))
    together = mesh["e", "et"]._flatten("experts").get_group() if spec.e * spec.et > 1 else None
    for layer in _sparse_layers(net):
        if together is not None:
            _cut(layer.experts, mesh)
            layer.compute = Exchange(together, parts=spec.e, cuts=spec.et)
        if world.size("t") > 1:
            _route_own_tokens(layer, world.mesh["t"])
    return mesh


def shard_experts(
    net: Net, mesh: DeviceMesh | None, policy: MixedPrecisionPolicy, kept: OffloadPolicy
) -> set[nn.Parameter]:
    """In pieces on the ranks that hold the same experts, where `kept` says. Returns the parameters that no other FSDP may take."""
    if mesh is None:
        return set()
    apart: set[nn.Parameter] = set()
    over = mesh["ereplicas", "efsdp"] if mesh["ereplicas"].size() > 1 else mesh["efsdp"]
    for experts in _experts_apart(net):
        if over.size() > 1 or isinstance(kept, CPUOffloadPolicy):
            place = _even(experts, mesh["efsdp"].size())
            fully_shard(experts, mesh=over, mp_policy=policy, offload_policy=kept, shard_placement_fn=place)
        apart.update(experts.parameters())
    return apart


def _even(experts: nn.Module, ranks: int) -> Callable[[nn.Parameter], Shard]:
    """By whole experts where that gives every rank as many, else along the hidden size; where that does not go either, some have an expert less."""

    def place(parameter: nn.Parameter) -> Shard:
        hidden = 1 if parameter is experts.down_proj else 2
        uneven = local(parameter).shape[0] % ranks and parameter.shape[hidden] % ranks == 0
        return Shard(hidden if uneven else 0)

    return place


def _experts_apart(net: Net) -> Iterator[nn.Module]:
    """Our own, or those that planned.py put on several ranks."""
    if isinstance(net, ArchonNet):
        return (layer.experts for layer in _sparse_layers(net))
    return (module for module in net.modules() if getattr(module, "_is_expert_parallel", False))


def _sparse_layers(net: Net) -> Iterator[SparseMlp]:
    return (module for module in net.modules() if isinstance(module, SparseMlp))


def _cut(experts: Experts, mesh: DeviceMesh) -> None:
    """Leave this rank's part of the experts, and of each its part of the inner width, in memory of their own."""
    parts, cuts = mesh["e"], mesh["et"]
    for name, width in (("gate_proj", 1), ("up_proj", 1), ("down_proj", 2)):
        whole = getattr(experts, name)
        own = whole.detach().chunk(parts.size())[parts.get_local_rank()]
        own = own.chunk(cuts.size(), dim=width)[cuts.get_local_rank()].clone()
        where, how = (mesh["e", "et"], [Shard(0), Shard(width)]) if cuts.size() > 1 else (parts, [Shard(0)])
        cut = DTensor.from_local(own, where, how, run_check=False)
        setattr(experts, name, nn.Parameter(cut, requires_grad=whole.requires_grad))


def _route_own_tokens(layer: SparseMlp, mesh: DeviceMesh) -> None:
    """Along t each rank routes its own stretch of the tokens, and the gradients of its router are those of its tokens alone."""
    weight = layer.gate.weight
    spread = DTensor.from_local(weight.detach(), mesh, [Replicate()], run_check=False)
    layer.gate.weight = nn.Parameter(spread, requires_grad=weight.requires_grad)
    index, ranks = mesh.get_local_rank(), mesh.size()

    def before(module: nn.Module, inputs: tuple[Tensor, Routing]) -> tuple[Tensor, Routing]:
        x, routing = inputs
        return local(x), routing.stretch(index, ranks)

    layer.register_forward_pre_hook(before)


class Exchange:
    """Computes a sparse layer's tokens where their experts are. Called alike, forward and backward, by all ranks of the group."""

    def __init__(self, group: dist.ProcessGroup, *, parts: int, cuts: int) -> None:
        """group: parts * cuts ranks, those with the cuts of the same experts side by side."""
        self._group = group
        self._parts = parts
        self._cuts = cuts

    def __call__(self, experts: Experts, x: Tensor, counts: Tensor) -> Tensor:
        """x [m, hidden] sorted by expert, counts [all experts] -> [m, hidden]."""
        sent = counts.view(self._parts, -1).repeat_interleave(self._cuts, dim=0)  # [ranks, experts of one part]
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        there, here = sent.sum(1).tolist(), received.sum(1).tolist()
        copies = self._copies(counts, x.device)
        arrived = _all_to_all(x if copies is None else x.index_select(0, copies), there, here, self._group)
        order = _expert_of(received).argsort(stable=True)
        out = experts(arrived.index_select(0, order), received.sum(0))
        back = _all_to_all(out.index_select(0, order.argsort()), here, there, self._group)
        return back if copies is None else torch.zeros_like(x).index_add(0, copies, back)

    def _copies(self, counts: Tensor, device: torch.device) -> Tensor | None:
        """Rows of x in the order in which they are sent: each part's rows once for each of its cuts."""
        if self._cuts == 1:
            return None
        ends = counts.view(self._parts, -1).sum(1).cumsum(0).tolist()
        own = [torch.arange(start, end, device=device) for start, end in zip([0, *ends], ends, strict=False)]
        return torch.cat([rows for rows in own for _ in range(self._cuts)])


def _expert_of(received: Tensor) -> Tensor:
    """Of each row that arrived, which of this rank's experts it is for. received [ranks, experts here]."""
    each = torch.arange(received.shape[1], device=received.device).repeat(len(received))
    return each.repeat_interleave(received.flatten())


def _all_to_all(x: Tensor, there: list[int], here: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows to each rank of the group, `there` how many, and `here` from each."""
    moved: Tensor = _AllToAll.apply(x, there, here, group)  # type: ignore[no-untyped-call]
    return moved


class _AllToAll(torch.autograd.Function):
    """Gradients go back the way the rows came."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: list[int], here: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way = (there, here, group)
        arrived = x.new_empty(sum(here), x.shape[1])
        dist.all_to_all_single(arrived, x.contiguous(), here, there, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        there, here, group = ctx.way
        return _all_to_all(gradient, here, there, group), None, None, None
