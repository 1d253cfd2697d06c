"""`areal status`: on a running, a stopped and a crashed run, and where a sum does not hold."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from areal.base.errors import AccountingError
from areal.base.metrics import MetricsFile, MetricsTable
from areal.base.types import (
    Completion,
    Ending,
    Interaction,
    Limits,
    Message,
    SessionRequest,
    Share,
    Version,
    WorkerInfo,
)
from areal.cluster.run_lock import RunLock
from areal.proxy.export import MASK_ORDER
from areal.rollout import metrics as _declared  # noqa: F401  declares train/…
from areal.store import open_store, store_url
from areal.store.base import Store
from areal.store.sql.groups import INTERRUPTED, TOO_FEW
from areal.tools.books import faults_of, refuse
from areal.tools.status import main

LEGEND = ("tokens", "interactions", "sessions", "groups")


def interaction(session_id: str, tokens: int) -> Interaction:
    floats = np.full(tokens, -0.5, np.float32)
    done = Completion(np.arange(tokens, dtype=np.int32), floats, np.zeros(tokens, np.int32), floats, 1.0, "stop")
    return Interaction(f"{session_id}/0", session_id, 0, np.ones(2, np.int32), done, (), Message("assistant", "4"))


async def fill(store: Store) -> None:
    """Two trained (one in part), one dropped, one waiting, one that runs."""
    await store.training.set_limits(Limits(max_concurrent=9, max_lag=2, batch_groups=2))
    for name, ending in (("a", "ended"), ("b", "ended"), ("c", "expired"), ("d", "ended"), ("e", "")):
        await store.sessions.begin(SessionRequest(name, f"key-{name}", "w0"))
        await store.sessions.add(interaction(name, 4))
        if name in "ad":
            await store.sessions.reward(name, 1.0, None)
        if ending:
            await store.sessions.end(name, ending)  # type: ignore[arg-type]
    first, second, _ = await store.training.ready()
    await store.training.account("a", {"": Share(4, 1)})
    await store.training.account("b", {"": Share(1, 1), "constrained": Share(3, 0)})
    await store.training.advance(Version(0, 0, "x"), [])
    await store.training.advance(Version(1, 1, "x"), [first.id, second.id])
    await store.registry.heartbeat(WorkerInfo("w0", "http://127.0.0.1:1", os.getpid(), "here", 0.0))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "my-exp" / "trial"
    (folder / "processes").mkdir(parents=True)
    (folder / "config.yaml").write_text("total_train_steps: 20\nstats_logger: {log_dir: null}\n")
    with MetricsFile(folder / "logs" / "metrics.jsonl", "run") as metrics:
        row = {"train/version": 1, "train/trained_tokens": 5.0, "train/lag_mean": 0.25, "train/lag_max": 1}
        metrics.write(0, row)

    async def make() -> None:
        async with await open_store(store_url(folder / "store.sqlite")) as store:
            await fill(store)

    asyncio.run(make())
    return folder


def ask(run: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    code = main([str(run), *flags])
    return code, capsys.readouterr().out


def test_every_unit_of_a_stopped_run_adds_up(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = ask(run, capsys)
    assert code == 0
    assert "my-exp/trial: stopped, 1 of 20 steps trained, version 1" in text
    assert "lag: mean 0.25, most 1 steps (allowed 2)" in text
    rows = {line[:22].strip(): line[22:].split() for line in text.splitlines() if line[22:].strip()}
    table = {name: cells for name, cells in rows.items() if len(cells) in (4, 8)}
    assert table == {
        "": list(LEGEND),
        "recorded": ["20", "5", "5", "5"],
        "trained": ["5", "2", "2", "2"],
        "masked (constrained)": ["3", "0", "0", "0"],
        "dropped (expired)": ["4", "1", "1", "1"],
        "waiting": ["4", "1", "1", "1"],
        "open": ["4", "1", "1", "1"],
        "sum of the above": [word for number in (20, 5, 5, 5) for word in ("=", str(number))],
    }
    assert "rewards: 2 ended sessions have one, 2 have none" in text
    assert text.endswith("every sum holds\n")
    code, text = ask(run, capsys, "--json")
    told = json.loads(text)
    assert (code, told["state"], told["faults"], told["processes"]) == (0, "stopped", [], [])
    assert told["books"]["recorded"] == told["books"]["total"] == dict(zip(LEGEND, (20, 5, 5, 5), strict=True))


def test_a_label_that_was_taken_before_a_kill_is_no_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def take() -> None:
        async with await open_store(store_url(run / "store.sqlite")) as store:
            await store.training.advance(Version(2, 2, "x"), [])

    asyncio.run(take())
    assert "my-exp/trial: stopped, 1 of 20 steps trained, version 1\n" in ask(run, capsys)[1]


def test_a_session_that_is_not_accounted_for_is_named_and_the_command_fails(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with sqlite3.connect(run / "store.sqlite") as connection:
        connection.execute("UPDATE token_accounts SET tokens = 2 WHERE reason = 'constrained'")
    connection.close()
    code, text = ask(run, capsys)
    assert code == 1
    assert "≠ 19" in text
    assert "AT FAULT: session 'b' of group g2 recorded 4 tokens in 1 interactions and is accounted for" in text
    assert "every sum holds" not in text


def test_a_store_and_a_trainer_that_count_differently_are_a_fault(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with MetricsFile(run / "logs" / "metrics.jsonl", "run") as metrics:
        metrics.write(0, {"train/version": 1, "train/trained_tokens": 6.0})
    code, text = ask(run, capsys)
    assert code == 1
    assert "AT FAULT: step 0 (version 1) trained 6 tokens as the trainer counts them, 5 as the store does" in text


async def test_a_run_whose_sums_do_not_hold_ends_with_the_first_of_them(run: Path) -> None:
    async with await open_store(store_url(run / "store.sqlite"), read_only=True) as store:
        books = await store.reading.balance()
    refuse(faults_of(books, MetricsTable({})))
    wrong = replace(books, faults=("session 'b' lost 3 tokens", "another"))
    with pytest.raises(AccountingError, match=r"session 'b' lost 3 tokens \(and 1 more, see train.log\)"):
        refuse(faults_of(wrong, MetricsTable({})))


HOLDER = """
import os, sys, time
from pathlib import Path
from areal.cluster.run_lock import RunLock
with RunLock(Path(sys.argv[1])) as lock:
    print(lock.marker, flush=True)
    time.sleep(300)
