"""A file of lines on a disk without room."""

from __future__ import annotations

import logging
import resource
from pathlib import Path

import pytest

from areal.base.lines import LineFile


def test_a_line_that_finds_no_room_is_lost_alone_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="areal")
    path = tmp_path / "lines"
    file = LineFile(path)
    file.append(b"first")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 4, hard))  # Python ignores the signal: EFBIG
    try:
        file.append(b"cut in the middle")
        file.append(b"no room at all")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"first\ncut "
    file.append(b"room again")
    file.append(b"and more")
    file.close()
    assert path.read_bytes().splitlines() == [b"first", b"cut ", b"room again", b"and more"]
    [said] = [record.getMessage() for record in caplog.records]
    assert f"a line of {path} is lost" in said


def test_what_a_crash_has_cut_swallows_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"whole\ncu")
    for line in (b"first", b"second"):
        file = LineFile(path)
        file.append(line)
        file.close()
        file.close()
    assert path.read_bytes() == b"whole\ncu\nfirst\nsecond\n"
