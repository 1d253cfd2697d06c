"""Weights through the run folder: slower than /dev/shm, needs no memory, works wherever the folder is shared.

    manifest = DiskSource(run_dir).publish(model.named_parameters(), version=3)     # RUN/weights/v3/
    tensors = DiskSink(run_dir).receive(manifest)

A version is a folder of safetensors files (`model.safetensors`, or several with `model.safetensors.index.json` beyond 4 GB),
so it also loads with any safetensors tool. Complete or absent (folder renamed into place). Not fsync'd: it is a transfer,
checkpoints are engine/checkpoint.py's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from areal.base.errors import WeightsRefused
from areal.weights.shards import SHARD_BYTES, checked_entries, read_shards, write_shards

_NAMES = re.compile(r"model(-\d{5})?\.safetensors")


class DiskSource:
    """The writing side. One source per run folder."""

    def __init__(self, run_dir: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = run_dir.resolve() / "weights"
        self._shard_bytes = shard_bytes
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for leftover in self._folder.glob("*.part"):  # of a source that was killed while publishing
            shutil.rmtree(leftover, ignore_errors=True)

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> dict[str, Any]:
        """See weights/base.py. Raises OSError with path and remedy when the disk is full."""
        aside, final = self._folder / f"v{version}.part", self._folder / f"v{version}"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir(mode=0o700)
            written = write_shards(lambda k: aside / f"model-{k + 1:05d}.safetensors", tensors, self._shard_bytes)
            entries = self._named(aside, [entry for _, entry in written])
            shutil.rmtree(final, ignore_errors=True)  # the same label again: only after the new set is complete
            os.rename(aside, final)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise OSError(
                error.errno,
                f"cannot publish weights version {version}: {error.strerror}; the former version stays. Make room there",
                str(final),
            ) from error
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        return {"transfer": "disk", "version": version, "path": str(final), "files": entries}

    @staticmethod
    def _named(folder: Path, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """One file gets the usual name, several get the usual index."""
        if len(entries) == 1:
            os.rename(folder / entries[0]["name"], folder / "model.safetensors")
            return [entries[0] | {"name": "model.safetensors"}]
        names: dict[str, str] = {}
        for entry in entries:
            with safe_open(folder / entry["name"], framework="pt") as file:
                names |= dict.fromkeys(file.keys(), entry["name"])
        index = {"metadata": {"total_size": sum(entry["bytes"] for entry in entries)}, "weight_map": names}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return entries

    def retire(self, version: int) -> None:
        shutil.rmtree(self._folder / f"v{version}", ignore_errors=True)

    def close(self) -> None:
        """Remove every version: transfers end with the run, checkpoints stay elsewhere."""
        shutil.rmtree(self._folder, ignore_errors=True)


class DiskSink:
    """The reading side, in the server."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def receive(self, manifest: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """See weights/base.py. Reads RUN/weights/v<label>/, nothing else (T111)."""
        entries = checked_entries(manifest, "disk", _NAMES)
        # Resolved anew: what the folder's name leads to may change while the server lives, as when its file system is mounted late.
        expected = self._run_dir.resolve() / "weights" / f"v{manifest['version']}"
        if manifest["path"] != str(expected) or expected.is_symlink():
            raise WeightsRefused(
                "load", f"weights manifest points to {manifest['path']!r}, not to {expected}; it is not read"
            )
        return read_shards(expected, entries)
