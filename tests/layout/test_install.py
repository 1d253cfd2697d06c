"""What runs where nothing but the dependencies is installed: no other engine, no GPU package, no test tool (T107)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

import areal

ABSENT = ("flash_attn", "vllm", "sglang", "ray", "deepspeed", "torchvision", "anthropic", "hypothesis", "psutil")
# Runs a module as `python -m` does, in a process where the packages above cannot be imported.
BARE = f"""
import importlib.abc, runpy, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def bare(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BARE, *words], capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize(
    "words",
    [
        ("areal", "--help"),
        ("areal.gateway.server", "--help"),
        ("areal.train", "--help"),
        ("areal.tools.plot_metrics", "--help"),
        ("areal.dashboard", "--help"),
        ("areal.tools.status", "--help"),
        ("areal.doctor", "--help"),
        ("areal.replay", "--help"),
        ("areal.tools.plan", "--help"),
        ("areal.models.fetch", "--help"),
    ],
)
def test_T107_every_command_helps_where_nothing_optional_is_installed(words: tuple[str, ...]) -> None:
    done = bare(*words)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
    assert done.stderr == ""


def test_T107_the_version_is_printed() -> None:
    assert bare("areal", "--version").stdout.strip() == areal.__version__


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_T107_an_engine_that_is_not_there_is_one_line(name: str, tmp_path: Path) -> None:
    done = bare("areal.train", f"rollout.backend={name}:d1", "rollout.agent.mode=online", "actor.path=tiny-qwen3")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(f"error: rollout.backend={name}:d1: ")
    assert "use rollout.backend=native:d1" in line


def test_T107_the_gateway_runs(tmp_path: Path) -> None:
    words = ["areal.gateway.server", "--port", "0", "--log-dir", str(tmp_path)]
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", BARE, *words], stdout=subprocess.PIPE, text=True, env=environment
    ) as gateway:
        assert gateway.stdout is not None
        url = next(line for line in gateway.stdout if "Gateway ready at" in line).split()[-1]
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{url}/health", timeout=60) as answer:
            assert json.load(answer)["status"] == "ok"
        gateway.send_signal(signal.SIGTERM)
        assert gateway.wait(timeout=60) == 0
