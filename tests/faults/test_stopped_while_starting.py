"""A signal at any moment of the start ends a run at once: no traceback, no process left, and the folder starts again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def starting(folder: Path) -> Iterator[subprocess.Popen[str]]:
    script = folder / "script.jsonl"
    script.write_text('{"pieces": ["hi", "<|im_end|>"]}\n')
    keys = [
        "rollout.backend=scripted:d1",
        f"rollout.scripted.path={script}",
        "rollout.agent.mode=online",
        "actor.path=",
    ]
    command = [sys.executable, "-m", "areal.train", *keys, "rollout.agent.gateway_port=0"]
    process = subprocess.Popen(
        [*command, "--output-dir", str(folder / "run"), f"cluster.fileroot={folder}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"XDG_STATE_HOME": str(folder / "state")},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, path
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


def mentions(folder: Path) -> list[str]:
    """Command lines of living processes that name the folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line:
            found.append(line)
    return found


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("run.lock", signal.SIGINT),
        ("processes/server-0.spec.json", signal.SIGTERM),
        ("processes/worker-0.spec.json", signal.SIGINT),
    ],
)
def test_a_signal_while_it_starts_ends_it_at_once(tmp_path: Path, moment: str, number: signal.Signals) -> None:
    with starting(tmp_path) as process:
        wait_for(tmp_path / "run" / moment, process)
        process.send_signal(number)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "RLTrainer INFO: stopping at once; the same command goes on from the last checkpoint" in output
    assert "Traceback" not in output
    assert not mentions(tmp_path)
    assert not list((tmp_path / "run" / "processes").iterdir())


def test_a_second_signal_ends_a_run_at_once(tmp_path: Path) -> None:
    with starting(tmp_path) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "nothing is trained" in line:
                break
        process.send_signal(signal.SIGINT)
        assert "once more to stop at once" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    assert process.returncode in (0, 130), output  # 0 where the first one had ended it already
    assert "Traceback" not in output
    assert not mentions(tmp_path)
