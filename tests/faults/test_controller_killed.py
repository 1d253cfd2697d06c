"""A controller that is killed takes its whole run with it, whatever its children do; Ctrl-C and SIGTERM too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

CHILD = """
import os, signal, subprocess, sys, time
from areal.cluster.child import report_ready, run_child

SLEEP = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(300)"

def main(spec):
    if spec.job["deaf"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    apart = subprocess.Popen([sys.executable, "-c", SLEEP], stdout=subprocess.PIPE, start_new_session=True)
    inside = subprocess.Popen([sys.executable, "-c", SLEEP], stdout=subprocess.PIPE)
    apart.stdout.readline(), inside.stdout.readline()       # from now on they ignore SIGTERM
    report_ready(spec, inside=inside.pid, apart=apart.pid)
    time.sleep(300)

if __name__ == "__main__":
    run_child(main)
"""

CONTROLLER = """
import asyncio, json, signal, sys
from pathlib import Path
from areal.cluster.local import LocalScheduler
from areal.cluster.scheduler import Job

async def main():
    async with LocalScheduler(Path(sys.argv[1]), grace_s=1.0) as scheduler:
        started = await scheduler.start(*(Job(f"c-{k}", "fault_child", {"deaf": k == 1}) for k in range(2)))
        facts = [await process.ready(60) for process in started]
        print(json.dumps(facts), flush=True)
        await asyncio.sleep(300)

signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
asyncio.run(main())
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def left_of(pids: list[int], seconds: float = 60.0) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


class Controller:
    def __init__(self, folder: Path) -> None:
        (folder / "fault_child.py").write_text(CHILD)
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
        self.process = subprocess.Popen(
            [sys.executable, "-c", CONTROLLER, str(folder / "run")],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        assert self.process.stdout is not None
        self.facts = json.loads(self.process.stdout.readline())
        self.children = [fact["pid"] for fact in self.facts]
        self.inside = [fact["inside"] for fact in self.facts]
        self.apart = [fact["apart"] for fact in self.facts]

    def end(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        self.process.wait(timeout=60)

    def clean_up(self) -> None:
        for pid in [self.process.pid, *self.children, *self.inside, *self.apart]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    started = Controller(tmp_path)
    yield started
    started.clean_up()


def test_killed_controller_children_end_also_the_one_that_ignores_sigterm(controller: Controller) -> None:
    controller.end(signal.SIGKILL)
    assert left_of(controller.children + controller.inside + controller.apart) == []


def test_the_next_run_in_the_folder_ends_what_the_killed_one_left(controller: Controller, tmp_path: Path) -> None:
    os.kill(controller.process.pid, signal.SIGSTOP)  # so that it notices nothing before it is killed too
    os.kill(controller.children[0], signal.SIGKILL)
    stray = controller.apart[0]
    controller.end(signal.SIGKILL)
    assert left_of(controller.children) == []
    assert alive(stray), "child and controller were killed, nobody was left to end it"
    follower = Controller(tmp_path)
    try:
        assert left_of([stray]) == []
        assert all(map(alive, follower.children + follower.apart)), "its own are not touched"
    finally:
        follower.end(signal.SIGINT)
        left = left_of(follower.children + follower.inside + follower.apart)
        follower.clean_up()
    assert left == []


def test_ctrl_c_leaves_nothing(controller: Controller) -> None:
    controller.end(signal.SIGINT)
    assert left_of(controller.children + controller.inside + controller.apart, seconds=1.0) == []


def test_one_killed_child_leaves_the_controller_to_decide(controller: Controller) -> None:
    os.kill(controller.children[0], signal.SIGKILL)
    assert left_of([controller.children[0], controller.inside[0], controller.apart[0]]) == []
    assert controller.process.poll() is None
    assert alive(controller.children[1])
