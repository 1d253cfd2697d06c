"""Weights through the run folder as in disk.py, of which only what changed since the version before: for a folder on a network.

    manifest = DeltaSource(run_dir).publish(model.named_parameters(), version=3)     # RUN/weights/v3/
    sink = DeltaSink(run_dir)
    tensors = sink.receive(manifest)                                                  # keep the sink: it holds what the next one builds on

The first version is whole, each further one a set of differences (difference.py) to the one before, until all of them together take as much as
a whole one: then the next is whole again. A manifest names the versions that it builds on, from a whole one on, and these stay in the folder.
A server that holds one of them reads those after it, one that holds none (new, restarted, or its copy is damaged) reads all: nobody
has to be asked for anything. Both sides keep one version in files of their own on this machine (local_copy.py). Every byte that is read and every tensor
that results is checked by its digest. A version is complete or absent.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from areal.base.errors import WeightsRefused
from areal.weights.difference import applied, difference
from areal.weights.local_copy import LocalCopy
from areal.weights.shards import SHARD_BYTES, ShardWriter, TiedTensors, checked_entries, read_shards

_NAMES = re.compile(r"model-\d{5}\.safetensors")


@dataclass(frozen=True, slots=True)
class Link:
    """A version as it lies in the folder: whole where it is the first of its manifest, else differences to the one before."""

    version: int
    entries: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> Self:
        entries = tuple(checked_entries(manifest, "delta", _NAMES))
        return cls(manifest["version"], entries)

    @property
    def bytes(self) -> int:
        return sum(entry["bytes"] for entry in self.entries)

    @property
    def identity(self) -> tuple[int, *tuple[str, ...]]:
        """Of the content: the checksums stand for every byte."""
        return self.version, *(entry["checksum"] for entry in self.entries)

    def manifest(self) -> dict[str, Any]:
        return {"version": self.version, "files": [dict(entry) for entry in self.entries]}


class DeltaSource:
    """The writing side. One source per run folder."""

    def __init__(self, run_dir: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = run_dir.resolve() / "weights"
        self._shard_bytes = shard_bytes
        self._chains: dict[int, tuple[Link, ...]] = {}  # what each version builds on, and itself
        self._live: set[int] = set()  # not retired
        self._last: int | None = None  # what the next one may build on
        self._copy: LocalCopy | None = None  # of the last one
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for leftover in self._folder.glob(
            "v*"
        ):  # of a source that was killed: no server needs them, the next version is whole
            shutil.rmtree(leftover, ignore_errors=True)

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> dict[str, Any]:
        """See weights/base.py. Raises OSError with path and remedy when a disk is full."""
        former, base = self._base(version)
        aside, final = self._folder / f"v{version}.part", self._folder / f"v{version}"
        shutil.rmtree(aside, ignore_errors=True)
        copy = LocalCopy()
        try:
            entries = self._written(aside, tensors, copy, base)
            shutil.rmtree(final, ignore_errors=True)  # the same label again: only after the new set is complete
            os.rename(aside, final)
        except OSError as error:
            _give_up(copy, aside)
            raise OSError(
                error.errno,
                f"cannot publish weights version {version}: {error.strerror}; the former version stays. Make room there",
                error.filename or str(final),
            ) from error
        except BaseException:
            _give_up(copy, aside)
            raise
        if self._copy is not None:
            self._copy.remove()
        self._copy, self._last = copy, version
        link = Link(version, tuple(entries))
        self._chains[version] = (*former, link)
        self._live.add(version)
        self._sweep()
        before = [each.manifest() for each in former]
        return {"transfer": "delta", "path": str(final), **link.manifest(), "former": before}

    def retire(self, version: int) -> None:
        """It goes once no version that is left builds on it, and the next one will not."""
        self._live.discard(version)
        self._sweep()

    def close(self) -> None:
        """Remove every version, and the copy."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._copy is not None:
            self._copy.remove()

    def _base(self, version: int) -> tuple[tuple[Link, ...], dict[str, torch.Tensor] | None]:
        """What the next version builds on; nothing where it is to be whole. That frees what was only kept to be built on."""
        former = self._chains.get(self._last, ()) if self._last is not None else ()
        again = version in [link.version for link in former]
        if former and not again and sum(link.bytes for link in former[1:]) < former[0].bytes:
            assert self._copy is not None
            try:
                return former, self._copy.tensors()
            except WeightsRefused:  # somebody cleaned the temporary folder
                pass
        self._last = None
        self._sweep()
        return (), None

    def _written(
        self,
        aside: Path,
        tensors: Iterable[tuple[str, torch.Tensor]],
        copy: LocalCopy,
        base: Mapping[str, torch.Tensor] | None,
    ) -> list[dict[str, Any]]:
        aside.mkdir(mode=0o700)
        writer = ShardWriter(lambda number: aside / f"model-{number + 1:05d}.safetensors", self._shard_bytes)
        tied = TiedTensors()
        try:
            for name, tensor in tensors:
                if not tied.seen(tensor):
                    writer.add(name, tensor if base is None else difference(name, base.get(name), tensor))
                    copy.add(name, tensor)
            copy.close()
            return [entry for _, entry in writer.close()]
        except BaseException:
            writer.discard()
            raise

    def _sweep(self) -> None:
        kept = self._live | ({self._last} if self._last is not None else set())
        needed = {link.version for version in kept for link in self._chains[version]}
        for version in self._chains.keys() - kept:
            del self._chains[version]
        for folder in self._folder.glob("v*"):
            number = folder.name.removeprefix("v")
            if number.isdecimal() and int(number) not in needed:
                shutil.rmtree(folder, ignore_errors=True)


