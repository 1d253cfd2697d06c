"""The model that a server was started from, beside which adapters are published: it stays, and each version is made of it anew.

    base = BaseModel(folder)
    tensors = base.with_adapter(received, manifest["adapter"])      # what a whole publication would have brought

Its tensors are mapped from the folder's files, so that beside the served weights it costs pages that the system may drop. A version is
never made of the one before, so nothing drifts. Used by runner.py (versions) and server.py (the adapter that a server starts with).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from areal.base.errors import ConfigError, ShapeError, WeightsRefused
from areal.models.adapter import Adapter, merged_tensors, read_adapter
from areal.models.dense_config import read_config
from areal.models.fingerprint import fingerprint
from areal.models.hf_weights import load_tensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class _Beside(msgspec.Struct, frozen=True):
    """What a manifest says of an adapter: how much it counts, and of which base in which dtype it was trained."""

    scale: Annotated[float, Meta(gt=0)]
    dtype: str
    base: str


class BaseModel:
    """Read when the first adapter comes. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """By their names in the folder, in the files' dtype. Raises ConfigError where they cannot be read."""
        config = read_config(self.folder)
        return load_tensors(self.folder, config.parameter_shapes(), config.router_bias_shapes())

    @cached_property
    def _print(self) -> str:
        return fingerprint(self.folder)["weights"]

    def with_adapter(self, received: Mapping[str, Tensor], beside: Any) -> dict[str, Tensor]:
        """beside: from the manifest, so nothing is known of it. Raises WeightsRefused where it stands beside another base, ShapeError where it does not fit
        this one."""
        try:
            facts = msgspec.convert(beside, _Beside)
        except msgspec.ValidationError as error:
            raise WeightsRefused(
                "load", f"the manifest says of the adapter {beside!r:.200} ({error}); publish it again"
            ) from None
        if facts.dtype not in DTYPES or facts.base != self._print:
            raise WeightsRefused(
                "load",
                f"the adapter was trained beside other weights than those in {self.folder}; start the server from the trainer's own actor.path",
            )
        return merged_tensors(self.tensors, Adapter(received, scale=facts.scale), DTYPES[facts.dtype])

    def with_saved(self, folder: Path, dtype: str) -> dict[str, Tensor]:
        """With the adapter that a checkpoint has. dtype: of the net that it was trained in. Raises ConfigError where it does not fit."""
        try:
            return merged_tensors(self.tensors, read_adapter(folder), DTYPES[dtype])
        except ShapeError as error:
            raise ConfigError(
                f"{folder}: {error}; start the server from the model that it was trained beside"
            ) from error
