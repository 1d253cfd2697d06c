"""Weights through /dev/shm: the transfer of one host. Written once, mapped by every server, nothing copied.

    manifest = SharedMemorySource(run_dir).publish(model.named_parameters(), version=3)
    tensors = SharedMemorySink(run_dir).receive(manifest)

Files are `areal-<run>.<pid>-v<label>.safetensors`, mode 0600; run = a hash of the run folder, pid = the source's. They are
removed by `retire`, by `close` and at interpreter exit; a source that was killed leaves them to `remove_leftovers`, which
every new source calls and which goes by a lock that only a living source holds (a pid may be another's by now).
Limits: one host, and the memory counts as the run's: one version, since the one before is retired first (rollout/weights.py).
"""

from __future__ import annotations

import fcntl
import os
import re
import weakref
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from areal.base.errors import ConfigError, WeightsRefused
from areal.weights.shards import checked_entries, read_shards, write_shards

FOLDER = Path("/dev/shm")
_PREFIX = "areal-"


def run_prefix(run_dir: Path) -> str:
    """What the names of one run's files begin with."""
    return _PREFIX + sha256(str(run_dir.resolve()).encode()).hexdigest()[:16] + "."


def remove_leftovers(folder: Path = FOLDER) -> list[Path]:
    """Delete weights whose source no longer lives, of any run of this user. Returns what was deleted."""
    removed = []
    for lock in folder.glob(f"{_PREFIX}*.lock"):
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # another user's, or just removed by its owner
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # its source lives
            continue
        else:
            for path in [*folder.glob(f"{lock.stem}-v*"), lock]:
                path.unlink(missing_ok=True)
                removed.append(path)
        finally:
            os.close(descriptor)
    return removed


def _remove(folder: Path, stem: str, lock: int, pid: int) -> None:
    if os.getpid() != pid:  # a forked child must not delete its parent's weights
        return
    for path in [*folder.glob(f"{stem}-v*"), folder / f"{stem}.lock"]:
        path.unlink(missing_ok=True)
    os.close(lock)


class SharedMemorySource:
    """The writing side, in the rank. One per process and run."""

    def __init__(self, run_dir: Path, folder: Path = FOLDER) -> None:
        if not folder.is_dir():
            raise ConfigError(f"this system has no {folder}: set weights.transfer=disk")
        remove_leftovers(folder)
        self._folder = folder
        self._stem = f"{run_prefix(run_dir)}{os.getpid()}"
        lock = self._take_lock(folder / f"{self._stem}.lock")
        self._close = weakref.finalize(self, _remove, folder, self._stem, lock, os.getpid())

    @staticmethod
    def _take_lock(path: Path) -> int:
        """Loops while a concurrent remove_leftovers deletes the file between its creation and our lock."""
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.exists() and path.stat().st_ino == os.fstat(descriptor).st_ino:
                    return descriptor
            except BlockingIOError:
                os.close(descriptor)
                raise ConfigError(
                    f"this process publishes weights to {path.parent} already; close that source first"
                ) from None
            os.close(descriptor)

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> dict[str, Any]:
        """See weights/base.py. Raises OSError with path and remedy when /dev/shm is full."""
        base = f"{self._stem}-v{version}"
        try:
            written = write_shards(lambda k: self._folder / f"{base}-{k}.part", tensors)
        except OSError as error:
            raise OSError(
                error.errno,
                f"cannot publish weights version {version}: {error.strerror}; the former version stays. "
                "Make room there (docker run --shm-size=…), or set weights.transfer=disk",
                str(self._folder / base),
            ) from error
        entries = []
        for number, (path, entry) in enumerate(written):
            name = base + (f"-{number}" if number else "") + ".safetensors"
            os.replace(path, self._folder / name)
            entries.append(entry | {"name": name})
        return {"transfer": "shared_memory", "version": version, "path": str(self._folder), "files": entries}

    def retire(self, version: int) -> None:
        """Unlink; a server that still maps it keeps its memory until it lets go."""
        for path in self._folder.glob(f"{self._stem}-v{version}[-.]*safetensors"):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove everything this source wrote. Also happens at interpreter exit."""
        self._close()


class SharedMemorySink:
    """The reading side, in the server."""

    def __init__(self, run_dir: Path, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._names = re.compile(re.escape(run_prefix(run_dir)) + r"\d+-v\d+(-\d+)?\.safetensors")

    def receive(self, manifest: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """See weights/base.py. Reads files of this run in /dev/shm, nothing else (T111)."""
        entries = checked_entries(manifest, "shared_memory", self._names)
        if manifest["path"] != str(self._folder):
            raise WeightsRefused(
                "load", f"weights manifest points to {manifest['path']!r}, not to {self._folder}; it is not read"
            )
        return read_shards(self._folder, entries)
