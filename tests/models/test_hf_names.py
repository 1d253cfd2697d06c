"""Our decoder and the tensors of a model folder: every tensor has its place, there and back bit for bit, and says the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from areal.models.decoder import Decoder
from areal.models.dense_config import DenseConfig, read_config
from areal.models.hf_names import EMBEDDING, HEAD, from_disk, parts_of, to_disk
from areal.models.hf_weights import load_tensors
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
