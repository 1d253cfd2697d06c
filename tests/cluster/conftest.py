"""Children for the scheduler's tests: real modules in a folder of their own, started as `python -m`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal.cluster.scheduler import Job

HEAD = """
import asyncio, os, signal, subprocess, sys, time
from areal.base.errors import *
from areal.cluster.child import report_ready, run_child

"""


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Job]:
    """job(name, body): a Job whose module is `body` (which defines main(spec))."""

    def make(name: str, body: str, **spec: Any) -> Job:
        module = f"child_{name.replace('-', '_')}"
        (tmp_path / f"{module}.py").write_text(HEAD + body + "\n\nif __name__ == '__main__':\n    run_child(main)\n")
        path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        return Job(name, module, spec, {"PYTHONPATH": path})

    return make
