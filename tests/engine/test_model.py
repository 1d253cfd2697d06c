"""Families of transformers: trained through the packed path where it is exact, refused with a sentence where it is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from areal.base.errors import ConfigError, TrainingError
from areal.engine.batch import pack
from areal.engine.commands import Row
from areal.engine.critic import load_critic
from areal.engine.engine import TrainEngine
from areal.engine.model import load_policy
from areal.engine.rows import decode_row
from areal.models.hf_names import to_disk

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write(family: str, folder: Path, **changes: Any) -> Path:
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**(SIZES | changes))
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"attention_dropout": 0.5}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 8}),
        ("Mistral", {"sliding_window": 6}),
        ("Gemma3Text", {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}),
        ("Qwen3Moe", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
        ("Mixtral", {"num_local_experts": 3, "sliding_window": None, "router_jitter_noise": 0.5}),
        ("SeedOss", {"head_dim": 8, "residual_dropout": 0.5}),
        ("Phi", {"attention_dropout": 0.0, "resid_pdrop": 0.3}),
    ],
)
def test_the_packed_path_equals_the_models_own_logits(
    tmp_path: Path, family: str, changes: dict[str, Any], group_rows: Callable[..., list[Row]]
) -> None:
    name = "Gemma3" if family == "Gemma3Text" else family
    if family == "Gemma3Text":
        torch.manual_seed(3)
        config = transformers.Gemma3TextConfig(**(SIZES | changes))
        transformers.Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    else:
        write(name, tmp_path, **changes)
    policy = load_policy(tmp_path, dtype="float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    rows = [decode_row(row) for row in group_rows(groups=2)]
    [packed] = pack(rows, max_tokens=10_000)
    with torch.no_grad():
        ours, _ = policy(packed)
        for r, row in enumerate(rows):
            logits = model(input_ids=torch.from_numpy(row.ids).long()[None], use_cache=False).logits[0, :-1]
            logp = (logits / torch.from_numpy(row.temperatures)[1:, None]).log_softmax(-1)
            own = packed.row == r
            at = torch.from_numpy(packed.position[own])
            expected = logp.gather(1, torch.from_numpy(row.ids[1:]).long()[:, None])[:, 0][at - 1]
            torch.testing.assert_close(ours[torch.from_numpy(own)], expected, atol=2e-5, rtol=1e-5)


def test_the_layers_of_a_model_that_sees_too_are_those_that_speak(tmp_path: Path) -> None:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(text_config=SIZES | {"head_dim": 8}, vision_config=vision)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    for net in (load_policy(tmp_path, dtype="float32"), load_critic(tmp_path, dtype="float32")):
        assert [type(layer).__name__ for layer in net.layers()] == ["Gemma3DecoderLayer"] * SIZES["num_hidden_layers"]


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("Granite", {"logits_scaling": 4.0}, "differs from GraniteForCausalLM's own"),
        ("Gemma2", {"head_dim": 8, "attn_logit_softcapping": 5.0}, "cannot load the model"),
        ("HrmText", {}, "makes several of its weights of 'model"),
        ("Cohere", {"logit_scale": 0.1}, "differs from CohereForCausalLM's own"),
    ],
)
def test_what_the_packed_path_cannot_do_is_refused_at_load(
    tmp_path: Path, family: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_policy(write(family, tmp_path, **changes), dtype="float32")


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])
def test_weights_that_transformers_fuses_go_out_as_they_came(tmp_path: Path, family: str) -> None:
    changes = {"num_local_experts": 3, "intermediate_size": 16, "num_experts_per_tok": 2}
    policy = load_policy(write(family, tmp_path, **changes), dtype="float32")
    out = dict(pair for name, tensor in policy.named_tensors() for pair in to_disk(policy.parts(name), tensor))
    on_disk = load_file(tmp_path / "model.safetensors")
    assert any("experts.2." in name for name in on_disk)
    assert out.keys() == on_disk.keys()
    assert all(torch.equal(out[name], tensor) for name, tensor in on_disk.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_of_any_width_are_computed(tmp_path: Path, dtype: str, group_rows: Callable[..., list[Row]]) -> None:
    """torch's grouped product refuses rows that are no whole 16 bytes: 22 numbers are that in neither dtype."""
    sizes = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 22}
    policy = load_policy(write("Qwen3Moe", tmp_path, **sizes), dtype=dtype)
    [packed] = pack([decode_row(row) for row in group_rows(groups=1)], max_tokens=10_000)
    policy(packed)[0].sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for _, p in policy.trained_parameters())


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [9.0] * 4, "factor": 4.0}


@pytest.mark.parametrize("role", ["policy", "critic"])
@pytest.mark.parametrize(
    ("changes", "longest"),
    [
        ({"rope_parameters": LONG | {"rope_theta": 1e4, "original_max_position_embeddings": 12}}, 12),
        (
            {
                "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
                "max_position_embeddings": 12,
            },
            12,
        ),
        ({}, None),
    ],
)
def test_a_row_that_turns_the_positions_of_its_neighbours_is_refused(
    tmp_path: Path,
    changes: dict[str, Any],
    longest: int | None,
    role: str,
    make_engine: Callable[..., TrainEngine],
    make_row: Callable[..., Row],
) -> None:
    engine = make_engine(model_dir=str(write("Llama", tmp_path, **changes)), role=role)
    short, full = make_row([5, 6, 7], [2]), make_row(list(range(12)), [11])
    [alone] = engine.score([short])
    np.testing.assert_allclose(engine.score([short, full])[0], alone, atol=1e-5)
    if longest is None:
        engine.score([make_row(list(range(40)), [39])])
        return
    with pytest.raises(TrainingError, match=f"session s-0: a row of 13 tokens, and a row of more than {longest} makes"):
        engine.score([short, make_row(list(range(13)), [12])])


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    """transformers would take their scales into account; we would train the bare numbers."""
    write("Llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"holds F8_E4M3, .* before it was quantised"):
        load_policy(tmp_path, dtype="float32")


def test_a_broken_weights_file_is_a_sentence(tmp_path: Path) -> None:
    write("Llama", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0garbage!")
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        load_policy(tmp_path, dtype="float32")


def test_a_checkpoint_with_a_gap_is_refused(tmp_path: Path) -> None:
    """transformers would fill it with random numbers and a warning."""
    write("Llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"no weight 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load_policy(tmp_path, dtype="float32")


def test_T110_pickled_weights_are_not_opened(tmp_path: Path) -> None:
    write("Llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"has neither model\.safetensors .* convert the model to safetensors"):
        load_policy(tmp_path, dtype="float32")
