"""A sparse layer's map: a router gives each token to a few of many experts, which are gated maps of their own (qwen3_moe).

    mlp = SparseMlp(config, layer=3)                 # in the place of decoder.GatedMlp
    out = mlp(x, Routing(weight))                    # x [n, hidden] -> [n, hidden]
    chosen = Routing(record={}); decoder(..., chosen); decoder(..., Routing(replay=chosen.record))     # the same experts again

Experts lie stacked, [experts, ...], so that one grouped matmul computes all of them on tokens sorted by expert. Who computes them is
`mlp.compute`: this process, or with expert parallelism others (engine/parallel/expert.py). What the routers of a training pass saw is
counted in its backward pass: once per token that is trained on, however often checkpointing computes the forward pass, and never
where nothing is trained; engine/balance.py reads it. Neighbours: decoder.py (the layers around it), dense.py (the same net for inference).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from areal.models.dense_config import DenseConfig


@dataclass(frozen=True, slots=True)
class Routing:
    """What the routers of one forward pass are told, and where they write down what they chose.

    weight [n]: for how many tokens of the batch each one stands, 0 for padding; None: 1 each. replay: by layer, the experts [n, k]
    that are taken instead of the router's own choice; their weights are still what the router gives them. record: filled with
    each layer's choices [n, k]."""

    weight: Tensor | None = None
    replay: Mapping[int, Tensor] | None = None
    record: dict[int, Tensor] | None = None

    def stretch(self, index: int, ranks: int) -> Routing:
        """What concerns the tokens of rank `index`, where each of so many ranks has a stretch of them."""

        def own(tensor: Tensor) -> Tensor:
            length = -(-len(tensor) // ranks)
            return tensor[index * length : (index + 1) * length]

        replay = None if self.replay is None else {layer: own(experts) for layer, experts in self.replay.items()}
        return Routing(None if self.weight is None else own(self.weight), replay, self.record)


PLAIN = Routing()
"""Every token counts, the routers choose, nobody writes it down."""


class Load:
    """What a router saw since `reset`, in tokens. counts [experts]: choices. mass [experts]: probability. pull [experts]: what the
    balance loss adds to the gradient of each probability of each token; None: nothing."""

    def __init__(self) -> None:
        self.counts: Tensor | float = 0.0
        self.mass: Tensor | float = 0.0
        self.pull: Tensor | None = None

    def reset(self, pull: Tensor | None) -> None:
        self.counts, self.mass, self.pull = 0.0, 0.0, pull

    def add(self, counts: Tensor, mass: Tensor) -> None:
        self.counts, self.mass = self.counts + counts, self.mass + mass


class Router(nn.Module):
    """Which experts a token goes to, and with what weights: the k highest softmax probabilities, taken in float32."""

    def __init__(self, config: DenseConfig, layer: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden))
        self.layer = layer
        self.choices = config.experts_per_token
        self.norm_topk = config.norm_topk
        self.load = Load()
        self.e_score_correction_bias: Tensor | None
        self.register_buffer("e_score_correction_bias", None)

    def add_bias(self) -> None:
        """Begin with a bias of 0 on each expert, for the choice alone (arXiv:2408.15664), unless there is one: no weight and no gradient
        knows it."""
        if self.e_score_correction_bias is not None:
            return
        zeros = torch.zeros(len(self.weight), dtype=torch.float32, device=self.weight.device)
        self.register_buffer("e_score_correction_bias", zeros)

    def forward(self, x: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """x [n, hidden] -> weights [n, k] in x's dtype, experts [n, k]."""
        probabilities = F.linear(x, _here(self.weight)).softmax(dim=-1, dtype=torch.float32)
        if routing.replay is not None:
            experts = routing.replay[self.layer]
        else:
            with torch.no_grad():
                bias = self.e_score_correction_bias
                experts = (probabilities if bias is None else probabilities + bias).topk(self.choices, dim=-1).indices
        if routing.record is not None:
            routing.record[self.layer] = experts
        if probabilities.requires_grad:
            weight = x.new_ones(len(x), dtype=torch.float32) if routing.weight is None else routing.weight.float()
            probabilities = _Counted.apply(probabilities, experts, weight, self.load)  # type: ignore[no-untyped-call]
        weights = probabilities.gather(1, experts)
        if self.norm_topk:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), experts


