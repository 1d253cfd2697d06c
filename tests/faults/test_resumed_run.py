"""A run that was stopped and killed on its way trains what one that never stopped does: bit for bit where it is synchronous."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from areal.base.metrics import read_metrics
from areal.engine.checkpoint_files import checkpoints, critic_beside, damage, read_mark
from areal.rollout.datasets import endless
from areal.rollout.task_files import read_tasks

ROOT = Path(__file__).resolve().parents[2]
STEPS, BATCH, SAMPLES = 6, 3, 4
TASKS = read_tasks("examples/tiny_sums/tasks.jsonl")
NOT_THE_SAME = (
    "seconds",
    "version",
    "gap",
)  # clocks, labels (used once), and what is compared with the newest label alone
SYNCHRONOUS = (
    "rollout.max_head_offpolicyness=0",
    "rollout.native.deterministic=true",
    "rollout.native.threads=1",
    "actor.algorithm=ppo",
    "actor.mini_batch_size=6",
    "actor.gae_lambda=0.95",
    "actor.kl_ctl=0.01",
    "actor.optimizer.lr_scheduler_type=cosine",
    "ref.path=tiny-qwen3-warm",
    "critic.path=tiny-qwen3-warm",
    "critic.optimizer.lr=1e-3",
    "recover.freq_steps=2",
    "saver.freq_steps=1",
    "saver.keep=null",
)


Start = Callable[..., subprocess.Popen[str]]


class Uneven:
    """Asks for a sum. Of the tasks that stand in the file named by HOLD, every second session never comes to its end, so that a kill
    finds groups half done."""

    def __init__(self) -> None:
        self._runs: Counter[str] = Counter()

    async def run(self, task: dict[str, Any], *, base_url: str, api_key: str) -> float:
        from openai import AsyncOpenAI

        question = f"{task['x']}+{task['y']}"
        self._runs[question] += 1
        odd = self._runs[question] % 2
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=120) as client:
            messages: list[Any] = [{"role": "user", "content": f"{question}="}]
            answer = await client.chat.completions.create(model="default", messages=messages, max_tokens=4)
        if odd and question in Path(os.environ["HOLD"]).read_text().split():
            await asyncio.Event().wait()
        return (sum(map(ord, answer.choices[0].message.content or "")) % 7) / 7


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a run; none is left behind by a test that fails."""
    started: list[subprocess.Popen[str]] = []

    def begin(folder: Path, *overrides: str) -> subprocess.Popen[str]:
        started.append(_start(folder, *overrides))
        return started[-1]

    yield begin
    for run in started:
        run.kill()
        run.communicate()


def _start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "areal.train", "--config", "configs/tiny.yaml", "--output-dir", str(folder)]
    own = [
        f"total_train_steps={STEPS}",
        f"cluster.fileroot={folder.parent}",
        f"train_dataset.batch_size={BATCH}",
        f"gconfig.n_samples={SAMPLES}",
        "rollout.agent.path=tests.faults.test_resumed_run:Uneven",
        "rollout.agent.gateway_port=0",
        "evaluator.path=null",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HOLD": str(folder.parent / "hold")}
    return subprocess.Popen(
        [*command, *own, *overrides],
        cwd=ROOT,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
    )


def hold(folder: Path, step: int | None) -> None:
    """Which step's groups stay half done: those that are given out after `step` steps."""
    order = [task.id for task in islice(endless(TASKS, seed=1, shuffle=True), STEPS * BATCH)]
    held = [] if step is None else order[step * BATCH : (step + 1) * BATCH]
    folder.parent.mkdir(exist_ok=True)
    (folder.parent / "hold").write_text(" ".join(held))


def finish(run: subprocess.Popen[str]) -> None:
    _, stderr = run.communicate(timeout=400)
    assert run.returncode == 0, stderr[-3000:]


def stop(run: subprocess.Popen[str], number: signal.Signals, when: Callable[[], bool]) -> None:
    """As soon as `when` holds. The run must not end before by itself."""
    deadline = time.monotonic() + 240
    while not when():
        assert run.poll() is None, run.stderr.read()[-3000:] if run.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run.send_signal(number)
    _, stderr = run.communicate(timeout=120)
    assert run.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 0), stderr[-3000:]


def ask(folder: Path, query: str) -> list[tuple[Any, ...]]:
    store = folder / "store.sqlite"
    if not store.exists():
        return []
    connection = sqlite3.connect(f"file:{store}?mode=ro", uri=True, timeout=30)
    try:
        return connection.execute(query).fetchall()
    except sqlite3.OperationalError:  # its tables are being made
        return []
    finally:
        connection.close()