def _give_up(copy: LocalCopy, aside: Path) -> None:
    copy.remove()
    shutil.rmtree(aside, ignore_errors=True)


class DeltaSink:
    """The reading side, in the server. Any thread."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._held: tuple[Link, LocalCopy] | None = None
        self._receiving = threading.Lock()

    def receive(self, manifest: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """See weights/base.py. Reads RUN/weights/v<label>/ of the versions that the manifest names, nothing else (T111)."""
        links = self._links(manifest)
        with self._receiving:
            if self._held is not None:
                held, copy = self._held
                for place, link in enumerate(links):
                    if link.identity == held.identity:
                        try:
                            return self._taken(links[place + 1 :], copy.tensors())
                        except WeightsRefused:  # the copy is damaged, or what follows it: reading all of them tells
                            break
            return self._taken(links[1:], read_shards(self._place(links[0]), links[0].entries), first=links[0])

    def _links(self, manifest: Mapping[str, Any]) -> list[Link]:
        """From the whole version to the newest. Raises WeightsRefused for a manifest that names anything else than this folder."""
        newest, former = Link.of(manifest), manifest.get("former")
        if manifest["path"] != str(self._place(newest)):
            raise WeightsRefused(
                "load", f"weights manifest points to {manifest['path']!r}, not to {self._place(newest)}; it is not read"
            )
        if not isinstance(former, list) or not all(isinstance(each, Mapping) for each in former):
            raise WeightsRefused(
                "load", f"this is not a manifest of the delta transfer: it builds on {former!r:.200}; publish again"
            )
        links = [*(Link.of({**manifest, "version": None, **each}) for each in former), newest]
        for link in links:
            if self._place(link).is_symlink():
                raise WeightsRefused("load", f"weights {self._place(link)} is a link; it is not read")
        return links

    def _place(self, link: Link) -> Path:
        return self._run_dir.resolve() / "weights" / f"v{link.version}"  # resolved anew, see DiskSink

    def _taken(
        self, links: list[Link], base: Mapping[str, torch.Tensor], first: Link | None = None
    ) -> dict[str, torch.Tensor]:
        """`base` with the differences of these versions, which is what is held from then on. first: the version of `base`, where that
        is not held yet."""
        newest = links[-1] if links else first
        if newest is None:
            return dict(base)
        steps = [read_shards(self._place(link), link.entries) for link in links]
        copy = LocalCopy()
        try:
            for name in steps[-1] if steps else base:
                tensor = base.get(name)
                for step in steps:
                    tensor = applied(tensor, step[name]) if name in step else None
                assert tensor is not None
                copy.add(name, tensor)
            copy.close()
            tensors = copy.tensors()
        except BaseException:
            copy.remove()
            raise
        if self._held is not None:
            self._held[1].remove()
        self._held = newest, copy
        return tensors
