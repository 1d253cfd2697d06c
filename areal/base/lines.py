"""A file that grows by whole lines: one writer, any readers while it is written.

    file = LineFile(path)
    file.append(b'{"step": 7}')        # on its way to the disk when it returns
    file.close()

What a crash or a full disk has cut is closed off by a line end, so that it swallows no line behind it. A line that finds no room is lost
and said aloud: what it tells of has happened all the same, and must not be undone for it. Used by metrics.py and rollout/history.py.
"""

from __future__ import annotations

import os
from pathlib import Path

from areal.base.logs import warn


class LineFile:
    """Made with mode 0600 where it is not there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._file).st_size
        self._cut = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"
        self._said = False  # that lines are lost, since the last one that was not

    def append(self, line: bytes) -> None:
        """line: without its end."""
        data = b"\n" * self._cut + line + b"\n"
        try:
            written, reason = os.write(self._file, data), "no room for the whole line"
        except OSError as error:
            written, reason = 0, error.strerror or str(error)
        self._cut = self._cut if written == 0 else written < len(data)
        if written == len(data):
            self._said = False
        elif not self._said:
            self._said = True
            warn(
                "Files",
                f"a line of {self._path} is lost, as are those that follow until there is room: {reason}; free space there",
            )

    def close(self) -> None:
        """Closing twice does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
