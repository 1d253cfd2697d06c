"""What can be broken in the expert dimension without a word from anybody; pool.py has the names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from areal.engine.engine import TrainEngine
from areal.models.experts import Experts, SparseMlp


class _NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient)


def _lose_the_way_back(engine: TrainEngine) -> None:
    """What came back from the experts has no gradient that goes to them."""
    for layer in engine.policy.modules():
        if isinstance(layer, SparseMlp):
            there = layer.compute
            layer.compute = lambda experts, x, counts, there=there: _NoWayBack.apply(there(experts, x, counts))


def _average_experts(engine: TrainEngine) -> None:
    """Gradients of the experts' own FSDP are means, as FSDP makes them unless it is told otherwise."""
    for module in engine.policy.modules():
        if isinstance(module, Experts) and isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(2.0)


def _count_own_choices(engine: TrainEngine) -> None:
    """Each rank balances by what it saw itself."""
    world = engine._balance._world
    engine._balance._world = replace(world, mesh=None)


EXPERT_FAULTS: dict[str, Callable[[TrainEngine], None]] = {
    "experts_no_way_back": _lose_the_way_back,
    "experts_averaged": _average_experts,
    "experts_own_load": _count_own_choices,
}
