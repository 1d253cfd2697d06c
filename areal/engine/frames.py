"""Frames on a rank's link: 4 bytes of length, big-endian, then one msgspec message of commands.py.

    await write_frame(writer, encode(command))
    frame = await read_frame(reader)                       # None: the other side closed between frames

Used by client.py and worker.py. Raises ConnectionError inside a frame or when a frame is larger than it may be.
"""

from __future__ import annotations

import asyncio

MAX_FRAME = 2**30
"""Bytes; a batch of rows is a few MB."""


async def read_frame(reader: asyncio.StreamReader, limit: int = MAX_FRAME) -> bytes | None:
    """The next message, None at the end of the stream."""
    try:
        head = await reader.readexactly(4)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise ConnectionError("the link ended inside a frame") from None
        return None
    size = int.from_bytes(head, "big")
    if size > limit:
        raise ConnectionError(f"a frame of {size} bytes is larger than the allowed {limit}")
    try:
        return await reader.readexactly(size)
    except asyncio.IncompleteReadError:
        raise ConnectionError("the link ended inside a frame") from None


async def write_frame(writer: asyncio.StreamWriter, message: bytes) -> None:
    if len(message) > MAX_FRAME:
        raise ConnectionError(
            f"a message of {len(message)} bytes is larger than the allowed {MAX_FRAME}; use smaller batches"
        )
    writer.write(len(message).to_bytes(4, "big"))
    writer.write(message)
    await writer.drain()
