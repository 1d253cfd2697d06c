"""A policy on two ranks through the whole service: it trains as one rank does, and a rank that is killed costs no step and repeats none."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.books import balanced
from tests.faults.test_resumed_run import Start, ask, finish, hold, numbers, start, trained

STEPS = 4
RUN = (
    f"total_train_steps={STEPS}",
    "rollout.max_head_offpolicyness=0",
    "rollout.native.deterministic=true",
    "rollout.native.threads=1",
    "actor.optimizer.lr=1e-3",
    "recover.freq_steps=1",
    "saver.freq_steps=1",
)

__all__ = ["start"]  # the fixture


def kill_in_the_middle(folder: Path, step: int) -> int:
    """SIGKILL to rank-1 while the batch after `step` steps is being trained, or where that was missed a later one; its pid."""
    deadline = time.monotonic() + 240
    busy = f"SELECT 1 FROM task_groups WHERE taken_step IS NOT NULL AND consumed_step IS NULL AND {step} <= (SELECT max(consumed_step) FROM task_groups)"
    while not ask(folder, busy):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    [pid] = [
        int(process.name)
        for process in Path("/proc").glob("[0-9]*")
        if _command(process).endswith(f"{folder}/processes/rank-1.spec.json")
    ]
    os.kill(pid, signal.SIGKILL)
    return pid


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_two_ranks_train_as_one_and_a_killed_one_is_the_reason_and_costs_nothing(start: Start, tmp_path: Path) -> None:
    """The run on two ranks loses one in the middle of its third step, and goes on in another layout. Two more are cut otherwise, and send the
    weights as differences."""
    one, two = tmp_path / "a" / "one", tmp_path / "b" / "two"
    for folder in (one, two):
        hold(folder, None)
    finish(start(one, *RUN, "actor.backend=fsdp:d1"))
    first = start(two, *RUN, "actor.backend=fsdp:d2", "recover.retries=0")
    pid = kill_in_the_middle(two, 2)
    _, said = first.communicate(timeout=400)
    assert first.returncode == 1
    assert f"rank-1 (pid {pid}) was killed by signal 9 (SIGKILL" in said
    [(done,)] = ask(two, "SELECT max(consumed_step) FROM task_groups")  # 2, unless the signal came late
    finish(start(two, *RUN, "actor.backend=archon:d2"))
    log = (two / "logs" / "train.log").read_text()
    [(step, groups)] = re.findall(r"resumed from .*: step (\d), (\d+) groups to be trained again", log)
    assert (int(step), int(groups)) in ((done, 0), (done - 1, 3)), (
        "the last checkpoint may not have been on the disk yet"
    )
    assert trained(two) == trained(one)
    assert len(balanced(two).books.trained_by_version) == STEPS
    assert not list((two / "processes").glob("*.meeting-*")), "nobody meets any more"
    agree(two, one)
    for name, backend in (("three", "archon:d1t2"), ("four", "archon:d1p2")):
        other = tmp_path / name / name
        hold(other, None)
        finish(start(other, *RUN, f"actor.backend={backend}", "weights.transfer=delta"))
        assert trained(other) == trained(one)
        agree(other, one)


def agree(our_run: Path, their_run: Path) -> None:
    """Both took the same steps, as far as float32 lets different orders of sums be the same."""
    ours, theirs = numbers(our_run), numbers(their_run)
    assert sorted(ours) == list(range(STEPS))
    for step, row in theirs.items():
        for name in ("loss", "reward", "grad_norm", "trained_tokens", "entropy"):
            assert ours[step][f"train/{name}"] == pytest.approx(row[f"train/{name}"], abs=1e-5, rel=1e-4), (step, name)
