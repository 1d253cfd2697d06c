"""One version of the weights in files of this process's own, on this machine: what the next version is compared with, or built on.

    copy = LocalCopy()
    copy.add(name, tensor); ...; copy.close()
    tensors = copy.tensors()                  # mapped anew each time, and checked
    copy.remove()

The files lie in the system's temporary folder (TMPDIR chooses another) and take no memory but what the system keeps of files by itself; where
that folder is a tmpfs they are memory. Gone when the object is, or the process; those of a process that was killed go when the next copy
of this user is made. Used by delta.py.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path

import torch

from areal.base.processes import exists
from areal.weights.shards import ShardWriter, read_shards

_PREFIX = "areal-weights-"


class LocalCopy:
    """Written once, then read. Every method but `remove` raises OSError with path and remedy where there is no room."""

    def __init__(self) -> None:
        _remove_leftovers()
        folder = self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        self._gone = weakref.finalize(self, _remove, folder, os.getpid())
        self._writer = ShardWriter(lambda number: folder / f"{number}.safetensors")
        self._entries: list[dict[str, object]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        try:
            self._writer.add(name, tensor)
        except OSError as error:
            raise self._full(error) from error

    def close(self) -> None:
        """What was added is complete."""
        try:
            self._entries = [entry for _, entry in self._writer.close()]
        except OSError as error:
            raise self._full(error) from error

    def tensors(self) -> dict[str, torch.Tensor]:
        """Private to the caller. Raises WeightsRefused where the files are no longer what was written."""
        return read_shards(self._folder, self._entries)

    def remove(self) -> None:
        """Tensors that are still mapped stay readable."""
        if not self._entries:
            self._writer.discard()
        self._gone()

    def _full(self, error: OSError) -> OSError:
        return OSError(
            error.errno,
            f"cannot keep a copy of the weights for weights.transfer=delta: {error.strerror}. Make room there, set TMPDIR to a folder "
            "with room on a disk of this machine, or set weights.transfer=disk",
            str(self._folder),
        )


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child must not delete its parent's
        shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers() -> None:
    """Of processes that no longer live; another user's cannot be removed, and a number that is in use again keeps its folder."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).split("-", 1)[0]
        if pid.isdecimal() and not exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
