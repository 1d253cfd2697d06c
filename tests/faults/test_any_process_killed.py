"""SIGKILL of any one process of a real run: an inference server comes back; of any other the run begins again from its last recovery state, at the URL
that it had, or with no retries left ends within seconds. It says which process and why, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.books import balanced

ROOT = Path(__file__).resolve().parents[2]
SOON_S = 60.0  # generous: the machine may be busy; what is tested is that nothing hangs


@contextmanager
def start(folder: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A run that goes on until somebody stops it; killed at the end of the block whatever happens in it."""
    command = [sys.executable, "-m", "areal.train", "--config", "configs/tiny.yaml", "--output-dir", str(folder)]
    overrides = [
        "total_train_steps=1000000",
        "actor.path=tiny-qwen3",
        "rollout.agent.gateway_port=0",
        "evaluator.path=null",
        "recover.freq_steps=1",
        "gconfig.n_samples=2",
        "train_dataset.batch_size=4",
        f"cluster.fileroot={folder.parent}",
        *more,
    ]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen([*command, *overrides], cwd=ROOT, text=True, **pipes) as run:
        try:
            yield run
        finally:
            run.kill()


def steps_of(folder: Path) -> int:
    return int((folder / "logs" / "train.log").read_text().rpartition("[train] step=")[2].split()[0])


def wait_for(what: str, folder: Path, run: subprocess.Popen[str]) -> None:
    log = folder / "logs" / "train.log"
    deadline = time.monotonic() + 120
    while not (log.exists() and what in log.read_text()):
        assert run.poll() is None, run.stderr.read() if run.stderr else ""
        assert time.monotonic() < deadline, f"no {what!r} in {log}"
        time.sleep(0.1)


def kill(victim: str, folder: Path) -> int:
    """Of what process; its pid."""
    pid = json.loads((folder / "processes" / f"{victim}.ready.json").read_text())["pid"]
    os.kill(pid, signal.SIGKILL)
    return int(pid)


def lives_of(folder: Path) -> list[str]:
    """Where its clients reached each of them."""
    return re.findall(r"Proxy gateway available at (\S+)", (folder / "logs" / "train.log").read_text())


def members(folder: Path) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text()
            state = (process / "stat").read_text().split(")")[-1].split()[0]
        except OSError:  # it has just ended
            continue
        if str(folder) in command and state != "Z":
            found.append(int(process.name))
    return found


@pytest.mark.parametrize("victim", ["gateway", "worker-0", "rank-0"])
def test_the_run_ends_soon_and_names_the_process_that_died(victim: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with start(folder, "recover.retries=0") as run:
        wait_for("[train] step=0", folder, run)
        pid = kill(victim, folder)
        _, stderr = run.communicate(timeout=SOON_S)
    assert run.returncode == 1
    assert f"{victim} (pid {pid})" in stderr
    assert "SIGKILL" in stderr
    assert "Traceback" not in stderr
    assert members(folder) == []
    assert balanced(folder).steps >= 1


def test_whatever_died_the_run_begins_again_from_its_last_recovery_state_where_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with start(folder) as run:
        for life, victim in enumerate(("rank-0", "gateway", "worker-0"), 1):
            wait_for("[train] step=1 ", folder, run)
            pid = kill(victim, folder)
            wait_for(f"{victim} (pid {pid}) was killed by signal 9", folder, run)
            wait_for("The run begins again from its last recovery state: 1 of 3 (recover.retries)", folder, run)
            wait_for("resumed from", folder, run)
            while len(lives_of(folder)) == life:
                assert run.poll() is None, run.stderr.read() if run.stderr else ""
                time.sleep(0.1)
            wait_for(f"[train] step={steps_of(folder) + 4} ", folder, run)
        run.send_signal(signal.SIGTERM)
        _, stderr = run.communicate(timeout=SOON_S)
        assert run.returncode == 0, stderr
    assert len(set(lives_of(folder))) == 1, "clients keep their URL"
    log = (folder / "logs" / "train.log").read_text()
    assert log.count("1 of 3 (recover.retries)") == 3, "each life has saved, so each has all its retries"
    assert "Traceback" not in log + stderr
    assert balanced(folder).state == "stopped"
    assert members(folder) == []


def test_a_run_that_dies_again_and_again_without_getting_further_ends(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with start(folder, "recover.retries=1", "recover.freq_steps=null", "recover.freq_secs=null") as run:
        for life in (1, 2):
            while len(lives_of(folder)) < life if folder.exists() else True:
                assert run.poll() is None
                time.sleep(0.1)
            pid = kill("rank-0", folder)
        _, stderr = run.communicate(timeout=SOON_S)
    assert run.returncode == 1
    assert f"rank-0 (pid {pid})" in stderr
    assert members(folder) == []


def test_a_server_that_is_killed_comes_back_with_the_current_weights_and_the_run_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with start(folder) as run:
        wait_for("[train] step=1 ", folder, run)
        pid = kill("server-0", folder)
        wait_for(f"server-0 (pid {pid}) was killed by signal 9", folder, run)
        wait_for(" and is used again", folder, run)
        assert pid not in members(folder)
        wait_for(f"[train] step={steps_of(folder) + 4} ", folder, run)  # what waited in the queue is used up by then
        run.send_signal(signal.SIGTERM)
        assert run.wait(timeout=SOON_S) == 0
    assert balanced(folder).state == "stopped"
    assert members(folder) == []


def test_a_stopped_run_saves_and_the_same_command_goes_on_from_there(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with start(folder) as run:
        wait_for("[train] step=1 ", folder, run)
        run.send_signal(signal.SIGTERM)
        assert run.wait(timeout=60) == 0
    balanced(folder)
    steps = sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))
    with start(folder) as again:
        wait_for(f"resumed from {folder / 'checkpoints' / f'step-{steps[-1]:06d}'}", folder, again)
        wait_for(f"[train] step={steps[-1]} ", folder, again)
        again.send_signal(signal.SIGTERM)
        assert again.wait(timeout=60) == 0
    log = (folder / "logs" / "train.log").read_text().splitlines()
    headers = [line.split()[1] for line in log if line.startswith("# run_id=")]
    assert len(headers) == 2
    assert len(set(headers)) == 1, "a resume continues its own run id"
    assert balanced(folder).state == "stopped"
    assert members(folder) == []


def test_a_controller_that_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with start(folder) as run:
        wait_for("[train] step=0", folder, run)
        run.kill()
    deadline = time.monotonic() + SOON_S
    while members(folder):
        assert time.monotonic() < deadline, members(folder)
        time.sleep(0.2)
    assert balanced(folder).state == "crashed"
