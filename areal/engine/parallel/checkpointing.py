"""Activation checkpointing: what a layer computed on the way forward is thrown away and computed again on the way back.

    checkpoint_activations(net, "full")          # in place; "none" leaves it as it is

full: a layer keeps its input alone; about a third more compute. selective: it also keeps what matrix products and attention gave, and computes only norms, rotations, repeated
keys and activation functions again, which cost little (arXiv:2205.05198). The same
numbers to the bit: there is no dropout, and each operation is repeated as it was. Any net: it goes by the layers, and by what they call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from areal.config.engine import Checkpointing
from areal.engine.net import Net

_DEAR = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)
"""Kept by `selective`."""


def checkpoint_activations(net: Net, kind: Checkpointing) -> None:
    """Before the data dimension, which gathers a layer's parameters around whatever it does."""
    if kind == "none":
        return
    for layer in net.layers():
        layer.forward = _checkpointed(layer, selective=kind == "selective")


def _checkpointed(layer: nn.Module, *, selective: bool) -> Callable[..., Any]:
    inner = layer.forward
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_what_is_dear)

    def forward(*args: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **named)
        return checkpoint(partial(inner, **named), *args, **options)

    return forward


def _keep_what_is_dear(context: Any, operation: Any, *args: Any, **named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _DEAR else CheckpointPolicy.PREFER_RECOMPUTE
