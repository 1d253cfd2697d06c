"""What our decoder calls a parameter and what lies on disk for it; engine/parallel/pieces.py goes the way back.

    parts = parts_of("model.layers.3.mlp.experts.gate_proj", config)     # {"model.layers.3.mlp.experts.0.gate_proj.weight": (0,), ...}
    for on_disk, tensor in to_disk(parts, parameter): ...                # views

Parameters have Hugging Face's names and lie on disk as they are, with two exceptions: the experts of a layer are stacked in memory and each by
itself on disk, and a tied output head has no tensor of its own. Pure: nothing is opened here. Neighbours: decoder.py (the names),
hf_weights.py (the files), dense_config.py (what is on disk: parameter_shapes).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import Tensor

from areal.models.dense_config import DenseConfig

Place = tuple[int | slice, ...]
"""Where a tensor on disk lies in a parameter: an index of it, () for all of it."""

Parts = Mapping[str, Place]
"""Name on disk -> place. The places cover the parameter, each element once."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_STACKED = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate|up|down)_proj")


def parts_of(name: str, config: DenseConfig) -> Parts:
    """Of the decoder's parameter of this name."""
    if stacked := _STACKED.fullmatch(name):
        at, kind = stacked.groups()
        return {f"{at}.{expert}.{kind}_proj.weight": (expert,) for expert in range(config.experts)}
    return {EMBEDDING if name == HEAD and config.tied else name: ()}


def part_shape(place: Place, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the tensor on disk that lies at this place of a parameter of that shape."""
    cut = [len(range(size)[at]) for at, size in zip(place, shape, strict=False) if isinstance(at, slice)]
    return (*cut, *shape[len(place) :])


def to_disk(parts: Parts, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What is written of it, as views."""
    yield from ((name, parameter[place] if place else parameter) for name, place in parts.items())
