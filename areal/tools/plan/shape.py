"""What a model is, as far as memory and traffic go: a handful of widths read from a Hugging Face config.json.

    shape = read_shape("smollm2-135m")          # a folder, a config.json, a bundled name, or a preset
    shape.parameters, shape.active_parameters

The widths are read by models/dense_config.py, as the nets'; what bends the logits (rope scaling, soft caps) costs no memory and is not looked at.
Used by the rest of this folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.base.errors import ConfigError
from areal.models.bundled import BUNDLED
from areal.models.dense_config import DenseConfig, Rope, json_object, read_widths
from areal.models.fetch import resolve
from areal.tools.plan.presets import PRESETS


@dataclass(frozen=True, slots=True)
class Shape:
    """Widths of a decoder. heads, kv_heads: of head_dim numbers each. intermediate: of a layer without experts. expert_layers of all `layers` have
    `experts` maps of width expert_intermediate each, of which a token goes through experts_per_token; 0 in a dense model."""

    name: str
    family: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    tied: bool
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    expert_layers: int = 0

    @property
    def config(self) -> DenseConfig:
        """As the engine knows a model, but for how positions turn. Where some layers have experts and some have none, the first ones have none."""
        return DenseConfig(
            family=self.family,
            vocab_size=self.vocabulary,
            hidden=self.hidden,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate=self.intermediate,
            norm_eps=1e-6,
            qkv_bias=self.qkv_bias,
            o_bias=self.o_bias,
            qk_norm=self.qk_norm,
            tied=self.tied,
            rope=Rope(),
            max_positions=0,
            experts=self.experts,
            experts_per_token=self.experts_per_token,
            moe_intermediate=self.expert_intermediate,
            dense_layers=tuple(range(self.layers - self.expert_layers)),
        )

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def table(self) -> int:
        """Parameters of the embedding, and of an output head of its own."""
        return self.vocabulary * self.hidden

    @property
    def attention(self) -> int:
        """Parameters of one layer's four projections."""
        q, kv, d = self.query_width, self.kv_width, self.hidden
        return 2 * d * q + 2 * d * kv + (q + 2 * kv) * self.qkv_bias + d * self.o_bias

    @property
    def norms(self) -> int:
        """Parameters of one layer's norms."""
        return 2 * self.hidden + 2 * self.head_dim * self.qk_norm

    @property
    def mlp(self) -> int:
        """Parameters of the gated map of one layer without experts."""
        return 3 * self.hidden * self.intermediate

    @property
    def router(self) -> int:
        return self.hidden * self.experts

    @property
    def expert(self) -> int:
        """Parameters of one expert of one layer."""
        return 3 * self.hidden * self.expert_intermediate

    @property
    def parameters(self) -> int:
        """All of them, tied ones once."""
        every = self.layers * (self.attention + self.norms) + (self.layers - self.expert_layers) * self.mlp
        every += self.expert_layers * (self.router + self.experts * self.expert)
        return every + self.table * (1 if self.tied else 2) + self.hidden

    def adapters(self, rank: int) -> int:
        """Parameters of the adapters of all layers: on each linear map but experts and routers."""
        d, q, kv, i = self.hidden, self.query_width, self.kv_width, self.intermediate
        attention = 2 * (d + q) + 2 * (d + kv)
        return rank * (self.layers * attention + (self.layers - self.expert_layers) * 3 * (d + i))

    @property
    def active_parameters(self) -> int:
        """Those that one token goes through, embedding and head included, as model names count them (A3B)."""
        return self.parameters - self.expert_layers * (self.experts - self.experts_per_token) * self.expert


def read_shape(model: str) -> Shape:
    """Of a folder, a config.json, a preset or a bundled model's name. Raises ConfigError, listing what is known."""
    path = Path(model).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return shape_of(json_object(path), path.parent.name or str(path), str(path))
    if model in PRESETS:
        return shape_of(PRESETS[model], model, model)
    if model in BUNDLED:
        return shape_of(json_object(resolve(model) / "config.json"), model, model)
    known = ", ".join(dict.fromkeys([*PRESETS, *BUNDLED]))
    raise ConfigError(f"--model {model!r:.200} is no folder, no config.json and none of {known}")


def shape_of(raw: Mapping[str, Any], name: str, where: str) -> Shape:
    """Of a config.json's object. where: said in errors. Raises as read_widths."""
    config = read_widths(raw, where)
    sparse = sum(map(config.is_sparse, range(config.layers)))
    return Shape(
        name=name,
        family=config.family,
        vocabulary=config.vocab_size,
        hidden=config.hidden,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate,
        qkv_bias=config.qkv_bias,
        o_bias=config.o_bias,
        qk_norm=config.qk_norm,
        tied=config.tied,
        experts=config.experts if sparse else 0,
        experts_per_token=config.experts_per_token if sparse else 0,
        expert_intermediate=config.moe_intermediate if sparse else 0,
        expert_layers=sparse,
    )
