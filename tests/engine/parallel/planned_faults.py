"""What can be broken in a net that is cut by transformers' plans without a word from anybody; pool.py has the names."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from areal.engine.engine import TrainEngine


def _claim_complete(p: Tensor) -> None:
    assert isinstance(p.grad, DTensor)
    p.grad = DTensor.from_local(p.grad.to_local(), p.grad.device_mesh, [Replicate()])


def _keep_heads_alone(engine: TrainEngine) -> None:
    """Each rank of t keeps what it knows of the gradients of the norms of queries and keys."""
    for name, p in engine.policy.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            p.register_post_accumulate_grad_hook(_claim_complete)


def _leave_out_a_sum(engine: TrainEngine) -> None:
    """What the ranks of t have each of a layer's map back is not added up."""
    for module in engine.policy.modules():
        if hasattr(module, "down_proj") and hasattr(module.down_proj, "in_features"):
            module.down_proj.forward = MethodType(_own_part, module.down_proj)


def _own_part(module: Any, x: Tensor) -> Tensor:
    return x @ module.weight.to_local().T


def _average_experts(engine: TrainEngine) -> None:
    """Gradients of the experts' own FSDP are means."""
    for module in engine.policy.modules():
        if getattr(module, "_is_expert_parallel", False) and isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(2.0)


def _lose_the_way_back(engine: TrainEngine) -> None:
    """What came back from the experts has no gradient that goes to the layers before them."""
    for module in engine.policy.modules():
        if getattr(module, "_is_expert_parallel", False):
            inner = module.forward
            module.forward = lambda x, chosen, weights, inner=inner: inner(x.detach(), chosen, weights)


PLANNED_FAULTS: dict[str, Callable[[TrainEngine], None]] = {
    "planned_heads_alone": _keep_heads_alone,
    "planned_sum_left_out": _leave_out_a_sum,
    "planned_experts_averaged": _average_experts,
    "planned_no_way_back": _lose_the_way_back,
}
