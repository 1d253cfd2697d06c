"""How the command ends where the run does."""

from __future__ import annotations

import errno
from typing import Self

import pytest

from areal.config.command_line import run_from_command_line
from areal.config.run import RunConfig


class FullDisk:
    """In the place of a run: the system refuses what it asks for."""

    def __init__(self, config: RunConfig, output_dir: str | None) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def train(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "runs/e/t/config.yaml")


def test_what_the_system_refuses_is_a_line_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_from_command_line([], FullDisk) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "error: OSError: [Errno 28] No space left on device: 'runs/e/t/config.yaml'"
    assert not any("Traceback" in line for line in said)
