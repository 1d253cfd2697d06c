"""Our decoder and the tensors of a model folder: every tensor has its place, there and back bit for bit, and says the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from areal.base.errors import ConfigError
from areal.engine.archon import load_archon
from areal.engine.model import load_policy
from areal.engine.parallel.world import World
from areal.models.decoder import Decoder
from areal.models.dense import DenseNet, causal
from areal.models.dense_config import DenseConfig, read_config
from areal.models.hf_names import EMBEDDING, HEAD, parts_of, to_disk
from areal.models.hf_weights import load_tensors
from tests.models.hf_parts import from_disk
from tests.models.test_nets import CONFIGS, reference, save


def decoder_of(config: DenseConfig, tensors: dict[str, Tensor], layers: range | None = None) -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(config, layers)
    given = {
        name: from_disk(parts_of(name, config), tuple(place.shape), tensors.__getitem__)
        for name, place in decoder.state_dict().items()
    }
    decoder.load_state_dict(given, assign=True)
    return decoder


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_the_decoder_says_what_transformers_says_and_gives_back_the_bytes_it_was_made_of(
    name: str, tmp_path: Path
) -> None:
    model = reference(CONFIGS[name])
    folder = save(model, tmp_path / "net")
    config = read_config(folder)
    tensors = load_tensors(folder, config.parameter_shapes())
    decoder = decoder_of(config, tensors)

    ids = torch.randint(0, 97, (200,), generator=torch.Generator().manual_seed(1))
    assert decoder.lm_head is not None
    ours = decoder.lm_head(decoder(ids, torch.arange(200), attend))
    torch.testing.assert_close(ours, model(ids[None]).logits[0], atol=1e-5, rtol=1e-5)

    back = [
        pair
        for own, parameter in decoder.state_dict().items()
        if not (own == HEAD and config.tied)
        for pair in to_disk(parts_of(own, config), parameter)
    ]
    assert Counter(on_disk for on_disk, _ in back) == Counter(tensors.keys())
    assert all(torch.equal(tensor, tensors[on_disk]) for on_disk, tensor in back)


def test_T082_a_tied_head_that_stands_on_a_stage_of_its_own_is_the_embedding(tmp_path: Path) -> None:
    folder = save(reference(CONFIGS["qwen2"]), tmp_path / "net")
    config = read_config(folder)
    tensors = load_tensors(folder, config.parameter_shapes())
    last = decoder_of(config, tensors, range(1, 2))
    assert last.model.embed_tokens is None
    assert last.lm_head is not None
    assert torch.equal(last.lm_head.weight, tensors[EMBEDDING])
    assert parts_of(HEAD, config) == {EMBEDDING: ()}


@torch.inference_mode()
def test_a_bias_on_the_choice_of_experts_goes_from_training_to_sampling(tmp_path: Path) -> None:
    """transformers' qwen3_moe knows none: it would choose other experts and say nothing."""
    folder = save(reference(CONFIGS["qwen3_moe"]), tmp_path / "net")
    config = read_config(folder)
    plain = load_tensors(folder, config.parameter_shapes())
    biases = {
        name: torch.linspace(-1, 1, *shape) * (1 if ".0." in name else -1)
        for name, shape in config.router_bias_shapes().items()
    }
    assert len(biases) == 2
    save_file(plain | biases, folder / "model.safetensors")
    trained = load_archon(folder, World.alone(), dtype="float32")
    assert {name: tensor for name, tensor in trained.named_tensors() if "bias" in name}.keys() == biases.keys()
    served = DenseNet.load(folder, dtype=torch.float32, device=torch.device("cpu"), positions=64)
    ids, positions = torch.arange(50), torch.arange(50)
    [stage] = trained.own_stages()
    assert stage.decoder.lm_head is not None
    ours = stage.decoder.lm_head(stage.decoder(ids, positions, attend))
    sampled = served.logits(served.forward(ids, positions, causal(config)))
    torch.testing.assert_close(sampled, ours, atol=1e-4, rtol=0)
    without = DenseNet.from_tensors(config, plain, dtype=torch.float32, device=torch.device("cpu"), positions=64)
    assert (without.logits(without.forward(ids, positions, causal(config))) - ours).abs().max() > 1e-2
    with pytest.raises(ConfigError, match=r"knows no model\.layers\.0\.mlp\.gate\.e_score_correction_bias"):
        load_policy(folder, dtype="float32")
