"""Our nets against transformers' own, on tiny random models of every family, saved and loaded as folders."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from areal.base.errors import ConfigError, ShapeError
from areal.engine.archon import load_archon
from areal.engine.model import load_policy
from areal.engine.parallel.world import World
from areal.models.dense import DenseNet, causal
from areal.models.dense_config import read_config
from areal.models.hf_weights import check_tensors, load_tensors, weight_files
from areal.models.layers import Linear
from areal.models.tiny import on_disk

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0}
MOE_SIZES: dict[str, Any] = {"head_dim": 16, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama untied with biases": LlamaConfig(**SIZES, attention_bias=True),
    "llama of the smollm2 shape": LlamaConfig(
        **{**SIZES, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}, tie_word_embeddings=True
    ),
    "llama3 rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "linear rope": LlamaConfig(**SIZES, rope_parameters=LINEAR_ROPE),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "qwen3 with biases": Qwen3Config(**SIZES, head_dim=16, attention_bias=True, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **MOE_SIZES, norm_topk_prob=True),
    "qwen3_moe with a dense layer, tied, probabilities as they are": Qwen3MoeConfig(
        **SIZES, **MOE_SIZES, mlp_only_layers=[0], norm_topk_prob=False, tie_word_embeddings=True
    ),
    "qwen3_moe whose every second layer has experts": Qwen3MoeConfig(
        **{**SIZES, "num_hidden_layers": 4}, **MOE_SIZES, decoder_sparse_step=2, attention_bias=True
    ),
}


def reference(config: PretrainedConfig) -> Any:
    """transformers' model with every parameter random, so that no bias or norm hides at its initial value."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def save(model: Any, folder: Path) -> Path:
    """As save_pretrained would, without its progress bar."""
    folder.mkdir(exist_ok=True)
    model.config.save_pretrained(folder)
    save_file(on_disk(model), folder / "model.safetensors")
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save(reference(CONFIGS["llama tied"]), tmp_path / "llama")


def edit_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = reference(CONFIGS[name])
    net = DenseNet.load(save(model, tmp_path / "net"), dtype=torch.float32, device=CPU, positions=256)
    ids = torch.randint(0, 97, (200,), generator=torch.Generator().manual_seed(1))
    ours = net.logits(net.forward(ids, torch.arange(200), causal(net.config)))
    theirs = model(ids[None]).logits[0]
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_net_shares_nothing_with_the_tensors_it_was_made_of(llama: Path, dtype: torch.dtype) -> None:
    config = read_config(llama)
    tensors = {name: t.to(dtype) for name, t in load_tensors(llama, config.parameter_shapes()).items()}
    net = DenseNet.from_tensors(config, tensors, dtype=dtype, device=CPU, positions=16)
    ids = torch.arange(10)
    before = net.logits(net.forward(ids, ids, causal(config)))
    for tensor in tensors.values():
        tensor.fill_(torch.nan)
    assert torch.equal(net.logits(net.forward(ids, ids, causal(config))), before)


@torch.inference_mode()
def test_bfloat16_logits_are_near_the_exact_ones(tmp_path: Path) -> None:
    folder = save(reference(CONFIGS["qwen3"]), tmp_path / "net")
    ids = torch.randint(0, 97, (50,), generator=torch.Generator().manual_seed(1))
    exact, rounded = (
        net.logits(net.forward(ids, torch.arange(50), causal(net.config)))
        for net in (DenseNet.load(folder, dtype=d, device=CPU, positions=64) for d in (torch.float32, torch.bfloat16))
    )
    assert rounded.dtype == torch.float32
    assert (exact - rounded).abs().max() < 0.05 * exact.abs().max()


