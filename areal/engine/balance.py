"""How evenly the routers of a net with experts spread its tokens, and what keeps them even.

    balance = Balance(net, world, aux_loss=1e-3, bias_rate=0.0)
    balance.begin(tokens)            # of one optimizer step: of all its rows, each counted by itself
    ...backward passes, optimizer step...
    stats = balance.finish()         # {"moe_load_max": 1.4, "moe_load_min": 0.3, ...}; {} without experts

The load of an expert is its part of all choices that a layer's router made for the trained rows of one optimizer step, on all ranks; 1 / experts
is even. Two options, which may be combined:

aux_loss: adds to the loss, for each sparse layer, aux_loss * experts * sum over experts of load * mean probability, which is aux_loss where all is
even. The usual form (arXiv:2101.03961) takes the load of the batch at hand; a micro-batch has another one than the whole batch, and so the
gradient would depend on how rows are packed and over how many ranks. Here the load is that of the optimizer step before (even at the
first): then the loss is a sum over tokens, and micro-batches and ranks add up to it exactly. A prefix that is computed once for
several rows counts for each of them.

bias_rate: after each optimizer step the bias of each expert moves by bias_rate, up where its load is below the mean and down where it is above
(arXiv:2408.15664). The bias decides whom a router chooses and nothing else, so the gradient stays the objective's own. It is part of the net.

Used by engine.py; models/experts.py counts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from areal.base.errors import ConfigError
from areal.engine.net import Net
from areal.engine.parallel.world import World
from areal.models.experts import Router

LOAD = "moe.load"
"""Name of the state among a checkpoint's tensors."""


class Balance:
    """Of one net, over its optimizer steps. Every rank of the net has one and calls it alike."""

    def __init__(self, net: Net, world: World, *, aux_loss: float = 0.0, bias_rate: float = 0.0) -> None:
        """Raises ConfigError where one of both is asked for and the net has no experts."""
        layers, experts = net.routed
        if not experts and (aux_loss or bias_rate):
            raise ConfigError(
                "actor.moe_aux_loss and actor.moe_bias_rate balance experts, and this net has none that archon knows; set both to 0"
            )
        self._world = world
        self._aux_loss = aux_loss
        self._bias_rate = bias_rate
        self._routers = [module for module in net.modules() if isinstance(module, Router)]
        self._load = torch.full((layers, experts), 1 / max(1, experts), dtype=torch.float64, device=world.device)
        self._tokens = 0
        if bias_rate:
            for router in self._routers:
                router.add_bias()

    def begin(self, tokens: int) -> None:
        """tokens: of all rows of the optimizer step that are trained on, shared prefixes each time."""
        self._tokens = tokens
        for router in self._routers:
            load = self._load[router.layer]  # less its mean, which moves no softmax, but would cost the gradient digits
            pull = (load - load.mean()) * (self._aux_loss * self._load.shape[1] / tokens)
            router.load.reset(pull.float() if self._aux_loss else None)

    def finish(self) -> dict[str, float]:
        """Move the biases and remember the load. Returns of all sparse layers the highest and the lowest load, as multiples of the mean, and
        the balance loss where there is one, without its coefficient, summed over the layers."""
        if not self._load.numel():
            return {}
        seen = torch.zeros(2, *self._load.shape, dtype=torch.float64, device=self._load.device)
        for router in self._routers:
            seen[0, router.layer] += router.load.counts
            seen[1, router.layer] += router.load.mass
        choices, mass = self._world.sum(seen)
        sparse = choices.sum(1) > 0
        experts = self._load.shape[1]
        found = (
            {"moe_aux_loss": float((self._load * mass)[sparse].sum() * experts / self._tokens)}
            if self._aux_loss
            else {}
        )
        self._load[sparse] = choices[sparse] / choices[sparse].sum(1, keepdim=True)
        self._move_biases()
        relative = self._load[sparse] * experts
        return found | {"moe_load_max": float(relative.max()), "moe_load_min": float(relative.min())}

    def state_tensors(self) -> dict[str, Tensor]:
        """What the next step takes over from this one."""
        return {LOAD: self._load} if self._load.numel() else {}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises ConfigError if it belongs to another net."""
        if (load := tensors.get(LOAD)) is not None:
            if load.shape != self._load.shape:
                raise ConfigError(
                    f"{LOAD} has shape {tuple(load.shape)}, the model {tuple(self._load.shape)}; it belongs to another model"
                )
            self._load.copy_(load)

    def _move_biases(self) -> None:
        for router in self._routers:
            if self._bias_rate and router.e_score_correction_bias is not None:
                load = self._load[router.layer]
                router.e_score_correction_bias += self._bias_rate * (load.mean() - load).sign()
