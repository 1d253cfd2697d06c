"""What a process said last: the end of its log, bounded, for an error that has to tell why something ended.

    last_lines(path, start=offset, n=20)         # "" where there is no such file

start leaves out what an earlier process of the same name wrote. Used by local.py and by the leader of a net's ranks (engine/chorus.py). No torch.
"""

from __future__ import annotations

import os
from pathlib import Path

_MOST_BYTES = 64 << 10
_MOST_LINE = 500


def last_lines(path: Path, *, start: int = 0, n: int = 20) -> str:
    """The last n lines that are not empty, each cut to a bound. start: bytes of the file that are not looked at."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start, end - _MOST_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(line if len(line) <= _MOST_LINE else f"{line[:_MOST_LINE]}…" for line in lines[-n:])