def test_a_model_split_over_files_loads_like_a_single_one(llama: Path) -> None:
    whole = load_file(llama / "model.safetensors")
    names = sorted(whole)
    parts = {"model-1.safetensors": names[:7], "model-2.safetensors": names[7:]}
    for file, held in parts.items():
        save_file({name: whole[name] for name in held}, llama / file)
    (llama / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = load_tensors(llama, read_config(llama).parameter_shapes())
    assert loaded.keys() == whole.keys()
    assert all(torch.equal(loaded[name], whole[name]) for name in names)


@pytest.mark.parametrize(
    "name", ["../../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "x\0.safetensors"]
)
def test_T111_an_index_that_leads_out_of_the_folder_is_refused_unread(llama: Path, name: str) -> None:
    (llama.parent / "secret.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ConfigError, match="inside the model folder"):
        weight_files(llama)


@pytest.mark.parametrize("content", ["[]", "{}", "not json", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_an_index_that_is_none_is_a_sentence(llama: Path, content: str) -> None:
    (llama / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ConfigError, match=r"index\.json"):
        weight_files(llama)


def test_a_missing_shard_a_broken_file_and_an_empty_folder_are_named(llama: Path, tmp_path: Path) -> None:
    shapes = read_config(llama).parameter_shapes()
    (llama / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0garbage!")
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        load_tensors(llama, shapes)
    (llama / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-9.safetensors"}}')
    with pytest.raises(ConfigError, match=r"model-9\.safetensors, which is not in"):
        load_tensors(llama, shapes)
    with pytest.raises(ConfigError, match="convert the model to safetensors"):
        weight_files(tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        read_config(tmp_path)


def test_weights_of_another_shape_are_refused_naming_the_tensor(llama: Path) -> None:
    shapes = read_config(edit_config(llama, intermediate_size=88)).parameter_shapes()
    with pytest.raises(ConfigError, match=r"mlp\..*_proj\.weight has shape .*do not belong together"):
        load_tensors(llama, shapes)


def _to_trainer(folder: Path) -> None:
    load_archon(folder, World.alone(), dtype="float32")


def _to_trainer_of_any(folder: Path) -> None:
    load_policy(folder, dtype="float32")


def _to_sampler(folder: Path) -> None:
    DenseNet.load(folder, dtype=torch.float32, device=CPU, positions=8)


@pytest.mark.parametrize("load", [_to_trainer, _to_trainer_of_any, _to_sampler])
@pytest.mark.parametrize(
    "name", ["layers.2.mlp.up_proj.weight", "layers.1.self_attn.q_norm.weight", "layers.0.self_attn.q_proj.bias"]
)
def test_a_layer_with_more_weights_than_the_net_has_is_refused(
    llama: Path, name: str, load: Callable[[Path], None]
) -> None:
    """transformers would leave them out with a warning, and go on with another model."""
    tensors = load_file(llama / "model.safetensors")
    tables = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "v_head.weight": torch.ones(3)}
    save_file(tensors | tables, llama / "model.safetensors")
    load(llama)
    save_file(tensors | {f"model.{name}": torch.ones(48)}, llama / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"has a weight 'model\.{re.escape(name)}', and the net"):
        load(llama)


def test_tied_heads_appear_once_and_a_redundant_one_is_let_through(llama: Path) -> None:
    shapes = read_config(llama).parameter_shapes()
    assert "lm_head.weight" not in shapes
    tensors = load_file(llama / "model.safetensors")
    check_tensors({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, shapes)
    with pytest.raises(ShapeError, match=r"1 unknown ones \(model\.extra"):
        check_tensors({**tensors, "model.extra": torch.zeros(1)}, shapes)
    with pytest.raises(ShapeError, match=r"lack 1 tensors \(model\.norm\.weight"):
        check_tensors({k: v for k, v in tensors.items() if k != "model.norm.weight"}, shapes)
    with pytest.raises(ShapeError, match=r"holds torch\.int64"):
        check_tensors({**tensors, "model.norm.weight": torch.ones(48, dtype=torch.int64)}, shapes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mamba"}, "known: llama, qwen2, qwen3"),
        ({"model_type": ["llama"]}, "known: llama"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling 'yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_parameters": LINEAR_ROPE, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling 'yarn'"),
        ({"rope_parameters": LINEAR_ROPE | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 in its rope"),
        ({"rope_parameters": {"full_attention": LINEAR_ROPE}}, "full_attention=.* in its rope is not computed"),
        ({"rope_parameters": LINEAR_ROPE | {"factor": 0}}, "theta and factors are above 0"),
        ({"num_attention_heads": "many"}, "many"),
        ({"num_key_value_heads": 4}, "multiple of num_key_value_heads"),
    ],
)
def test_what_we_do_not_compute_is_refused_with_a_sentence(llama: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_config(edit_config(llama, **changes))


@pytest.mark.parametrize("mixed", [{}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [1], "norm_topk_prob": True}])
def test_the_shapes_of_a_net_with_experts_are_those_on_disk(tmp_path: Path, mixed: dict[str, Any]) -> None:
    wanted = Qwen3MoeConfig(**SIZES | {"num_hidden_layers": 4} | MOE_SIZES | mixed)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(wanted)
    wanted.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert config.norm_topk == wanted.norm_topk_prob
    shapes = config.parameter_shapes()
    on_disk: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        at, _, kind = name.rpartition("mlp.experts.")
        count, *shape = tensor.shape
        if not at:
            on_disk[name] = tuple(tensor.shape)
        elif kind == "gate_up_proj":  # fused in memory: [experts, 2 * moe_intermediate, hidden]
            half = (shape[0] // 2, shape[1])
            on_disk |= {f"{at}mlp.experts.{e}.{n}_proj.weight": half for e in range(count) for n in ("gate", "up")}
        else:
            on_disk |= {f"{at}mlp.experts.{e}.{kind}.weight": tuple(shape) for e in range(count)}
    assert shapes == on_disk


def test_how_many_experts_there_are_is_read_in_both_spellings(tmp_path: Path) -> None:
    Qwen3MoeConfig(**SIZES, **MOE_SIZES).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    count = raw.pop("num_local_experts", None) or raw.pop("num_experts")
    for spelling in ("num_experts", "num_local_experts"):
        (tmp_path / "config.json").write_text(json.dumps({**raw, spelling: count}))
        assert read_config(tmp_path).experts == 6
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"'num_experts'.* is missing"):
        read_config(tmp_path)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"num_experts": 6, "num_local_experts": 8}, "num_local_experts differ"),
        ({"num_experts": 6, "num_experts_per_tok": 7}, "must be 1 to num_experts=6"),
        ({"num_experts": 6, "decoder_sparse_step": 0}, "decoder_sparse_step=0 is no whole number of at least 1"),
    ]
    for changes, said in wrong:
        (tmp_path / "config.json").write_text(json.dumps(raw | changes))
        with pytest.raises(ConfigError, match=said):
            read_config(tmp_path)


def test_the_older_spelling_of_rope_scaling_means_the_same(llama: Path) -> None:
    new = read_config(edit_config(llama, rope_parameters=LINEAR_ROPE)).rope
    old = {"rope_parameters": None, "rope_theta": 50000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert read_config(edit_config(llama, **old)).rope == new


def test_T053_all_end_ids_of_both_config_files_count(llama: Path) -> None:
    edit_config(llama, eos_token_id=2)
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert read_config(llama).eos_ids == (7, 2)
    (llama / "generation_config.json").unlink()
    assert read_config(edit_config(llama, eos_token_id=[2, 7])).eos_ids == (2, 7)
    assert read_config(edit_config(llama, eos_token_id=None)).eos_ids == ()


@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_a_packed_linear_is_the_plain_one(bias: bool) -> None:
    weight, x, residual = torch.randn(40, 24), torch.randn(5, 24), torch.randn(5, 40)
    b = torch.randn(40) if bias else None
    plain = torch.nn.functional.linear(x, weight, b)
    before = residual.clone()
    linear = Linear(weight.clone(), b)
    torch.testing.assert_close(linear(x), plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(linear.add(x, residual.clone()), plain + before, atol=1e-5, rtol=1e-5)
    half = Linear(weight.bfloat16())
    torch.testing.assert_close(half(x.bfloat16()).float(), x @ weight.T, atol=0.2, rtol=0.05)


def test_T082_a_head_that_differs_from_the_embeddings_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    """Saved by a trainer that had untied them and left config.json as it was. An equal copy is merely redundant."""
    reference(CONFIGS["llama tied"]).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    shapes = read_config(tmp_path).parameter_shapes()
    save_file(
        tensors | {"lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors", metadata={"format": "pt"}
    )
    assert "lm_head.weight" not in load_tensors(tmp_path, shapes)
    assert load_policy(tmp_path, dtype="float32").vocabulary == len(embedding)
    save_file(tensors | {"lm_head.weight": embedding + 1e-3}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    says = r"lm_head\.weight and model\.embed_tokens\.weight differ, but config\.json ties them .*set tie_word_embeddings to false"
    for load in (lambda: load_tensors(tmp_path, shapes), lambda: load_policy(tmp_path, dtype="float32")):
        with pytest.raises(ConfigError, match=says):
            load()


def test_T082_shards_and_one_file_are_the_same_model_to_trainer_and_sampler(tmp_path: Path) -> None:
    model = reference(CONFIGS["qwen3"])
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="40KB")
    assert len(weight_files(tmp_path / "many")) > 2
    shapes = read_config(tmp_path / "one").parameter_shapes()
    one, many = (load_tensors(tmp_path / name, shapes) for name in ("one", "many"))
    trained = dict(load_policy(tmp_path / "many", dtype="float32").named_tensors())
    assert one.keys() == many.keys() == trained.keys()
    assert all(torch.equal(one[name], many[name]) and torch.equal(one[name], trained[name]) for name in one)
