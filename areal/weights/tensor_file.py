"""One safetensors file, written tensor by tensor and read without a copy. The base of every transfer.

    writer = TensorFileWriter(path)
    for name, tensor in tensors:
        writer.add(name, tensor)
    entry = writer.close()                      # {"name", "bytes", "checksum"}: what a manifest says of this file
    entry = write_tensor_file(path, tensors)    # the same where all tensors are known: durable, its header as large as it must be
    tensors = read_tensor_file(path, entry)     # mapped; every byte checked

A stream of tensors has no length, but a safetensors file begins with the list of all of them: room of HEADER_BYTES is kept
free and filled at the end (padded with spaces, as the format allows). `write` and not a mapping: a full tmpfs then is an
error and not a SIGBUS. Integrity is a chain: the manifest's checksum covers the header, the header holds one digest per
tensor. Guards against truncation, mixed-up versions and damage, not against an attacker who may write our files.
The bytes are plain safetensors: no pickle anywhere (CWE-502). The base of engine/checkpoint.py too.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from areal.base.digests import DIGESTS, checksum, digest
from areal.base.errors import ShapeError, WeightsRefused

HEADER_BYTES = 1 << 20
"""Room for the header, about 5000 tensors; `TensorFileWriter.has_room` says when the next file is due."""

SYNC_BYTES = 64 << 20
"""What a durable file leaves to the system before it waits for the disk: other files' syncs wait for no more than that."""

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(tensor: torch.Tensor, name: str) -> str:
    """What safetensors calls its dtype. Raises ShapeError naming the tensor where it has none for it."""
    if tensor.dtype not in _DTYPE_NAMES:
        raise ShapeError(f"{name} has dtype {tensor.dtype}, which safetensors cannot hold; convert it first")
    return _DTYPE_NAMES[tensor.dtype]


def bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """[n] on the CPU, without a copy where it lies there already."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


class TensorFileWriter:
    """Writes `path` (must not exist, mode 0600). Only one tensor at a time is copied, and none that lies on the CPU."""

    def __init__(self, path: Path, header_bytes: int = HEADER_BYTES, *, durable: bool = False) -> None:
        self.path = path
        self.size = 8 + header_bytes
        self._room = header_bytes
        self._durable = durable
        self._unsynced = 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._entries: dict[str, dict[str, Any]] = {}
        self._digests: dict[str, str] = {}
        self._header_bytes = 256

    def has_room(self, name: str, tensor: torch.Tensor, most_bytes: int) -> bool:
        """Whether this tensor fits: always if it is the first one, else by header room and file size."""
        if not self._entries:
            return True
        fits = self._header_bytes + self.entry_bytes(name, tensor) <= self._room
        return fits and self.size + tensor.numel() * tensor.element_size() <= most_bytes

    @staticmethod
    def entry_bytes(name: str, tensor: torch.Tensor) -> int:
        """Of one tensor in the header: an upper bound, with the digest."""
        return 3 * len(json.dumps(name)) + 24 * tensor.ndim + 160

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Raises ShapeError for a dtype that safetensors does not know, OSError when the medium is full."""
        dtype = dtype_name(tensor, name)
        data = bytes_of(tensor)
        start = self.size - 8 - self._room
        self._write(data, self.size)
        self.size += len(data)
        self._entries[name] = {
            "dtype": dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, start + len(data)],
        }
        self._digests[name] = digest(data)
        self._header_bytes += self.entry_bytes(name, tensor)

    def close(self, metadata: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Fills in the header, for which there is room. Returns the manifest entry of this file: name, bytes, checksum."""
        digests = json.dumps(self._digests, separators=(",", ":"))
        metadata = {"format": "pt", **(metadata or {}), DIGESTS: digests}
        text = json.dumps({"__metadata__": metadata, **self._entries}, separators=(",", ":")).encode()
        header = self._room.to_bytes(8, "little") + text.ljust(self._room)
        self._write(np.frombuffer(header, np.uint8), 0)
        if self._durable:
            os.fsync(self._file)
        os.close(self._file)
        return {"name": self.path.name, "bytes": self.size, "checksum": checksum(header)}

    def discard(self) -> None:
        """Give up: nothing is left behind."""
        os.close(self._file)
        self.path.unlink(missing_ok=True)

    def _write(self, data: npt.NDArray[np.uint8], at: int) -> None:
        view = data.data
        while view:
            written = os.pwrite(self._file, view, at)
            view, at = view[written:], at + written
            self._unsynced += written
        if self._durable and self._unsynced >= SYNC_BYTES:
            os.fdatasync(self._file)
            self._unsynced = 0


def write_tensor_file(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
    durable: bool = True,
) -> dict[str, Any]:
    """All of `tensors`, on disk when it returns the file's entry. metadata: for the header. On any error nothing is left behind."""
    return write_tensor_stream(path, tensors.items(), tensors, metadata=metadata, durable=durable)


def write_tensor_stream(
    path: Path,
    named: Iterable[tuple[str, torch.Tensor]],
    known: Mapping[str, torch.Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
    durable: bool = True,
) -> dict[str, Any]:
    """The same of tensors that come one after the other. known: all of them as they will be; on the meta device is enough."""
    room = 256 + sum(TensorFileWriter.entry_bytes(name, tensor) for name, tensor in known.items())
    room += sum(len(json.dumps([key, value])) for key, value in (metadata or {}).items())
    writer = TensorFileWriter(path, -(-room // 4096) * 4096, durable=durable)
    try:
        for name, tensor in named:
            writer.add(name, tensor)
        return writer.close(metadata)
    except BaseException:
        writer.discard()
        raise


def read_tensor_file(path: Path, entry: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of one file, mapped privately (zero-copy; writing to one changes neither the file nor others).

    entry: what TensorFileWriter.close returned. Raises WeightsRefused naming the file and what differs.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise WeightsRefused(
            "load", f"weights {path} cannot be opened: {error.strerror}; publish the version again"
        ) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise WeightsRefused("load", f"weights {path} is not a file of this user; it is not read")
        if status.st_size != entry["bytes"] or status.st_size < 8 + HEADER_BYTES:
            raise WeightsRefused(
                "verify",
                f"weights {path} has {status.st_size} bytes, the manifest says {entry['bytes']}; publish again",
            )
        mapped = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
    header = mapped[: 8 + HEADER_BYTES]
    if checksum(header) != entry["checksum"]:
        raise WeightsRefused(
            "verify", f"weights {path}: the header's checksum is not the manifest's; publish the version again"
        )
    return _tensors(path, mapped, json.loads(header[8:]))


def _tensors(path: Path, mapped: mmap.mmap, header: dict[str, Any]) -> dict[str, torch.Tensor]:
    data = np.frombuffer(mapped, np.uint8, offset=8 + HEADER_BYTES)
    digests = json.loads(header.pop("__metadata__")[DIGESTS])
    tensors = {}
    for name, facts in header.items():
        start, end = facts["data_offsets"]
        if digest(data[start:end]) != digests[name]:
            raise WeightsRefused(
                "verify", f"weights {path}: tensor {name} differs from what was published; publish again"
            )
        tensors[name] = _view(mapped, facts, 8 + HEADER_BYTES + start)
    return tensors


def _view(mapped: mmap.mmap, facts: Mapping[str, Any], offset: int) -> torch.Tensor:
    dtype, shape = DTYPES[facts["dtype"]], facts["shape"]
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    if offset % dtype.itemsize:  # behind an odd number of narrower elements; rare, so one copy is fine
        raw = torch.frombuffer(mapped, dtype=torch.uint8, count=count * dtype.itemsize, offset=offset)
        return raw.clone().view(dtype).reshape(shape)
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset).reshape(shape)
