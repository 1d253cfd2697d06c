"""docs/scripted.md does what it says: its example script is read, its program runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from areal.inference.scripted.script import read_script

DOCS = Path(__file__).parents[2] / "docs" / "scripted.md"


def test_the_example_of_the_docs_runs(tmp_path: Path) -> None:
    text = DOCS.read_text("utf-8")
    scripts = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    for script in scripts:
        (tmp_path / "script.jsonl").write_text(script)
        assert read_script(tmp_path / "script.jsonl").lines
    [program] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    expected = re.findall(r"^print\(.*\)\s+# (.*)$", program, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, encoding="utf-8"
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == expected
