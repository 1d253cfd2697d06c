"""The decoder that is trained in many processes: llama, qwen2, qwen3, qwen3_moe, a slice of its layers if need be. Attention itself is the caller's.

    decoder = Decoder(config)                              # or Decoder(config, layers=range(0, 12)): the first stage of a pipeline
    hidden = decoder(ids, positions, attend)               # [n] -> [n, hidden], packed rows one behind the other, no batch dimension
    logits = hidden @ decoder.lm_head.weight.T             # in chunks: algorithms/logprobs.py

Modules and parameters have Hugging Face's names, so that a checkpoint's tensors go in and out as they are. A stage without the
embedding takes hidden states; one without the end gives them back before the last norm. `attend(layer, q, k, v)` sees
[n, heads, head_dim] with whatever heads this process has, which is what lets tensor and context parallelism stay outside.
Written for torch's parallel styles: plain nn.Linear, nn.Embedding, nn.RMSNorm over two-dimensional inputs. Neighbours: dense.py
(the same nets for inference, fused), dense_config.py (what there is to know of them), engine/parallel (what cuts them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from areal.models.dense_config import DenseConfig
from areal.models.experts import PLAIN, Routing, SparseMlp

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [n, heads, head_dim], k and v [n, kv_heads, head_dim] -> [n, heads, head_dim]."""


class Decoder(nn.Module):
    """Layers `layers` of the net; see the module's docstring. Parameters are not initialised: load them."""

    def __init__(self, config: DenseConfig, layers: range | None = None) -> None:
        super().__init__()
        layers = range(config.layers) if layers is None else layers
        self.config = config
        self.model = Body(config, layers)
        self.lm_head: nn.Linear | None = None
        if layers.stop == config.layers:
            self.lm_head = nn.Linear(config.hidden, config.vocab_size, bias=False)
            if config.tied and self.model.embed_tokens is not None:
                self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, x: Tensor, positions: Tensor, attend: Attend, routing: Routing = PLAIN) -> Tensor:
        """x: ids [n], or hidden states [n, hidden] where there is no embedding; positions [n]. routing: of sparse layers."""
        hidden: Tensor = self.model(x, positions, attend, routing)
        return hidden

    def blocks(self) -> Iterator[Block]:
        """The layers of this slice, in order."""
        for block in self.model.layers.values():
            assert isinstance(block, Block)
            yield block


class Body(nn.Module):
    """Everything but the output head."""

    def __init__(self, config: DenseConfig, layers: range) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden) if layers.start == 0 else None
        self.layers = nn.ModuleDict({str(number): Block(config, number) for number in layers})
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps) if layers.stop == config.layers else None
        self._frequencies = config.rope.inverse_frequencies(config.head_dim)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend, routing: Routing) -> Tensor:
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        angles = positions[:, None].float() * torch.tensor(self._frequencies, device=positions.device)
        rotation = (angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype))
        for block in self.layers.values():
            x = block(x, rotation, attend, routing)
        return x if self.norm is None else self.norm(x)


class Block(nn.Module):
    """One layer: attention, then a gated map (in a sparse layer several, chosen for each token), each beside a residual."""

    def __init__(self, config: DenseConfig, number: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.mlp: GatedMlp | SparseMlp = (
            SparseMlp(config, number) if config.is_sparse(number) else GatedMlp(config.hidden, config.intermediate)
        )

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend, routing: Routing) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, attend)
        normed = self.post_attention_layernorm(x)
        out: Tensor = self.mlp(normed, routing) if isinstance(self.mlp, SparseMlp) else self.mlp(normed)
        return x + out


class Attention(nn.Module):
    """Projections, their norms where the family has them, rotation; how many heads there are is read off the projections."""

    def __init__(self, config: DenseConfig) -> None:
        super().__init__()
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden, q, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden, kv, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden, kv, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q, config.hidden, bias=config.o_bias)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q, k, v = (each.view(len(each), -1, self.head_dim) for each in (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(_rotated(q, rotation), _rotated(k, rotation), v)
        projected: Tensor = self.o_proj(out.reshape(len(out), -1))
        return projected


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def _rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions in Hugging Face's layout: the first half of each head turns with the second."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
