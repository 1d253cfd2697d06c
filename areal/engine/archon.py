"""Our own net: the decoder of models/decoder.py with an output head, made to be cut along every dimension.

    net = load_archon(model_dir, world, dtype="float32")
    logprobs, entropy = net(packed)

The same numbers as the same folder's model in transformers; unlike that it knows what a layer is made of, so tensor, pipeline, context and
expert parallelism have their places. Neighbours: model.py (any other model, data parallelism only), parallel/apply.py (the cuts).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from areal.algorithms.logprobs import token_logprobs
from areal.engine.batch import PackedBatch
from areal.engine.net import DTYPES, Net, attend_blocks, without_twins
from areal.engine.parallel.world import World
from areal.models.decoder import Attend, Decoder
from areal.models.dense_config import read_config
from areal.models.hf_weights import load_tensors
from areal.models.value_head import ValueHead


class ArchonNet(Net):
    """A decoder and what it says of each packed prediction: a log-prob, or with a value head a value."""

    def __init__(self, decoder: Decoder, files: dict[str, bytes], value_head: ValueHead | None = None) -> None:
        super().__init__()
        self.decoder = decoder
        self.value_head = value_head
        self._files = files

    @property
    def vocabulary(self) -> int:
        return self.decoder.config.vocab_size

    def forward(self, packed: PackedBatch) -> tuple[Tensor, Tensor]:
        packed = packed.to(self.device)
        hidden = self.decoder(packed.ids, packed.positions, attend_to(packed)).index_select(0, packed.source)
        if self.value_head is not None:
            values: Tensor = self.value_head(hidden)
            return values, torch.zeros_like(values)
        assert self.decoder.lm_head is not None
        return token_logprobs(hidden, self.decoder.lm_head.weight, packed.target, packed.temperature)

    def layers(self) -> list[nn.Module]:
        return list(self.decoder.blocks())

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.decoder.named_parameters()
        if self.value_head is not None:
            yield from ((f"value_head.{name}", p) for name, p in self.value_head.named_parameters())

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from without_twins(self.decoder)
        if self.value_head is not None:
            yield from (
                (f"value_head.{name}", tensor.detach()) for name, tensor in self.value_head.state_dict().items()
            )

    def config_files(self) -> dict[str, bytes]:
        return dict(self._files)


def attend_to(packed: PackedBatch) -> Attend:
    """Attention of one micro-batch's tokens with each other, as the decoder calls it."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key, value = (each.transpose(0, 1)[None] for each in (q, k, v))
        return attend_blocks(query, key, value, packed.blocks)[0].transpose(0, 1)

    return attend


def load_archon(model_dir: str | os.PathLike[str], world: World, *, dtype: str, critic: bool = False) -> ArchonNet:
    """The model of this folder, ready to be cut. critic: with a value head in the place of the vocabulary.

    Raises ConfigError where the folder holds no family that models/dense_config.py knows, or the layout does not fit it."""
    folder = Path(model_dir)
    config = read_config(folder)
    with torch.device("meta"):
        decoder = Decoder(config)
    tensors = load_tensors(folder, config.parameter_shapes())
    if config.tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    decoder.load_state_dict({name: tensor.to(DTYPES[dtype]) for name, tensor in tensors.items()}, assign=True)
    if config.tied and decoder.lm_head is not None and decoder.model.embed_tokens is not None:
        decoder.lm_head.weight = decoder.model.embed_tokens.weight
    if critic:
        decoder.lm_head = None
    decoder.to(world.device)
    for p in decoder.parameters():
        p.requires_grad_()
    files = {name: (folder / name).read_bytes() for name in ("config.json",)}
    return ArchonNet(decoder, files, ValueHead(config.hidden).to(world.device) if critic else None)
