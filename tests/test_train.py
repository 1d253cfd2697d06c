"""The loop's own decisions; whole runs are in tests/e2e and tests/faults."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal.assemble import Run
from areal.base.guide import situation
from areal.base.logs import open_log
from areal.base.metrics import MetricsFile
from areal.base.types import Group, Limits, Share, Span, Trajectory, Version
from areal.config.load import resolve
from areal.config.run import RunConfig
from areal.launch import announce_gateway
from areal.rollout.batch import Batch
from areal.rollout.datasets import Task
from areal.rollout.dispatcher import Dispatcher
from areal.rollout.evaluation import Evaluation
from areal.rollout.history import History
from areal.rollout.pace import Pace
from areal.rollout.staleness import StalenessGate
from areal.store import open_store, store_url
from areal.tools.progress import Progress
from areal.train import evaluate, report


class Hanging:
    """In the place of a worker: an agent that never comes to its end."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def post(self, path: str, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_run_that_is_asked_to_stop_does_not_wait_for_an_evaluation(tmp_path: Path) -> None:
    worker = Hanging()
    async with await open_store(store_url(tmp_path / "store.sqlite")) as store:
        gate = await StalenessGate.open(store.training, Limits(1, 0, 1), incarnation="test")
        async with Dispatcher([worker], gate, store.training, n_samples=1) as dispatcher:  # type: ignore[list-item]
            parts: dict[str, Any] = dict.fromkeys(Run.__dataclass_fields__)
            del parts["stopping"]
            evaluation = Evaluation([Task("held-out", {})], dispatcher, freq_steps=None)
            run = Run(**(parts | {"gate": gate, "evaluation": evaluation, "dispatcher": dispatcher}))
            trying = asyncio.create_task(evaluate(run, 0))
            async with asyncio.timeout(60):
                await worker.asked.wait()
                assert not trying.done()
                run.stopping.set()
                await trying
            await evaluate(run, 0, last=True)  # stopping: it is not tried again


def reported(folder: Path, *, reward: float | None, gap: float, text: pytest.LogCaptureFixture) -> str:
    """What the log says of a step of one session."""
    parts: dict[str, Any] = dict.fromkeys(Run.__dataclass_fields__)
    del parts["stopping"]
    span = Span("a", 1, 2, reward, reward or 0.0, trained=True)
    row = Trajectory(
        "task",
        "task",
        np.arange(2, dtype=np.int32),
        np.array([False, True]),
        np.zeros(2, np.float32),
        np.zeros(2, np.int32),
        np.ones(2, np.float32),
        (span,),
    )
    batch = Batch(
        (Group("g", "task", (row,)),), 0.0, 0, 0.0, {"task": {"": Share(1, 1)}}, Version(0, 0, "x"), {"g": ("task",)}
    )
    stats = dict.fromkeys(("loss", "grad_norm", "wait_seconds", "step_seconds"), 0.0) | {"logprob_gap_max": gap}
    config = RunConfig()
    with (
        History(folder / "steps.jsonl") as history,
        MetricsFile(folder / "metrics.jsonl", "run") as metrics,
        Progress(total_steps=1, first_step=0, title="", enabled=False) as progress,
    ):
        parts |= {"config": config, "history": history, "metrics": metrics, "progress": progress, "pace": Pace(1, 0.0)}
        report(Run(**parts), 0, batch, Version(1, 1, "x"), stats)
    return text.text


def test_a_step_that_nobody_rewarded_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not situation("nobody-rewarded").said_in(reported(tmp_path, reward=0.0, gap=0.0, text=caplog))
    assert situation("nobody-rewarded").said_in(reported(tmp_path, reward=None, gap=0.0, text=caplog))


def test_a_trainer_and_a_sampler_that_disagree_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not situation("disagree").said_in(reported(tmp_path, reward=0.0, gap=1e-5, text=caplog))
    assert situation("disagree").said_in(reported(tmp_path, reward=0.0, gap=0.1, text=caplog))


@pytest.mark.parametrize("command", ["train", "doctor"])
def test_ctrl_c_while_a_command_is_being_loaded_is_130_and_no_traceback(command: str) -> None:
    program = f"""
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path, target=None):
        if name == "areal.{command}":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from areal.__main__ import main
sys.exit(main(["{command}", "--help"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rollout.agent.mode=online"], "waiting for agents at http://127.0.0.1:9/v1"),
        (
            ["rollout.agent.mode=online", "rollout.agent.internal_token=k-0123456789", "rollout.agent.max_turns=7"],
            "a session that opens under the internal token ends with its call 7 (rollout.agent.max_turns) or when idle for 3600 s",
        ),
        ([], "it listens on loopback only"),
    ],
)
def test_who_waits_for_agents_says_when_their_sessions_end(
    overrides: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_log(run_id="r"):
        announce_gateway("http://127.0.0.1:9", resolve(None, overrides).config)
    assert says in capsys.readouterr().out.splitlines()[-1]
