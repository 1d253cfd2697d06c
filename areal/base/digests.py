"""Whether bytes are still the ones that were written: fast digests of arrays, and of safetensors files that carry their own.

    digest(array)                                       # 32 hex digits at the speed of memory
    safetensors_damage(path, size=n, checksum=hex)      # None, or what differs, in words
    file_damage(path, size=n, checksum=hex)             # the same for small files

Integrity of a large file is a chain: a manifest or a mark holds the checksum of its header, the header one digest per tensor.
Guards against truncation, mixed-up versions and damage, not against an attacker who may write our files. Used by
weights/tensor_file.py (writes such files) and engine/checkpoint_files.py. numpy, no torch.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

DIGESTS = "areal.digests"  # key in a safetensors header's __metadata__: name -> digest
_BLOCK_WORDS = 8192  # 64 KiB of 8-byte words
_STRETCH = 16  # blocks summed at a time: the second sum finds them in the cache


def digest(data: npt.NDArray[np.uint8]) -> str:
    """32 hex digits over all bytes: 8-byte words are summed (modulo 2^64) in blocks of 64 KiB, and by their place in the block over all
    blocks; the sums are hashed.

    Any change of one word changes it, and so do pages or blocks that change places, near the speed of memory: 13 GB/s on one core. A hash of
    everything would cost several times the copy itself (zlib.crc32 3.6 GB/s, blake2b 0.7).
    """
    words = data[: len(data) // 8 * 8].view(np.uint64)
    whole = len(words) // _BLOCK_WORDS * _BLOCK_WORDS
    blocks = words[:whole].reshape(-1, _BLOCK_WORDS)
    places = np.zeros(_BLOCK_WORDS, np.uint64)
    hashed = blake2b(digest_size=16)
    for start in range(0, len(blocks), _STRETCH):
        stretch = blocks[start : start + _STRETCH]
        hashed.update(np.add.reduce(stretch, axis=1).tobytes())
        places += np.add.reduce(stretch, axis=0)
    hashed.update(places.tobytes())
    hashed.update(words[whole:].tobytes())
    hashed.update(data[len(words) * 8 :].tobytes())
    hashed.update(len(data).to_bytes(8, "little"))
    return hashed.hexdigest()


def checksum(data: bytes) -> str:
    """Of small files and of headers."""
    return blake2b(data, digest_size=16).hexdigest()


def file_damage(path: Path, *, size: int, checksum: str) -> str | None:
    """What differs from the file that was written; None where nothing does."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return f"{path.name} is missing"
    if len(data) != size:
        return f"{path.name} has {len(data)} bytes, not {size}"
    return None if blake2b(data, digest_size=16).hexdigest() == checksum else f"{path.name} is not what was written"


def safetensors_damage(path: Path, *, size: int, checksum: str) -> str | None:
    """The same for a file of weights/tensor_file.py, by its header's checksum and its tensors' own digests: reads every byte."""
    try:
        with path.open("rb") as file:
            here = path.stat().st_size
            if here != size:
                return f"{path.name} has {here} bytes, not {size}"
            length = file.read(8)
            header = file.read(min(int.from_bytes(length, "little"), size))
    except FileNotFoundError:
        return f"{path.name} is missing"
    if blake2b(length + header, digest_size=16).hexdigest() != checksum:
        return f"{path.name} has another header than was written"
    entries = json.loads(header)
    digests = json.loads(entries.pop("__metadata__")[DIGESTS])
    data = np.memmap(path, np.uint8, "r", offset=8 + len(header))
    for name, facts in entries.items():
        start, end = facts["data_offsets"]
        if digest(np.asarray(data[start:end])) != digests[name]:
            return f"{path.name} holds another {name} than was written"
    return None
