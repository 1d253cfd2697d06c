"""What a checkpoint has of a net with an adapter: the adapter as a folder that peft loads and, for people, the model that it makes of its base.

    base = AdapterBase(lora=lora, targets=("q_proj",), files=files, parameters=parameters, dtypes=dtypes, dtype="float32")
    (folder / CONFIG).write_bytes(base.config())                    # beside the tensors, whose names are peft's
    write_merged(path, base, adapter)                               # model.safetensors, one tensor in memory at a time

The base itself is not copied: it lies in its own folder, and its fingerprint says whether that still holds what the adapter was trained beside.
Neighbours: lora.py (the net), checkpoint.py (the folder), models/adapter.py (names and arithmetic).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from areal.base.errors import CheckpointError, ConfigError
from areal.config.engine import Dtype, LoraConfig
from areal.models.adapter import Adapter
from areal.models.hf_weights import WeightFiles
from areal.weights.tensor_file import write_tensor_stream

_DIFFER = {"rank": "rank", "alpha": "alpha", "targets": "maps with an adapter"}


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """lora: what was asked for. targets: the kinds of maps that have an adapter. files: of the base. parameters: name on disk -> what transformers
    calls it; dtypes: name on disk -> what it is trained beside as; dtype: of the net. print: of the weights in the files when they were read
    (models/fingerprint.py)."""

    lora: LoraConfig
    targets: tuple[str, ...]
    files: WeightFiles
    parameters: Mapping[str, str]
    dtypes: Mapping[str, torch.dtype]
    dtype: Dtype
    print: str

    @property
    def scale(self) -> float:
        return self.lora.alpha / self.lora.rank

    def facts(self) -> dict[str, Any]:
        """For a checkpoint's state: what has to be the same where it is gone on from."""
        return {"rank": self.lora.rank, "alpha": self.lora.alpha, "targets": list(self.targets), "base": self.print}

    def published(self) -> dict[str, Any]:
        """For a manifest: what a server needs beside the adapter, and by which it knows that its base is this one."""
        return {"scale": self.scale, "dtype": self.dtype, "base": self.print}

    def config(self) -> bytes:
        """peft's adapter_config.json."""
        found = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(self.files.folder),
            "r": self.lora.rank,
            "lora_alpha": self.lora.alpha,
            "lora_dropout": 0.0,
            "target_modules": list(self.targets),
            "bias": "none",
            "inference_mode": True,
        }
        return json.dumps(found, indent=1).encode() + b"\n"


def check_same_adapter(path: Path, saved: Mapping[str, Any] | None, base: AdapterBase | None) -> None:
    """Whether a checkpoint with these facts may be gone on from. Raises ConfigError with what differs."""
    own = None if base is None else base.facts()
    if saved == own:
        return
    if saved is None or own is None:
        how, remedy = ("without", "out") if saved is None else ("with", "back in")
        raise ConfigError(
            f"{path} was trained {how} actor.lora: take the section {remedy}, or begin another run (trial_name) with actor.path set to a "
            "saved model"
        )
    for key, what in _DIFFER.items():
        if saved.get(key) != own[key]:
            raise ConfigError(
                f"{path} has an adapter of another kind: {what} {saved.get(key)}, and actor.lora now says {own[key]}; set it back, or begin "
                "another run (trial_name) with actor.path set to a saved model"
            )
    raise ConfigError(
        f"{path} holds an adapter of other weights than those in {base.files.folder if base else ''}; put the model that the run began with back"
    )


def write_merged(path: Path, base: AdapterBase, adapter: Adapter) -> dict[str, Any]:
    """The base with what was learned, in the dtypes it was trained in; on disk when it returns the file's entry."""
    metas = {
        name: torch.empty(base.files.shapes[name], dtype=dtype, device="meta") for name, dtype in base.dtypes.items()
    }
    return write_tensor_stream(path, _merged(base, adapter), metas)


def _merged(base: AdapterBase, adapter: Adapter) -> Iterator[tuple[str, Tensor]]:
    for name, dtype in base.dtypes.items():
        try:
            with (
                base.files.opened() as read
            ):  # one at a time: what was read of an open file counts as memory of this process
                merged = adapter.on(base.parameters[name], read(name, ()).to(dtype)).to(dtype)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"the model that the adapter stands beside cannot be read any more ({base.files.folder}: {error}); put it back"
            ) from error
        yield name, merged
