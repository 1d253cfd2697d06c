"""Smaller recordings: zstd for the columns of a recording that are large and shrink, and back.

    pack(recording)                  # in place: some columns become zstd frames, "packed" names them
    columns = unpack(row)            # as they were, also those of rows that were never packed

What real agents send again with every call (tools, messages, prompt ids) shrinks to 40 % or less, for about as much time as writing it
twice would take (log and file); columns below LEAST bytes are left as they are, so a short answer costs nothing. Log-probs are never
packed: their mantissas are noise (95 to 97 % of their size remains). Ids are laid out byte by byte, all low bytes first: zstd then takes a
third of the time for the same size. A column that repeats one value, as versions and masses nearly always do, is kept as that value. One file of a run may hold rows of both kinds. Bounded both ways: no column above LARGEST is
packed, none is unpacked beyond it. Used by codec.py. No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from backports import zstd

from areal.base.errors import StoreError

LEAST = 2048  # bytes of an array, characters of the texts
LARGEST = 2**28  # bytes of a column; a request body has 2**25 unless rollout.agent.max_body_bytes says more
WORTH = 0.9  # of its size, that a packed column may have
ARRAYS = ("prompt_ids", "token_ids", "versions", "kept_mass")  # of VALUE bytes a value
VALUE = 4
REPEAT = ("versions", "kept_mass")  # of these, where they are one value
TEXTS = ("messages", "tools")

_COMPRESSOR = zstd.ZstdCompressor(
    level=1
)  # level 3 takes half as long again for 1 % of the size; safe to share between threads


def pack(recording: dict[str, Any]) -> None:
    """Replace the columns of a recording that are worth it. "packed" names the arrays that are zstd frames, and with `NAME*COUNT` those
    that are one value; "texts" is messages and tools as one frame, None where they stand in their own columns."""
    packed = []
    for name in ARRAYS:
        plain = recording[name]
        count = len(plain) // VALUE
        if name in REPEAT and count > 1 and len(plain) <= LARGEST and plain == plain[:VALUE] * count:
            recording[name] = plain[:VALUE]
            packed.append(f"{name}*{count}")
            continue
        frame = _packed(plain, values=True)
        if frame is not None:
            recording[name] = frame
            packed.append(name)
    recording["packed"] = " ".join(packed)
    # JSON has no line feed of its own.
    texts = "\n".join(recording[name] for name in TEXTS)
    recording["texts"] = _packed(texts.encode(), values=False) if len(texts) >= LEAST else None
    if recording["texts"] is not None:
        recording.update(dict.fromkeys(TEXTS, ""))


def unpack(row: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays and texts that `pack` was given. Raises StoreError for a frame that is damaged or larger than any that was packed."""
    columns = {name: row[name] for name in (*ARRAYS, *TEXTS)}
    for entry in row["packed"].split():
        name, repeated, count = entry.partition("*")
        if repeated:
            columns[name] = _repeated(row[name], name, int(count))
        else:
            plain = np.frombuffer(_plain(row[name], name), np.uint8)
            columns[name] = plain.reshape(VALUE, -1).T.tobytes()
    if row["texts"] is not None:
        columns.update(zip(TEXTS, _plain(row["texts"], "texts").decode().split("\n"), strict=True))
    return columns


def _packed(plain: bytes, *, values: bool) -> bytes | None:
    if not LEAST <= len(plain) <= LARGEST:
        return None
    frame = _COMPRESSOR.compress(
        np.frombuffer(plain, np.uint8).reshape(-1, VALUE).T.tobytes() if values else plain,
        zstd.ZstdCompressor.FLUSH_FRAME,
    )
    return frame if len(frame) <= WORTH * len(plain) else None


def _repeated(value: bytes, name: str, count: int) -> bytes:
    if len(value) != VALUE or not 1 < count <= LARGEST // VALUE:
        raise StoreError(
            f"a record's {name} are damaged ({count} times {len(value)} bytes); restore a copy of the store"
        )
    return value * count


def _plain(frame: bytes, name: str) -> bytes:
    reader = zstd.ZstdDecompressor()
    try:
        plain = reader.decompress(frame, max_length=LARGEST + 1)
    except zstd.ZstdError as error:
        raise StoreError(f"a record's {name} are damaged ({error}); restore a copy of the store") from error
    if not reader.eof or len(plain) > LARGEST:
        raise StoreError(
            f"a record's {name} are cut off or larger than the {LARGEST} bytes that a column may have; restore a copy of the store"
        )
    return plain
