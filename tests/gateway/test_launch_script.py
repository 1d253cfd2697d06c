"""scripts/launch_async.sh with the real gateway; a few lines of shell stand where training would run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from areal.web.address import bind
from tests.ports import quiet_port

SCRIPT = Path(__file__).parents[2] / "scripts" / "launch_async.sh"


class Launch:
    """One start of the script, in a process group of its own, like a terminal's."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.seen = folder, folder / "seen"
        self.port = quiet_port()
        monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
        monkeypatch.setenv("TAOTOKEN_API_KEY", "upstream-secret-0815")
        monkeypatch.setenv("GATEWAY_PORT", str(self.port))
        monkeypatch.setenv("PYTHON", str(folder / "python"))
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")

    def start(self, train: str) -> None:
        wrapper = self.folder / "python"
        wrapper.write_text(
            f'#!/bin/bash\nif [[ "$2" == areal.train ]]; then echo "$@" > {self.seen}; {train}; fi\n'
            f'if [[ "$2" == areal.gateway.server ]]; then set -- "$@" --log-dir {self.folder}/logs; fi\n'
            f'exec {sys.executable} "$@"\n'
        )
        wrapper.chmod(0o755)
        self.process = subprocess.Popen(
            ["bash", str(SCRIPT), "seed=7"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self) -> tuple[int, str, str]:
        out, errors = self.process.communicate(timeout=60)
        return self.process.returncode, out, errors

    def processes(self) -> list[psutil.Process]:
        """Those of the script's group that still live."""
        found = []
        for process in psutil.process_iter(["status"]):
            try:
                if os.getpgid(process.pid) == self.process.pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return found

    def left_behind(self) -> list[list[str]]:
        return [process.cmdline() for process in self.processes()]


@pytest.fixture
def launch(tmp_path, monkeypatch):
    launch = Launch(tmp_path, monkeypatch)
    yield launch
    if launch.left_behind():
        os.killpg(launch.process.pid, signal.SIGKILL)
    launch.process.communicate()


def test_training_starts_when_the_gateway_is_ready_and_the_gateway_goes_with_it(launch):
    launch.start(f"exec {sys.executable} -c 'import socket; socket.create_connection((\"127.0.0.1\", {launch.port}))'")
    code, out, errors = launch.end()
    assert code == 0, errors
    assert "Gateway started, PID=" in out
    assert f"Gateway ready at http://127.0.0.1:{launch.port}" in out
    words = launch.seen.read_text()
    assert "--config configs/agent_async_train.yaml --agent-config agent_config.py" in words
    assert f"--output-dir ./checkpoints/run_001 seed=7 rollout.agent.gateway_port={launch.port}" in words
    assert launch.left_behind() == []


def test_a_failed_training_stops_the_gateway_and_keeps_its_code(launch):
    launch.start("exit 3")
    assert launch.end()[0] == 3
    assert launch.left_behind() == []


def test_T093_a_gateway_that_cannot_start_is_noticed(launch):
    holder = bind("127.0.0.1", launch.port)
    launch.start("exit 0")
    code, _, errors = launch.end()
    holder.close()
    assert code == 1
    assert str(launch.port) in errors
    assert "training was not started" in errors
    assert not launch.seen.exists()
    assert launch.left_behind() == []


def test_a_gateway_that_dies_while_training_runs_ends_both_with_the_reason(launch):
    launch.start("exec sleep 600")
    while not launch.seen.exists():
        assert launch.process.poll() is None, launch.end()
        time.sleep(0.02)
    [gateway] = [one for one in launch.processes() if "areal.gateway.server" in one.cmdline()]
    gateway.kill()
    code, _, errors = launch.end()
    assert code == 1
    assert f"local proxy failed, gateway at localhost:{launch.port} not reachable: it ended with code 137" in errors
    assert "the same command goes on from there" in errors
    assert launch.left_behind() == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_leave_nothing_behind(launch, number, code):
    launch.start("exec sleep 600")
    while not launch.seen.exists():
        assert launch.process.poll() is None, launch.end()
        time.sleep(0.02)
    if number == signal.SIGINT:
        os.killpg(launch.process.pid, number)  # what a terminal does
    else:
        launch.process.send_signal(number)
    assert launch.end()[0] == code
    assert launch.left_behind() == []
