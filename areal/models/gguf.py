"""GGUF to a Hugging Face folder: dequantised fp32 safetensors, config, tokenizer. numpy only, no torch, no transformers.

    convert_gguf(Path("SmolLM2-135M-Instruct.Q4_1.gguf"), Path("smollm2"))

Covers what the bundled models need: architecture `llama` with a byte-level BPE tokenizer (`gpt2` model, `smollm` digits). Anything
else is refused with a sentence: a guess about a permutation or a pre-tokeniser would be a silently different model. Used by
models/bundled.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from areal.base.errors import ConfigError

_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3  # GGUF token type: special, never the result of merging text


def convert_gguf(source: Path, folder: Path) -> None:
    """Writes config.json, model.safetensors, tokenizer.json, tokenizer_config.json and generation_config.json into `folder`.

    Raises ConfigError if the file is of another architecture or tokenizer, or holds a tensor without a known name.
    """
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(source)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    config = llama_config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    save_file(_tensors(reader.tensors, config), folder / "model.safetensors", metadata={"format": "pt"})
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", {key: config[key] for key in _TOKEN_IDS})
    _write(folder / "tokenizer.json", tokenizer(fields))
    _write(folder / "tokenizer_config.json", tokenizer_config(fields))


_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def llama_config(fields: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    """The config.json of a llama-family GGUF. rope_theta stands in both spellings: transformers 4 and 5 read different ones."""
    if fields.get("general.architecture") != "llama":
        raise ConfigError(
            f"GGUF architecture {fields.get('general.architecture')!r} is not converted here, only 'llama'"
        )
    scaled = [key for key in fields if key.startswith("llama.rope.scaling") or key.startswith("llama.expert_")]
    if scaled:
        raise ConfigError(f"GGUF with {scaled[0]} is not converted here: it is another model than plain llama")
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    theta = _plain(fields["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields.get("llama.rope.dimension_count", hidden // heads),
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": _plain(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "use_cache": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
    }


def _plain(value: float) -> float:
    """GGUF keeps float32; 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def _tensors(tensors: Any, config: Mapping[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
    from gguf import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    result = {}
    for tensor in tensors:
        weights = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        layer_part = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if layer_part in heads:
            weights = unpermute(weights, heads[layer_part])
        result[hugging_face_name(tensor.name)] = np.ascontiguousarray(weights)
    return result


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
    if name not in _OUTER_NAMES:
        raise ConfigError(f"GGUF tensor {name!r} has no place in a llama model; this file is not converted here")
    return _OUTER_NAMES[name]


def unpermute(weights: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's row order of q and k: it interleaves the two rotary halves of each head ([rows, columns])."""
    rows, columns = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def tokenizer(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer.json: byte-level BPE. `smollm` splits every digit off first (SmolLM2's own pre-tokeniser; it shows
    where two spaces stand before a number)."""
    kind, splitter = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if (kind, splitter) != ("gpt2", "smollm"):
        raise ConfigError(f"GGUF tokenizer {kind}/{splitter} is not converted here, only gpt2/smollm")
    tokens = fields["tokenizer.ggml.tokens"]
    special = [index for index, kind in enumerate(fields["tokenizer.ggml.token_type"]) if kind == _CONTROL]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": tokens[index], **plain} for index in special],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        # The class that reads tokenizer.json as it stands; model-specific ones would rebuild the pre-tokeniser.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=None if "model" in content else 2) + "\n")
