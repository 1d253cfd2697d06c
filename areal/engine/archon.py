"""Our own net: the decoder of models/decoder.py with an output head, made to be cut along every dimension.

    net = load_archon(model_dir, world, dtype="float32")
    logprobs, entropy = net(packed)

The same numbers as the same folder's model in transformers; unlike that it knows what a layer is made of, so tensor, pipeline, context and
expert parallelism have their places. Neighbours: model.py (any other model; planned.py has its cuts), parallel/apply.py (the cuts).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from areal.algorithms.logprobs import Part, token_logprobs
from areal.engine.batch import PackedBatch
from areal.engine.net import DTYPES, Net, without_twins
from areal.engine.parallel.context import Piece, Tokens
from areal.engine.parallel.pieces import fill, materialise
from areal.engine.parallel.schedule import stage_layers
from areal.engine.parallel.world import World, local
from areal.models.decoder import Decoder
from areal.models.dense_config import DenseConfig, read_config
from areal.models.experts import Router, Routing
from areal.models.hf_names import EMBEDDING, HEAD, Parts, parts_of
from areal.models.hf_weights import WeightFiles
from areal.models.value_head import ValueHead


class Stage(nn.Module):
    """Consecutive layers; the first stage begins with ids, the last ends in what is said of each packed prediction: a log-prob, or
    with a value head a value. tokens: how they lie on the ranks of c and t; part: which rows of the output head are here (None: all)."""

    def __init__(self, decoder: Decoder, value_head: ValueHead | None = None) -> None:
        super().__init__()
        self.decoder = decoder
        self.value_head = value_head
        self.tokens = Tokens()
        self.part: Part | None = None

    @property
    def first(self) -> bool:
        return self.decoder.model.embed_tokens is not None

    @property
    def last(self) -> bool:
        return self.decoder.model.norm is not None

    def forward(self, packed: PackedBatch, hidden: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Hidden states for the next stage, or of the last stage outputs [m] and entropies [m]. hidden: from the stage before; none for the first."""
        piece = self.tokens.piece(packed)
        routing = Routing(weight=piece.shared_by)
        x = self.decoder(piece.ids if hidden is None else hidden, piece.positions, piece.attend, routing)
        return self._outputs(x.index_select(0, piece.source), packed, piece) if self.last else x

    def place_for(self, packed: PackedBatch) -> Tensor:
        """Room for the hidden states that come from the stage before."""
        weight = next(self.decoder.parameters())
        tokens, width = self.tokens.between(packed), self.decoder.config.hidden
        return torch.empty(tokens, width, dtype=weight.dtype, device=packed.ids.device)

    def _outputs(self, hidden: Tensor, packed: PackedBatch, piece: Piece) -> tuple[Tensor, Tensor]:
        if self.value_head is not None:
            values: Tensor = self.tokens.joined(self.value_head(hidden), piece)
            return values, torch.zeros_like(values)
        assert self.decoder.lm_head is not None
        targets, temperatures = piece.of(packed.target), piece.of(packed.temperature)
        logprobs, entropy = token_logprobs(
            hidden, local(self.decoder.lm_head.weight), targets, temperatures, part=self.part
        )
        return self.tokens.joined(logprobs, piece), self.tokens.joined(entropy, piece)


class ArchonNet(Net):
    """The stages that this process has: one with all layers, or of a pipeline those whose turn is here."""

    def __init__(self, config: DenseConfig, stages: Sequence[Stage], files: WeightFiles) -> None:
        """stages: without weights; they lie in the files."""
        super().__init__()
        self.config = config
        self.stages = nn.ModuleList(stages)
        self._files = files
        self._config_json = (files.folder / "config.json").read_bytes()
        held = {name for stage in stages for name, _ in stage.decoder.named_parameters()}
        apart = config.tied and not {EMBEDDING, HEAD} <= held and not (stages[0].first and stages[-1].last)
        self.shared = {name: EMBEDDING for name in (EMBEDDING, HEAD) if apart and name in held}

    @property
    def vocabulary(self) -> int:
        return self.config.vocab_size

    @property
    def routed(self) -> tuple[int, int]:
        return (self.config.layers, self.config.experts) if self.config.experts else (0, 0)

    def forward(self, packed: PackedBatch) -> tuple[Tensor, Tensor]:
        """Where all layers are here."""
        [stage] = self.stages
        outputs: tuple[Tensor, Tensor] = stage(packed.to(self.device))
        return outputs

    def fill(self, device: torch.device) -> None:
        materialise(self, device)
        for stage in self.own_stages():
            for name, tensor in without_twins(stage.decoder):
                fill(tensor, self.parts(name), self._files)

    def own_stages(self) -> list[Stage]:
        """In order."""
        return [stage for stage in self.stages if isinstance(stage, Stage)]

    def roots(self) -> list[nn.Module]:
        return list(self.stages)

    def layers(self) -> list[nn.Module]:
        return [block for stage in self.own_stages() for block in stage.decoder.blocks()]

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for stage in self.own_stages():
            yield from stage.decoder.named_parameters()
            if stage.value_head is not None:
                yield from ((f"value_head.{name}", p) for name, p in stage.value_head.named_parameters())

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for stage in self.own_stages():
            named = without_twins(stage.decoder)
            yield from (pair for pair in named if not (pair[0] == HEAD and self.config.tied))
            if stage.value_head is not None:
                yield from ((f"value_head.{name}", p) for name, p in without_twins(stage.value_head))

    def parts(self, name: str) -> Parts:
        return parts_of(name, self.config)

    def config_files(self) -> dict[str, bytes]:
        return {"config.json": self._config_json}


def load_archon(
    model_dir: str | os.PathLike[str], world: World, *, dtype: str, critic: bool = False, chunks: int = 1
) -> ArchonNet:
    """The model of this folder. Of several processes it is to be cut, and then filled. critic: with a value head in the place of the
    vocabulary. chunks: pipeline stages per rank.

    Raises ConfigError where the folder holds no family that models/dense_config.py knows, or the layout does not fit it."""
    folder = Path(model_dir)
    config = read_config(folder)
    files = WeightFiles(folder)
    biases = {name: shape for name, shape in config.router_bias_shapes().items() if name in files.shapes}
    files.check(config.parameter_shapes() | biases)
    if config.tied:
        files.refuse_untied((EMBEDDING, HEAD))
    pieces = stage_layers(config.layers, world.size("p") * chunks)
    own = pieces[world.index("p") :: world.size("p")]
    stages = [_stage(config, layers, DTYPES[dtype], critic=critic, biased=bool(biases)) for layers in own]
    net = ArchonNet(config, stages, files)
    if world.mesh is None:
        net.fill(world.device)
    return net


def _stage(config: DenseConfig, layers: range, dtype: torch.dtype, *, critic: bool, biased: bool) -> Stage:
    """biased: the folder's routers have biases."""
    with torch.device("meta"):
        decoder = Decoder(config, layers).to(dtype)
    for module in decoder.modules():
        if biased and isinstance(module, Router):
            module.add_bias()
    last = decoder.lm_head is not None
    if critic:
        decoder.lm_head = None
    return Stage(decoder, ValueHead(config.hidden) if critic and last else None)
