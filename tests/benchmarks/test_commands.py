"""Each command of docs/benchmarks.md starts as it stands there, from the repository's root."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = re.findall(r"^\| `python ([^`]+)` \|", (ROOT / "docs" / "benchmarks.md").read_text(), re.MULTILINE)


def test_every_benchmark_has_its_command() -> None:
    named = {found[1] for command in COMMANDS if (found := re.search(r"[./](\w+?)(?:\.py)?$", command))}
    assert named == {path.stem for path in (ROOT / "benchmarks").glob("*.py")}


@pytest.mark.heavy
@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_starts(command: str) -> None:
    done = subprocess.run(
        [sys.executable, *shlex.split(command), "--help"], cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
