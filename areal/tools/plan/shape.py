"""What a model is, as far as memory and traffic go: a handful of widths read from a Hugging Face config.json.

    shape = read_shape("smollm2-135m")          # a folder, a config.json, a bundled name, or a preset
    shape.parameters, shape.active_parameters

Unlike models/dense_config.py this reader looks at widths only: what bends the logits (rope scaling, soft caps) costs no memory. Layers with
experts are those that transformers makes so (`decoder_sparse_step`, `mlp_only_layers`). Used by the rest of this folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.base.errors import ConfigError
from areal.models.bundled import BUNDLED
from areal.models.dense_config import FAMILIES, DenseConfig, Rope
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
        return shape_of(_json(path), path.parent.name or str(path), str(path))
    if model in PRESETS:
        return shape_of(PRESETS[model], model, model)
    if model in BUNDLED:
        return shape_of(_json(resolve(model) / "config.json"), model, model)
    known = ", ".join(dict.fromkeys([*PRESETS, *BUNDLED]))
    raise ConfigError(f"--model {model!r:.200} is no folder, no config.json and none of {known}")


def shape_of(raw: Mapping[str, Any], name: str, where: str) -> Shape:
    """Of a config.json's object. where: said in errors. Raises ConfigError for a family that is not known and for what is missing."""
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"{where}: model_type {family!r:.80} cannot be planned; known: {', '.join(FAMILIES)}")
    rules, bias = FAMILIES[family], bool(raw.get("attention_bias", False))
    heads = _whole(raw, "num_attention_heads", where)
    hidden = _whole(raw, "hidden_size", where)
    layers = _whole(raw, "num_hidden_layers", where)
    sparse = _expert_layers(raw, layers, where) if rules.experts else 0
    shape = Shape(
        name=name,
        family=family,
        vocabulary=_whole(raw, "vocab_size", where),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_whole(raw, "num_key_value_heads", where, heads),
        head_dim=_whole(raw, "head_dim", where, hidden // heads),
        intermediate=_whole(raw, "intermediate_size", where),
        qkv_bias=bias if rules.qkv_bias is None else rules.qkv_bias,
        o_bias=bias if rules.o_bias is None else rules.o_bias,
        qk_norm=rules.qk_norm,
        tied=bool(raw.get("tie_word_embeddings", False)),
        experts=_experts(raw, where) if sparse else 0,
        experts_per_token=_whole(raw, "num_experts_per_tok", where) if sparse else 0,
        expert_intermediate=_whole(raw, "moe_intermediate_size", where) if sparse else 0,
        expert_layers=sparse,
    )
    if shape.heads % shape.kv_heads or shape.experts_per_token > shape.experts:
        raise ConfigError(
            f"{where}: num_attention_heads must be a multiple of num_key_value_heads, and num_experts_per_tok at most num_experts"
        )
    return shape


def _expert_layers(raw: Mapping[str, Any], layers: int, where: str) -> int:
    step = _whole(raw, "decoder_sparse_step", where, 1)
    dense = raw.get("mlp_only_layers") or []
    return sum(number not in dense and (number + 1) % step == 0 for number in range(layers))


def _experts(raw: Mapping[str, Any], where: str) -> int:
    """Under either name: the hub's, or what transformers 5 writes."""
    return _whole(raw, "num_experts" if "num_experts" in raw else "num_local_experts", where)


def _whole(raw: Mapping[str, Any], key: str, where: str, otherwise: int | None = None) -> int:
    value = raw.get(key)
    value = otherwise if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"{where}: {key}={value!r:.80} is no whole number of at least 1; is this a model's config.json?"
        )
    return value


def _json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give a model folder or its config.json") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, not an object; give a model's config.json")
    return value
