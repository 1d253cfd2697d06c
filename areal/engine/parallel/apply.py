"""Which dimension is applied when: the one place that knows the order.

    passes = apply(net, world, settings)                   # the net is cut in place; what goes through it, goes through `passes`

Order: pipeline split (a rank builds its own layers only, archon.py), experts, tensor, context (of transformers' models tensor, experts), activation
checkpointing, data. Data comes last because FSDP
shards what the others left of each parameter, and wraps what they made of each layer.
"""

from __future__ import annotations

from areal.engine.archon import ArchonNet
from areal.engine.net import Net
from areal.engine.parallel.checkpointing import checkpoint_activations
from areal.engine.parallel.context import Tokens
from areal.engine.parallel.data import shard_over_data
from areal.engine.parallel.dims import context_kind
from areal.engine.parallel.expert import split_experts
from areal.engine.parallel.passes import Passes, Straight
from areal.engine.parallel.pipeline import Pipelined
from areal.engine.parallel.planned import cut_as_planned
from areal.engine.parallel.tensor import cut_tensor
from areal.engine.parallel.world import World
from areal.engine.settings import EngineSettings


def apply(net: Net, world: World, settings: EngineSettings) -> Passes:
    """Cut the net for this rank. Each step is the identity where its dimension is 1."""
    if isinstance(net, ArchonNet):
        experts = split_experts(net, world, replicas=settings.replicas)
        cut_tensor(net, world, sequence_parallel=settings.sequence_parallel)
        kind = context_kind(world.spec, net.config, settings.context_parallel)
        for stage in net.own_stages():
            stage.tokens = Tokens(world, kind, sequence_parallel=settings.sequence_parallel)
    else:
        experts = cut_as_planned(net, world, replicas=settings.replicas)
    checkpoint_activations(net, settings.gradient_checkpointing)
    shard_over_data(net, world, experts, replicas=settings.replicas, offload=settings.offload == "all")
    return Pipelined(net, world) if isinstance(net, ArchonNet) and world.size("p") > 1 else Straight(net)