def half_done(folder: Path, step: int) -> bool:
    """`step` steps are consumed; of the next one's sessions those that are held run, and all others have ended."""
    open_groups = "SELECT seq FROM task_groups WHERE accepted_at IS NULL AND dropped_at IS NULL"
    counted = f"SELECT count(*), count(ending) FROM sessions WHERE drop_reason IS NULL AND group_seq IN ({open_groups})"
    consumed = ask(folder, "SELECT max(consumed_step) FROM task_groups")
    return consumed == [(step,)] and ask(folder, counted) == [(BATCH * SAMPLES, BATCH * SAMPLES // 2)]


def trained(folder: Path) -> dict[int, list[tuple[str, int]]]:
    """Step -> tasks of its groups, and of how many sessions each was made."""
    rows = ask(
        folder,
        "SELECT g.consumed_step, g.task_id, (SELECT count(*) FROM sessions s WHERE s.group_seq = g.seq AND s.drop_reason IS NULL) "
        "FROM task_groups g WHERE g.consumed_step IS NOT NULL ORDER BY 1, 2",
    )
    steps: dict[int, list[tuple[str, int]]] = {}
    for step, task, sessions in rows:
        steps.setdefault(step, []).append((task, sessions))
    return steps


def numbers(folder: Path) -> dict[int, dict[str, float]]:
    rows = read_metrics(folder / "logs" / "metrics.jsonl").rows
    return {
        step: {
            name: value
            for name, value in row.items()
            if name.startswith("train/") and not any(word in name for word in NOT_THE_SAME)
        }
        for step, row in rows.items()
    }


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_T083_a_synchronous_run_that_was_killed_and_stopped_equals_one_that_was_not_bit_for_bit(
    start: Start, tmp_path: Path
) -> None:
    """Policy with a schedule and several mini-batches, critic, reference: weights of every step, moments, generators, numbers."""
    straight, resumed = tmp_path / "a" / "straight", tmp_path / "b" / "resumed"
    hold(straight, None)
    finish(start(straight, *SYNCHRONOUS))
    hold(resumed, 3)
    stop(start(resumed, *SYNCHRONOUS), signal.SIGKILL, lambda: half_done(resumed, 3))
    hold(resumed, 4)
    stop(start(resumed, *SYNCHRONOUS), signal.SIGTERM, lambda: half_done(resumed, 4))
    hold(resumed, None)
    finish(start(resumed, *SYNCHRONOUS))
    log = (resumed / "logs" / "train.log").read_text()
    assert "resumed from" in log
    assert "step-000002: step 2, 3 groups to be trained again" in log, "the third step was lost and is trained again"
    assert "step-000004: step 4, 0 groups to be trained again" in log, "SIGTERM lost nothing"
    assert ask(resumed, "SELECT count(*) FROM sessions WHERE drop_reason = 'interrupted'") == [
        (2 * BATCH * SAMPLES // 2,)
    ]
    assert trained(resumed) == trained(straight)
    assert all(sessions == SAMPLES for step in trained(resumed).values() for _, sessions in step)
    assert numbers(resumed) == numbers(straight)
    assert sorted(numbers(straight)) == list(range(STEPS))
    assert {"train/loss", "train/lr", "train/critic_loss", "train/ref_kl"} <= numbers(straight)[0].keys()
    for ours, theirs in zip(checkpoints(resumed / "checkpoints"), checkpoints(straight / "checkpoints"), strict=True):
        files = (read_mark(ours.path).files, read_mark(theirs.path).files)
        assert files[0]["model.safetensors"] == files[1]["model.safetensors"], ours
    last = [checkpoints(folder / "checkpoints")[0].path for folder in (resumed, straight)]
    assert damage(last[0], recovery=True) is None
    for mine, other in (last, [critic_beside(path) for path in last]):
        assert read_mark(mine).files == read_mark(other).files, "weights, moments and the state of every generator"


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_T059_an_asynchronous_run_that_is_killed_again_and_again_skips_and_repeats_nothing_and_stays_within_the_lag(
    start: Start, tmp_path: Path
) -> None:
    folder, lag = tmp_path / "run", 2
    seed = int(os.environ.get("AREAL_SEED", "7"))
    print(f"AREAL_SEED={seed}")
    chance = random.Random(seed)
    hold(folder, None)
    overrides = (f"rollout.max_head_offpolicyness={lag}", "recover.freq_steps=2", "saver.keep=1")
    for step in (1, 3, 4):
        delay = chance.uniform(0, 1)
        seen: list[float] = []

        def due(step: int = step, delay: float = delay, seen: list[float] = seen) -> bool:
            if not seen and ask(folder, f"SELECT 1 FROM task_groups WHERE consumed_step >= {step}"):
                seen.append(time.monotonic())
            return bool(seen) and time.monotonic() - seen[0] >= delay

        stop(start(folder, *overrides), signal.SIGKILL, due)
    finish(start(folder, *overrides))
    steps = trained(folder)
    assert {step: len(groups) for step, groups in steps.items()} == dict.fromkeys(range(1, STEPS + 1), BATCH)
    rows = numbers(folder)
    assert sorted(rows) == list(range(STEPS))
    assert max(row["train/lag_max"] for row in rows.values()) <= lag
    given = [task for (task,) in ask(folder, "SELECT task_id FROM task_groups ORDER BY seq")]
    assert max(Counter(given).values()) == 1, "a task that was given out is not given out again"
    order = [task.id for task in islice(endless(TASKS, seed=1, shuffle=True), len(given))]
    assert sorted(given) == sorted(order), "none is skipped"
    assert ask(folder, "SELECT DISTINCT drop_reason FROM task_groups WHERE dropped_at IS NOT NULL") == []
    assert all(sessions == SAMPLES for groups in steps.values() for _, sessions in groups)
    [(accounted,)] = ask(folder, "SELECT sum(tokens) FROM token_accounts WHERE reason = ''")
    assert accounted == sum(row["train/trained_tokens"] for row in rows.values())
    assert json.loads((folder / "summary.json").read_text())["lag_max"] <= lag
