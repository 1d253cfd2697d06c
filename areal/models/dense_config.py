"""What a decoder looks like, read from a Hugging Face config.json: llama, qwen2, qwen3, and qwen3_moe, whose layers have experts.

    config = read_config(folder)             # DenseConfig; ConfigError for what we would compute wrongly
    config = read_widths(raw, "x")           # of any config.json, what the parameters depend on alone (the planner's)
    config.parameter_shapes()                # name on disk -> shape, tied weights once, every expert by itself
    config.is_sparse(3)                      # whether layer 3 has experts in the place of its one gated map

Everything that changes the logits is either honoured or refused with a sentence; nothing is ignored. One table, FAMILIES,
says how the families differ. Neighbours: dense.py and decoder.py (the nets), hf_weights.py (their tensors).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from areal.base.errors import ConfigError


class Family(NamedTuple):
    """qkv_bias / o_bias None: as the config's `attention_bias` says. experts: some or all layers may have them."""

    qkv_bias: bool | None
    o_bias: bool | None
    qk_norm: bool
    experts: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family(qkv_bias=None, o_bias=None, qk_norm=False),
    "qwen2": Family(qkv_bias=True, o_bias=False, qk_norm=False),
    "qwen3": Family(qkv_bias=None, o_bias=None, qk_norm=True),
    "qwen3_moe": Family(qkv_bias=None, o_bias=None, qk_norm=True, experts=True),
}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions. scaling `llama3` uses all five numbers, `linear` only factor, `default` none (factor 1)."""

    theta: float = 10000.0
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """[head_dim / 2] angles per position, scaled (arXiv:2104.09864; llama3: the Llama 3.1 release)."""
        plain = [self.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
        if self.scaling == "default":
            return plain
        if self.scaling == "linear":
            return [value / self.factor for value in plain]
        return [self._llama3(value) for value in plain]

    def _llama3(self, frequency: float) -> float:
        """Long waves are slowed by `factor`, short ones kept, between them a linear blend."""
        wavelength = 2 * math.pi / frequency
        if wavelength > self.original_positions / self.low_freq_factor:
            return frequency / self.factor
        if wavelength < self.original_positions / self.high_freq_factor:
            return frequency
        blend = (self.original_positions / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        return (1 - blend) * frequency / self.factor + blend * frequency


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """One token goes through `experts_per_token` of a sparse layer's `experts`, each a gated map of width `moe_intermediate`; their
    weights are softmax probabilities over all experts, divided by their own sum where `norm_topk` says so. experts 0: no sparse layer.
    """

    family: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    tied: bool
    rope: Rope
    max_positions: int
    eos_ids: tuple[int, ...] = ()
    experts: int = 0
    experts_per_token: int = 0
    moe_intermediate: int = 0
    norm_topk: bool = False
    sparse_step: int = 1
    dense_layers: tuple[int, ...] = ()

    def is_sparse(self, layer: int) -> bool:
        """Every `sparse_step`-th layer is, but for `dense_layers`."""
        return self.experts > 0 and (layer + 1) % self.sparse_step == 0 and layer not in self.dense_layers

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter under its name on disk; with tied heads there is no lm_head.weight."""
        q, kv, d = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, d)}
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            for name, width in (("q", q), ("k", kv), ("v", kv)):
                shapes[f"{at}self_attn.{name}_proj.weight"] = (width, d)
                if self.qkv_bias:
                    shapes[f"{at}self_attn.{name}_proj.bias"] = (width,)
            shapes[f"{at}self_attn.o_proj.weight"] = (d, q)
            if self.o_bias:
                shapes[f"{at}self_attn.o_proj.bias"] = (d,)
            if self.qk_norm:
                shapes[f"{at}self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[f"{at}self_attn.k_norm.weight"] = (self.head_dim,)
            shapes |= self._mlp_shapes(f"{at}mlp.", layer)
            shapes[f"{at}input_layernorm.weight"] = (d,)
            shapes[f"{at}post_attention_layernorm.weight"] = (d,)
        shapes["model.norm.weight"] = (d,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, d)
        return shapes

    def router_bias_shapes(self) -> dict[str, tuple[int, ...]]:
        """What may lie on disk beside the parameters: of each sparse layer a bias on its choice of experts (models/experts.py)."""
        layers = filter(self.is_sparse, range(self.layers))
        return {f"model.layers.{layer}.mlp.gate.e_score_correction_bias": (self.experts,) for layer in layers}

    def _mlp_shapes(self, at: str, layer: int) -> dict[str, tuple[int, ...]]:
        maps, width, shapes = [at], self.intermediate, dict[str, tuple[int, ...]]()
        if self.is_sparse(layer):
            shapes[f"{at}gate.weight"] = (self.experts, self.hidden)
            maps, width = [f"{at}experts.{expert}." for expert in range(self.experts)], self.moe_intermediate
        for each in maps:
            shapes[f"{each}gate_proj.weight"] = shapes[f"{each}up_proj.weight"] = (width, self.hidden)
            shapes[f"{each}down_proj.weight"] = (self.hidden, width)
        return shapes


def read_config(folder: Path) -> DenseConfig:
    """Of a model folder. Raises ConfigError: no config.json, an unknown family, or a setting we do not compute."""
    path = folder / "config.json"
    raw = json_object(path)
    config = read_widths(raw, str(path))
    _refuse_what_we_would_ignore(raw, path)
    if config.head_dim % 2:
        raise ConfigError(f"{path}: head_dim must be even, not {config.head_dim}: positions turn pairs of numbers")
    try:
        return replace(
            config,
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=_read_rope(raw, path),
            max_positions=int(raw.get("max_position_embeddings", 2048)),
            eos_ids=_read_eos_ids(raw, folder),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: {error!r} is missing or no number; is this a {config.family} model folder?"
        ) from error


def read_widths(raw: Mapping[str, Any], where: str) -> DenseConfig:
    """What a config.json's object says of the parameters; how positions turn and how a text ends is left out. where: said in errors.

    Raises ConfigError for a family that is not known, and for what is missing or does not fit together."""
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ConfigError(f"{where}: model_type {family!r:.80} is not built in here; known: {', '.join(FAMILIES)}")
    rules, bias = FAMILIES[family], bool(raw.get("attention_bias", False))
    heads, hidden = _whole(raw, "num_attention_heads", where), _whole(raw, "hidden_size", where)
    config = DenseConfig(
        family=family,
        vocab_size=_whole(raw, "vocab_size", where),
        hidden=hidden,
        layers=_whole(raw, "num_hidden_layers", where),
        heads=heads,
        kv_heads=_whole(raw, "num_key_value_heads", where, heads),
        head_dim=_whole(raw, "head_dim", where, hidden // heads),
        intermediate=_whole(raw, "intermediate_size", where),
        norm_eps=1e-6,
        qkv_bias=bias if rules.qkv_bias is None else rules.qkv_bias,
        o_bias=bias if rules.o_bias is None else rules.o_bias,
        qk_norm=rules.qk_norm,
        tied=bool(raw.get("tie_word_embeddings", False)),
        rope=Rope(),
        max_positions=0,
        **(_read_experts(raw, where) if rules.experts else {}),
    )
    if config.heads % config.kv_heads:
        raise ConfigError(f"{where}: num_attention_heads must be a multiple of num_key_value_heads")
    if config.experts_per_token > config.experts:
        raise ConfigError(f"{where}: num_experts_per_tok must be 1 to num_experts={config.experts}")
    return config


def _read_experts(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Both spellings of their number: `num_experts` (the hub's) and `num_local_experts` (what transformers 5 writes)."""
    if len({raw[key] for key in ("num_experts", "num_local_experts") if key in raw}) > 1:
        raise ConfigError(f"{where}: num_experts and num_local_experts differ; they are one number, keep the right one")
    return {
        "experts": _whole(raw, "num_local_experts" if "num_local_experts" in raw else "num_experts", where),
        "experts_per_token": _whole(raw, "num_experts_per_tok", where),
        "moe_intermediate": _whole(raw, "moe_intermediate_size", where),
        "norm_topk": bool(raw.get("norm_topk_prob", False)),
        "sparse_step": _whole(raw, "decoder_sparse_step", where, 1),
        "dense_layers": tuple(int(layer) for layer in raw.get("mlp_only_layers") or ()),
    }


def _whole(raw: Mapping[str, Any], key: str, where: str, otherwise: int | None = None) -> int:
    value = raw.get(key)
    value = otherwise if value is None else value
    if value is None:
        raise ConfigError(f"{where}: {key!r} is missing; is this a model's config.json?")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"{where}: {key}={value!r:.80} is no whole number of at least 1; is this a model's config.json?"
        )
    return value


def json_object(path: Path) -> Mapping[str, Any]:
    """What a JSON file holds. Raises ConfigError where that is no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist; a model folder has config.json and *.safetensors") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give a model folder or its config.json") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, not an object; give a model's config.json")
    return value


def _refuse_what_we_would_ignore(raw: Mapping[str, Any], path: Path) -> None:
    refused = {
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "use_sliding_window": bool(raw.get("use_sliding_window", False)),
        "layer_types": any(kind != "full_attention" for kind in raw.get("layer_types") or ()),
        "mlp_bias": bool(raw.get("mlp_bias", False)),
        "partial_rotary_factor": raw.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0),
        "quantization_config": bool(raw.get("quantization_config")),
    }
    for key, wrong in refused.items():
        if wrong:
            raise ConfigError(f"{path}: {key}={raw[key]!r} is not computed natively; choose a model without it")


def _read_rope(raw: Mapping[str, Any], path: Path) -> Rope:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` + `rope_scaling` (before), which counts where both stand, as it does there."""
    said: dict[str, Any] = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    scaling = str(said.get("rope_type", said.get("type", "default")))
    if scaling not in ("default", "linear", "llama3"):
        raise ConfigError(f"{path}: rope scaling {scaling!r} is not computed natively; known: default, linear, llama3")
    for key, value in said.items():
        if isinstance(value, dict) or (key == "partial_rotary_factor" and value not in (None, 1)):
            raise ConfigError(
                f"{path}: {key}={value!r:.80} in its rope is not computed natively; choose a model without it"
            )
    rope = Rope(theta=float(said.get("rope_theta", raw.get("rope_theta", 10000.0))), scaling=scaling)
    if scaling != "default":
        rope = replace(rope, factor=float(said["factor"]))
    if scaling == "llama3":
        rope = replace(
            rope,
            low_freq_factor=float(said["low_freq_factor"]),
            high_freq_factor=float(said["high_freq_factor"]),
            original_positions=int(said["original_max_position_embeddings"]),
        )
    if min(rope.theta, rope.factor, rope.low_freq_factor) <= 0 or rope.high_freq_factor <= rope.low_freq_factor:
        raise ConfigError(
            f"{path}: {said!r:.200} are no rotary positions: theta and factors are above 0, the high one above the low"
        )
    return rope


def _read_eos_ids(raw: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    """All end ids (T053): of generation_config.json, which chat models keep longer, and of config.json."""
    ids: list[int] = []
    generation = folder / "generation_config.json"
    for source in (json_object(generation) if generation.is_file() else {}, raw):
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(int(token) for token in ids))
