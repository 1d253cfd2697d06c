"""A decoder for inference: llama, qwen2, qwen3, qwen3_moe, with fused projections. Attention itself is the caller's.

    net = DenseNet.from_tensors(config, tensors, dtype=torch.float32, device=torch.device("cpu"), positions=2048)
    hidden = net.forward(ids, positions, attend)      # [n, hidden]; sequences lie one behind the other, no padding
    logits = net.logits(hidden[last])                 # only where a token is sampled

`attend(layer, q, kv)` stores this layer's new keys and values and returns the attention output: the engine's comes from
its KV cache, `causal` below serves one whole sequence. Immutable: new weights make a new DenseNet, then a reference is
swapped. Logits equal transformers' to 1e-4 in float32. Neighbours: dense_config.py, hf_weights.py, layers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from areal.models.dense_config import DenseConfig, read_config
from areal.models.hf_weights import check_tensors, load_tensors
from areal.models.layers import Experts, GatedMlp, Linear, interleave, rotate, rotation_table

# (layer, q [n, heads, head_dim], kv [n, 2 * kv_heads, head_dim]: keys then values) -> [n, heads * head_dim]
Attend = Callable[[int, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]
    out: Linear
    mlp_norm: Tensor
    mlp: GatedMlp | Experts


class DenseNet:
    """Weights fused and packed for speed; see the module's docstring."""

    def __init__(
        self, config: DenseConfig, embedding: Tensor, layers: list[_Layer], norm: Tensor, head: Linear, rotation: Tensor
    ) -> None:
        self.config = config
        self.dtype = embedding.dtype
        self.device = embedding.device
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._rotation = rotation

    @classmethod
    def load(cls, folder: Path, *, dtype: torch.dtype, device: torch.device, positions: int) -> DenseNet:
        """From a model folder. positions: the longest sequence it will see. Raises ConfigError."""
        config = read_config(folder)
        tensors = load_tensors(folder, config.parameter_shapes(), config.router_bias_shapes())
        return cls.from_tensors(config, tensors, dtype=dtype, device=device, positions=positions)

    @classmethod
    @torch.inference_mode()
    def from_tensors(
        cls,
        config: DenseConfig,
        tensors: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        positions: int,
    ) -> DenseNet:
        """From Hugging Face names (see DenseConfig.parameter_shapes). Nothing is shared with the given tensors: they may
        be freed or overwritten afterwards. Raises ShapeError."""
        check_tensors(tensors, config.parameter_shapes(), config.router_bias_shapes())

        def get(name: str) -> Tensor:
            return tensors[name].to(device=device, dtype=dtype)

        biases = {
            name: tensors[name].to(device=device, dtype=torch.float32, copy=True)
            for name in config.router_bias_shapes()
            if name in tensors
        }
        embedding = get("model.embed_tokens.weight").clone()
        return cls(
            config,
            embedding,
            [_fuse_layer(config, layer, get, biases) for layer in range(config.layers)],
            get("model.norm.weight").clone(),
            Linear(embedding if config.tied else get("lm_head.weight")),
            rotation_table(config.rope.inverse_frequencies(config.head_dim), positions, device),
        )

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """ids, positions [n] (int64, on the net's device) -> hidden states [n, hidden] before the last norm."""
        config = self.config
        heads, kv_heads = config.heads, config.kv_heads
        rotation = self._rotation[positions]
        x = F.embedding(ids, self._embedding)
        for index, layer in enumerate(self._layers):
            normed = F.rms_norm(x, (config.hidden,), layer.attention_norm, config.norm_eps)
            qkv = layer.qkv(normed).view(-1, heads + 2 * kv_heads, config.head_dim)
            qk = qkv[:, : heads + kv_heads]
            if layer.qk_norm is not None:
                qk.copy_(F.rms_norm(qk, (config.head_dim,), None, config.norm_eps).mul_(layer.qk_norm))
            rotate(qk, rotation)
            x = layer.out.add(attend(index, qkv[:, :heads], qkv[:, heads:]), x)
            normed = F.rms_norm(x, (config.hidden,), layer.mlp_norm, config.norm_eps)
            x = layer.mlp.add(normed, x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden] -> float32 [n, vocab_size]; a fresh tensor, the caller may change it."""
        normed = F.rms_norm(hidden, (self.config.hidden,), self._norm, self.config.norm_eps)
        return self._head(normed).float()


def causal(config: DenseConfig) -> Attend:
    """Attention of one whole sequence with itself, for scoring and tests; keeps nothing."""

    def attend(_layer: int, q: Tensor, kv: Tensor) -> Tensor:
        q_, k, v = (x.transpose(0, 1)[None] for x in (q, kv[:, : config.kv_heads], kv[:, config.kv_heads :]))
        out = F.scaled_dot_product_attention(q_, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(q.shape[0], -1)

    return attend


def _fuse_layer(config: DenseConfig, layer: int, get: Callable[[str], Tensor], biases: Mapping[str, Tensor]) -> _Layer:
    at = f"model.layers.{layer}."

    def projection(name: str, *, paired: bool, kind: str = "weight") -> Tensor:
        rows = get(f"{at}self_attn.{name}_proj.{kind}")
        return interleave(rows, config.head_dim) if paired else rows

    def qkv(kind: str) -> Tensor:
        return torch.cat([projection(name, paired=name != "v", kind=kind) for name in "qkv"])

    qk_norm = None
    if config.qk_norm:
        q_norm, k_norm = (interleave(get(f"{at}self_attn.{n}_norm.weight"), config.head_dim) for n in "qk")
        qk_norm = torch.cat([q_norm.expand(config.heads, -1), k_norm.expand(config.kv_heads, -1)])
    return _Layer(
        attention_norm=get(f"{at}input_layernorm.weight").clone(),
        qkv=Linear(qkv("weight"), qkv("bias") if config.qkv_bias else None),
        qk_norm=qk_norm,
        out=Linear(
            projection("o", paired=False), projection("o", paired=False, kind="bias") if config.o_bias else None
        ),
        mlp_norm=get(f"{at}post_attention_layernorm.weight").clone(),
        mlp=_fuse_experts(config, f"{at}mlp.", get, biases)
        if config.is_sparse(layer)
        else GatedMlp(*(get(f"{at}mlp.{name}_proj.weight") for name in ("gate", "up", "down"))),
    )


def _fuse_experts(config: DenseConfig, at: str, get: Callable[[str], Tensor], biases: Mapping[str, Tensor]) -> Experts:
    def stacked(name: str) -> Tensor:
        return torch.stack([get(f"{at}experts.{expert}.{name}_proj.weight") for expert in range(config.experts)])

    return Experts(
        get(f"{at}gate.weight"),
        stacked("gate"),
        stacked("up"),
        stacked("down"),
        bias=biases.get(f"{at}gate.e_score_correction_bias"),
        per_token=config.experts_per_token,
        normed=config.norm_topk,
    )
