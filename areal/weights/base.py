"""How a version travels from the ranks to the backends of a run. Source on the training side, Sink on the serving side.

    manifest = source.publish(named_tensors, version)      # in the rank
    tensors = sink.receive(manifest)                       # in the server; verified before anything is swapped
    source.retire(older_version)

A manifest is a small JSON object: {"transfer": name, "version": int, "path": folder, "files": [{"name", "bytes", "checksum"}]}.
Names are Hugging Face parameter names, tied weights once. Transfers: table in weights/__init__.py (shared_memory, disk,
delta, whose manifests also name the versions that they build on).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch


class Source(Protocol):
    """Publishes one set of weights at a time; complete or not at all (write aside, rename)."""

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> dict[str, Any]:
        """Returns the manifest. Raises OSError with the path when the medium is full; the former version stays."""
        ...

    def retire(self, version: int) -> None:
        """Free what `publish(version)` wrote, as soon as no other version builds on it; unknown versions are ignored."""
        ...

    def close(self) -> None:
        """Free everything this source wrote. Servers keep what they have mapped."""
        ...


class Sink(Protocol):
    """Receives what a Source published. One for the life of a server: it may hold what the next version builds on."""

    def receive(self, manifest: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Name -> tensor, complete and checked against the manifest. Raises WeightsRefused naming what differs."""
        ...
