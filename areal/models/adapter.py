"""A LoRA adapter outside of the net that trains it: its names, and the model that it makes of its base (arXiv:2106.09685).

    adapter = Adapter(tensors, scale=2.0)              # {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": [r, in], ...}
    merged = adapter.on("model.layers.0.self_attn.q_proj.weight", weight)      # weight + scale * B @ A, in float32
    served = merged_tensors(base, adapter, dtype)      # every tensor of the base; those that the adapter knows nothing of as they are

Names and files are peft's, so that what is published or saved loads there too. A merged weight is always made of the base and never of an earlier merged
one: nothing drifts, however many versions there were. No peft here: a server needs none. Used by engine/lora.py (trains it),
engine/adapter_files.py (saves it), inference/native/base_model.py (serves it).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from areal.base.errors import ConfigError, ShapeError

FOLDER = "adapter"
"""In a checkpoint."""
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"

_PREFIX = "base_model.model."
_NAME = re.compile(rf"{re.escape(_PREFIX)}(.+)\.lora_([AB])\.weight")


def adapter_name(module: str, half: str) -> str:
    """What A or B (`half`) of a linear map is called outside."""
    return f"{_PREFIX}{module}.lora_{half}.weight"


class Adapter:
    """The pairs of an adapter, by the name of the weight that they change."""

    def __init__(self, tensors: Mapping[str, Tensor], *, scale: float) -> None:
        """Raises ShapeError unless they are pairs of A [r, in] and B [out, r] of finite numbers."""
        halves: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            found = _NAME.fullmatch(name)
            if found is None or tensor.dim() != 2 or not tensor.is_floating_point():
                raise ShapeError(f"{name} {list(tensor.shape)} is no matrix of a LoRA adapter")
            if not bool(torch.isfinite(tensor).all()):
                raise ShapeError(f"{name} holds NaN or infinity; the training step before it went wrong")
            halves.setdefault(f"{found[1]}.weight", {})[found[2]] = tensor
        for name, pair in halves.items():
            if len(pair) != 2 or pair["A"].shape[0] != pair["B"].shape[1]:
                raise ShapeError(
                    f"the adapter of {name} is no pair: { ({key: list(t.shape) for key, t in pair.items()}) }"
                )
        if not halves:
            raise ShapeError("the adapter is empty")
        self.scale = scale
        self.pairs = {name: (pair["A"], pair["B"]) for name, pair in halves.items()}

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ShapeError unless each pair fits a weight [out, in] of these."""
        for name, (a, b) in self.pairs.items():
            if shapes.get(name) != (b.shape[0], a.shape[1]):
                raise ShapeError(
                    f"the adapter changes {name} by [{b.shape[0]}, {a.shape[1]}], the model has {shapes.get(name)}; it belongs to another model"
                )

    def on(self, name: str, weight: Tensor) -> Tensor:
        """The weight with what was learned: float32 where the adapter changes it, else itself."""
        if name not in self.pairs:
            return weight
        a, b = (half.to(weight.device, torch.float32) for half in self.pairs[name])
        return torch.addmm(weight.float(), b, a, alpha=self.scale)


@torch.no_grad()
def merged_tensors(base: Mapping[str, Tensor], adapter: Adapter, dtype: torch.dtype) -> dict[str, Tensor]:
    """dtype: in which the base was trained on; its numbers are taken as they were there. Raises ShapeError where they do not fit together."""
    adapter.check({name: tuple(tensor.shape) for name, tensor in base.items()})
    return {name: adapter.on(name, tensor.to(dtype)) for name, tensor in base.items()}


def read_adapter(folder: Path) -> Adapter:
    """Of a folder as peft writes it. Raises ConfigError where there is none, or one of a kind that is not merged here."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        if config.get("use_rslora") or config.get("use_dora") or config.get("rank_pattern") or rank < 1:
            raise ConfigError(f"{folder} holds an adapter that is no plain LoRA; name one that areal saved")
        return Adapter(load_file(folder / WEIGHTS), scale=alpha / rank)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError, ShapeError) as error:
        raise ConfigError(
            f"{folder} holds no LoRA adapter that can be read ({error}); use another checkpoint"
        ) from error
