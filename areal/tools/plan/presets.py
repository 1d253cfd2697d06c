"""Well-known models as the facts of their published config.json, so that a plan needs neither network nor weights.

Only what shape.py reads. The parameter counts that follow are compared with the published ones in tests/tools/test_plan.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _config(
    family: str,
    vocabulary: int,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    *,
    head_dim: int | None = None,
    tied: bool = False,
) -> dict[str, Any]:
    return {
        "model_type": family,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "head_dim": head_dim,
        "tie_word_embeddings": tied,
    }


def _qwen3_moe(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, expert_intermediate: int
) -> dict[str, Any]:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert_intermediate}
    return _config("qwen3_moe", 151936, hidden, layers, heads, kv_heads, intermediate, head_dim=128) | experts


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "smollm2-135m": _config("llama", 49152, 576, 30, 9, 3, 1536, tied=True),
    "qwen2.5-7b": _config("qwen2", 152064, 3584, 28, 28, 4, 18944),
    "qwen3-0.6b": _config("qwen3", 151936, 1024, 28, 16, 8, 3072, head_dim=128, tied=True),
    "qwen3-4b": _config("qwen3", 151936, 2560, 36, 32, 8, 9728, head_dim=128, tied=True),
    "qwen3-8b": _config("qwen3", 151936, 4096, 36, 32, 8, 12288, head_dim=128),
    "qwen3-32b": _config("qwen3", 151936, 5120, 64, 64, 8, 25600, head_dim=128),
    "qwen3-30b-a3b": _qwen3_moe(2048, 48, 32, 4, 6144, 768),
    "qwen3-235b-a22b": _qwen3_moe(4096, 94, 64, 4, 12288, 1536),
    "llama-3.1-8b": _config("llama", 128256, 4096, 32, 32, 8, 14336),
    "llama-3.1-70b": _config("llama", 128256, 8192, 80, 64, 8, 28672),
    "llama-3.1-405b": _config("llama", 128256, 16384, 126, 128, 8, 53248),
}