"""


@pytest.fixture
def controller(run: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the run's folder, as its controller does."""
    command = [sys.executable, "-c", HOLDER, str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        marker = process.stdout.readline().strip()
        for name in ("worker-0", "server-0"):
            (run / "processes" / f"{name}.spec.json").touch()
        (run / "processes" / "worker-0.ready.json").write_text(json.dumps({"pid": os.getpid(), "url": "x"}))
        sleeper = [sys.executable, "-c", "import time; time.sleep(300)"]
        with subprocess.Popen(sleeper, env=os.environ | {"AREAL_PROCESS": f"{marker}:worker-0:"}) as worker:
            yield process
            worker.kill()
        process.kill()


def test_a_running_run_and_one_whose_controller_was_killed(
    run: Path, controller: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints" / "step-000001").mkdir(parents=True)
    code, text = ask(run, capsys)
    assert code == 0
    assert "my-exp/trial: running since 2" in text
    assert f"process controller: alive (pid {controller.pid})" in text
    assert "process worker-0: alive (pid " in text
    assert "process server-0: GONE (pid none)" in text  # between two starts
    assert "last heard of" in text
    assert "last checkpoint: step-000001, " in text
    assert "INCOMPLETE" in text
    assert (
        "now: waiting for agents: 1 of 2 finished groups for step 1 are there; 1 sessions run, 4 slots are free" in text
    )
    controller.send_signal(signal.SIGKILL)
    controller.wait()
    code, text = ask(run, capsys)
    assert code == 0
    assert "my-exp/trial: crashed, 1 of 20 steps" in text
    assert f"process controller: GONE (pid {controller.pid})" in text
    assert "now:" not in text


def test_looking_takes_no_lock_and_writes_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def files() -> dict[Path, bytes]:  # a reader of SQLite has a log and an index of its own beside the file
        return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and "sqlite-" not in path.name}

    before = files()
    assert ask(run, capsys)[0] == 0
    assert files() == before
    with RunLock(run):
        assert ask(run, capsys)[0] == 0


def test_a_folder_without_a_run_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "has no store.sqlite; give the folder of a run" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_page_explains_every_reason(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "accounting.md").read_text()
    masked, dropped = page.split("**masked**")[1].split("**dropped**")
    explained = [set(re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE)) for part in (masked, dropped)]
    assert explained[0] == {*MASK_ORDER, "stale", "empty"}
    endings = set(get_args(Ending)) - {"ended", "refreshed"}  # these lose nothing
    groups = {TOO_FEW, "nothing_to_train", "stale", "zero_variance", "not_trained"}
    assert explained[1] == endings | groups | {"empty", "late", INTERRUPTED}