class _Counted(torch.autograd.Function):
    """Probabilities [n, experts] as they are; the backward pass counts them and adds the balance loss's gradient."""

    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, experts: Tensor, weight: Tensor, load: Load) -> Tensor:
        counts = probabilities.new_zeros(probabilities.shape[1])
        ctx.counts = counts.index_add(0, experts.flatten(), weight.repeat_interleave(experts.shape[1])).double()
        ctx.mass = torch.mv(probabilities.T, weight).double()
        ctx.weight, ctx.load = weight, load
        return probabilities.view_as(probabilities)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.load.add(ctx.counts, ctx.mass)
        if ctx.load.pull is not None:
            gradient = gradient + ctx.weight[:, None] * ctx.load.pull
        return gradient, None, None, None


class Experts(nn.Module):
    """The experts that are here, [experts, ...] stacked."""

    def __init__(self, config: DenseConfig) -> None:
        super().__init__()
        wide = (config.experts, config.moe_intermediate, config.hidden)
        self.gate_proj = nn.Parameter(torch.empty(wide))
        self.up_proj = nn.Parameter(torch.empty(wide))
        self.down_proj = nn.Parameter(torch.empty(config.experts, config.hidden, config.moe_intermediate))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [m, hidden], sorted by expert; counts [experts]: how many tokens each has, zero for some if need be. Returns [m, hidden]."""
        gate, up, down = (_here(weight) for weight in (self.gate_proj, self.up_proj, self.down_proj))
        ends = counts.cumsum(0).to(torch.int32)
        hidden = F.silu(_grouped(x, gate, ends)) * _grouped(x, up, ends)
        return _grouped(hidden, down, ends)


Compute = Callable[[Experts, Tensor, Tensor], Tensor]
"""(experts, x [m, hidden] sorted by expert, counts [all experts]) -> [m, hidden]."""


class SparseMlp(nn.Module):
    """sum over the k chosen experts of weight * expert(x)."""

    def __init__(self, config: DenseConfig, layer: int) -> None:
        super().__init__()
        self.gate = Router(config, layer)
        self.experts = Experts(config)
        self.compute: Compute = all_here

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """x [n, hidden] -> [n, hidden]."""
        weights, chosen = self.gate(x, routing)
        slots = chosen.flatten()
        order = slots.argsort(stable=True)
        counts = torch.zeros(len(self.gate.weight), dtype=torch.long, device=x.device)
        counts = counts.index_add(0, slots, torch.ones_like(slots))
        out = self.compute(self.experts, x.index_select(0, order // chosen.shape[1]), counts)
        every = out.index_select(0, order.argsort()).view(*chosen.shape, -1)
        mixed: Tensor = (every * weights[..., None]).sum(dim=1)
        return mixed


def all_here(experts: Experts, x: Tensor, counts: Tensor) -> Tensor:
    """Every expert is on this process."""
    out: Tensor = experts(x, counts)
    return out


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows of x up to each end by that expert's map [out, in]."""
    out = F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    if out.requires_grad:
        out.register_hook(_dense)  # type: ignore[no-untyped-call]
    return out


def _dense(gradient: Tensor) -> Tensor:
    """As it must lie for grouped_mm's backward pass, which refuses the expanded gradient of a sum; of no rows at all, too."""
    if gradient.stride() == (gradient.shape[1], 1):
        return gradient
    return gradient.clone(memory_format=torch.contiguous_format)


def _here(weight: Tensor) -> Tensor:
    """What of it is on this process; of one that is whole on several, the gradient is what each knows of it."""
    if not isinstance(weight, DTensor):
        return weight
    return weight.to_local(grad_placements=[Partial() if p.is_replicate() else p for p in weight.placements])
