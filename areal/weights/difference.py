"""What changed of a tensor from one version to the next, as bytes that say by themselves what they are, and back.

    record = difference(name, former, tensor)       # uint8 [n], to be written; former: None where there was none
    tensor = applied(former, record)                # bit-equal; WeightsRefused where `former` is not what it was made from

A record is a head (coding, dtype, shape, the digest of the whole result) and what follows from the coding: `same` has nothing, `changed`
has for each block of BLOCK elements a zstd frame, `whole` has the tensor as it is. A frame holds the exclusive or of the old and new bits,
byte plane by byte plane: the upper bytes are nearly all zero, since a training step moves a weight by a small part of itself. Where few elements
of a block changed (bfloat16) it holds theirs alone, and the distances between them. A tensor of which less than a quarter is saved goes whole.
Measured in docs/benchmarks.md. Used by delta.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from backports import zstd

from areal.base.digests import digest
from areal.base.errors import WeightsRefused
from areal.weights.tensor_file import DTYPES, bytes_of, dtype_name

Coding = Literal["same", "changed", "whole"]

BLOCK = 1 << 20
"""Elements: what is held beside a tensor while it is compared is a few times their bytes."""

WORTH = 0.75
"""Most of a tensor's own bytes that its changes may take; zstd is slower than writing what it does not shrink."""

_LEVEL = 1
_FEW, _ALL = b"\0", b"\1"  # a frame's first byte: distances and values of what changed, or values of the whole block
_LENGTH = 4  # bytes of the head's own length
_WORDS: dict[int, type[np.unsignedinteger]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

_Bytes = npt.NDArray[np.uint8]


class _Head(msgspec.Struct, frozen=True):
    """frames: bytes of each block's, for `changed`; 0 where nothing in the block changed."""

    coding: Coding
    dtype: str
    shape: list[int]
    digest: str
    frames: list[int] = []


_heads = msgspec.json.Decoder(_Head)


def difference(name: str, former: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    """The record of `tensor`, uint8 [n], on the CPU. Raises ShapeError for a dtype that safetensors does not know."""
    new = bytes_of(tensor)
    frames: list[bytes] | None = None
    if former is not None and former.dtype == tensor.dtype and former.shape == tensor.shape:
        frames = _frames(bytes_of(former), new, tensor.element_size())
    coding: Coding = "whole" if frames is None else "changed" if any(frames) else "same"
    head = _Head(coding, dtype_name(tensor, name), list(tensor.shape), digest(new), [*map(len, frames or [])])
    text = msgspec.json.encode(head)
    parts = [np.frombuffer(len(text).to_bytes(_LENGTH, "little") + text, np.uint8)]
    parts += [new] if frames is None else [np.frombuffer(frame, np.uint8) for frame in frames]
    return torch.from_numpy(np.concatenate(parts))


def applied(former: torch.Tensor | None, record: torch.Tensor) -> torch.Tensor:
    """The tensor that `record` was made of; shares no memory with `former`. Raises WeightsRefused where the record is damaged, or where
    `former` is none or not the one that it was made from."""
    data = bytes_of(record)
    start = _LENGTH + int.from_bytes(data[:_LENGTH].tobytes(), "little")
    try:
        head = _heads.decode(data[_LENGTH:start].tobytes())
        dtype = DTYPES[head.dtype]
        if head.coding == "whole":
            result = data[start:].copy()
        elif former is None or former.dtype != dtype or list(former.shape) != head.shape:
            raise WeightsRefused("verify", "a difference to a tensor that is not held; the whole weights are needed")
        else:
            result = bytes_of(former).copy()
            _apply(result, data[start:], head.frames, dtype.itemsize)
        if len(result) != math.prod(head.shape) * dtype.itemsize or digest(result) != head.digest:
            raise WeightsRefused(
                "verify", "a difference does not give what was published; the whole weights are needed"
            )
        if not len(result):
            return torch.empty(head.shape, dtype=dtype)
        return torch.from_numpy(result).view(dtype).reshape(head.shape)
    except (msgspec.DecodeError, KeyError, ValueError, IndexError, zstd.ZstdError) as error:
        raise WeightsRefused("verify", f"a difference cannot be read ({error}); publish the version again") from None


def _frames(former: _Bytes, new: _Bytes, width: int) -> list[bytes] | None:
    """One per block, empty where nothing changed; None where they are not worth it."""
    compressor = zstd.ZstdCompressor(level=_LEVEL)
    frames, left = [], WORTH * len(new)
    for old, now in zip(_blocks(former, width), _blocks(new, width), strict=True):
        moved = old ^ now
        count = np.count_nonzero(moved)
        if 2 * count > len(moved):
            plain = _ALL + _planes(moved)
        else:
            places = np.flatnonzero(moved).astype(np.uint32)
            plain = _FEW + _planes(np.diff(places, prepend=np.uint32(0))) + _planes(moved[places])
        frames.append(compressor.compress(plain, zstd.ZstdCompressor.FLUSH_FRAME) if count else b"")
        left -= len(frames[-1])
        if left < 0:
            return None
    return frames


def _apply(result: _Bytes, payload: _Bytes, frames: list[int], width: int) -> None:
    blocks = list(_blocks(result, width))
    if len(blocks) != len(frames) or sum(frames) != len(payload) or min(frames, default=0) < 0:
        raise ValueError(
            f"{len(frames)} frames of {sum(frames)} bytes for {len(blocks)} blocks and {len(payload)} bytes"
        )
    start = 0
    for block, size in zip(blocks, frames, strict=True):
        frame, start = payload[start : start + size], start + size
        if not size:
            continue
        most = 1 + len(block) * (4 + width)
        found = zstd.ZstdDecompressor().decompress(frame.tobytes(), max_length=most + 1)
        plain = np.frombuffer(found, np.uint8, offset=1)
        if found[:1] == _ALL:
            block ^= _words(plain, width)
            continue
        count = len(plain) // (4 + width)
        places = np.cumsum(_words(plain[: 4 * count], 4), dtype=np.int64)
        block[places] ^= _words(plain[4 * count :], width)


def _blocks(data: _Bytes, width: int) -> Iterator[npt.NDArray[np.unsignedinteger]]:
    words = data.view(_WORDS[width])
    return (words[start : start + BLOCK] for start in range(0, len(words), BLOCK))


def _planes(words: npt.NDArray[np.unsignedinteger]) -> bytes:
    """All lowest bytes first."""
    return words.view(np.uint8).reshape(-1, words.itemsize).T.tobytes()


def _words(planes: _Bytes, width: int) -> npt.NDArray[np.unsignedinteger]:
    return np.ascontiguousarray(planes.reshape(width, -1).T).view(_WORDS[width]).reshape(-1)
