"""The tensor dimension: the maps of each layer, the embedding and the output head lie in pieces on the ranks of t (torch's parallel styles).

    cut_tensor(net, world, sequence_parallel=True)   # in place; the identity where t is 1

Attention has its share of the heads, the map between its share of the columns, embedding and head their share of the vocabulary (shares of a
vocabulary that t does not divide differ by their last rows). Between the maps a token is on one rank only, along dimension 0 of [n, d]
(sequence parallel: activations / t, and two cheaper exchanges for one sum), or without it on all of them.

What is not cut (the norms, also those of queries and keys, whose heads are cut) is on all ranks, and of its gradient each rank knows the part of its
own tokens or heads: these are DTensors whose gradients say that they are partial, and passes.py sums them before the optimizer sees them. All ranks then
take the same step to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from areal.algorithms.logprobs import Part
from areal.engine.archon import ArchonNet, Stage
from areal.engine.parallel.world import World
from areal.models.decoder import Block, GatedMlp


def cut_tensor(net: ArchonNet, world: World, *, sequence_parallel: bool = True) -> None:
    """Every rank has the whole parameters, on their device. The layout fits: dims.py."""
    if world.mesh is None or world.size("t") == 1:
        return
    mesh = world.mesh["t"]
    between: Placement = Shard(0) if sequence_parallel else Replicate()
    for stage in net.own_stages():
        for block in stage.decoder.blocks():
            _cut(block, mesh, _layer_plan(block, between))
        _cut_ends(stage, mesh, between)


def _layer_plan(block: Block, between: Placement) -> dict[str, ParallelStyle]:
    norm = SequenceParallel(sequence_dim=0, use_local_output=True)
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=between)
    plan: dict[str, ParallelStyle] = {
        "self_attn": PrepareModuleInput(
            input_layouts=(between, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        **{f"self_attn.{name}_proj": columns for name in "qkv"},
        "self_attn.o_proj": rows,
    }
    if block.self_attn.q_norm is not None:
        heads = SequenceParallel(sequence_dim=1, use_local_output=True)
        plan |= {"self_attn.q_norm": heads, "self_attn.k_norm": heads}
    if isinstance(block.mlp, GatedMlp):
        plan["mlp"] = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
        plan |= {"mlp.gate_proj": columns, "mlp.up_proj": columns, "mlp.down_proj": rows}
    if between.is_shard():
        plan |= {"input_layernorm": norm, "post_attention_layernorm": norm}
    return plan


def _cut(module: nn.Module, mesh: DeviceMesh, plan: dict[str, ParallelStyle]) -> None:
    parallelize_module(module, mesh, plan, src_data_rank=None)  # all have the whole: nothing needs to be sent


def _cut_ends(stage: Stage, mesh: DeviceMesh, between: Placement) -> None:
    body, head = stage.decoder.model, stage.decoder.lm_head
    tied = head is not None and body.embed_tokens is not None and head.weight is body.embed_tokens.weight
    if body.embed_tokens is not None:
        body.embed_tokens = VocabularyEmbedding(body.embed_tokens.weight, mesh, between)
    if head is not None:
        weight = body.embed_tokens.weight if tied and body.embed_tokens is not None else _rows(head.weight, mesh)
        head.weight = nn.Parameter(weight) if not tied else weight
        stage.part = part_of(head.weight, mesh)
    if body.norm is not None:
        if between.is_shard():
            _cut(body, mesh, {"norm": SequenceParallel(sequence_dim=0)})
        body.norm.register_forward_hook(_all_tokens(mesh, between, summed=stage.value_head is None))


class VocabularyEmbedding(nn.Embedding):
    """An embedding of which this rank has some rows. (torch's RowwiseParallel makes the gradient of the whole vocabulary on each rank.)"""

    def __init__(self, weight: Tensor, mesh: DeviceMesh, between: Placement) -> None:
        """weight [v, d], whole."""
        rows, (size, width) = _rows(weight, mesh), weight.shape
        super().__init__(size, width, _weight=rows, _freeze=not weight.requires_grad)
        self._mesh = mesh
        self._between = between

    def forward(self, ids: Tensor) -> Tensor:
        """[n] -> [n, d], or of these this rank's tokens."""
        assert isinstance(self.weight, DTensor)
        rows = self.weight.to_local()
        at = ids - first_row(self.weight, self._mesh)
        elsewhere = (at < 0) | (at >= len(rows))
        found = F.embedding(at.masked_fill(elsewhere, 0), rows).masked_fill(elsewhere[:, None], 0)
        return DTensor.from_local(found, self._mesh, [Partial()]).redistribute(placements=[self._between]).to_local()


def _rows(weight: Tensor, mesh: DeviceMesh) -> DTensor:
    """This rank's rows, in memory of their own."""
    return distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)


def first_row(weight: Tensor, mesh: DeviceMesh) -> int:
    """Of those that this rank has of a weight [v, d]."""
    return mesh.get_local_rank() * -(-weight.shape[0] // mesh.size())


def part_of(weight: Tensor, mesh: DeviceMesh) -> Part:
    """Of an output head of which each rank of the mesh has some rows."""
    assert isinstance(weight, DTensor)
    group = mesh.get_group()

    def reduced(operation: Any) -> Callable[[Tensor], Tensor]:
        def reduce(values: Tensor) -> Tensor:
            dist.all_reduce(values, op=operation, group=group)
            return values

        return reduce

    return Part(first_row(weight, mesh), reduced(dist.ReduceOp.MAX), reduced(dist.ReduceOp.SUM))


def _all_tokens(mesh: DeviceMesh, between: Placement, *, summed: bool) -> Callable[[nn.Module, Any, Any], Tensor]:
    """After the last norm every rank gets all tokens. summed: each goes on with a part of the vocabulary, so that their gradients must be
    summed; otherwise all do the same with them."""
    gradient = Partial() if summed else Replicate()

    def hook(module: nn.Module, inputs: Any, hidden: Any) -> Tensor:
        spread = hidden if isinstance(hidden, DTensor) else DTensor.from_local(hidden, mesh, [between], run_check=False)
        return spread.redistribute(placements=[Replicate()]).to_local(grad_placements=[gradient])

    return hook
