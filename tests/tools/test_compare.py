"""`areal compare`: two runs that were written down by hand, where every number is known; and two real ones."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from areal.base.types import Limits, SessionRequest, Version
from areal.rollout.history import History, Life, Trained
from areal.store import open_store, store_url
from areal.tools.compare.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
STEPS = 20
GONE = Life("x", 0, "", {}, {}, {})


def log(folder: Path, *, step_seconds: float, run: str = "r", steps: int = STEPS, reward: float = 0.0) -> None:
    """Steps of 4 sessions with 100 tokens each; the reward rises by a hundredth a step."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(steps):
            row = {"run_id": run, "opening": run, "step": step, "time": 1000 + step * step_seconds}
            row |= {"train/sessions": 4, "train/recorded_tokens": 400, "train/reward": reward + step / 100}
            row |= {"train/lag_mean": 0.5, "train/lag_max": 1}
            if step % 10 == 9:
                row |= {"speed/generate_seconds": 6.0, "speed/train_seconds": 2.0, "speed/tail_seconds": 4.0}
                row |= {"speed/cv": 0.9, "speed/waves": 2.0}
            file.write(json.dumps(row) + "\n")


def configure(folder: Path, lag: int, more: str = "", run: str = "r") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run_id").write_text(run)
    (folder / "config.yaml").write_text(
        f"experiment_name: e\ntrial_name: {folder.name}\nrollout: {{max_head_offpolicyness: {lag}}}\n{more}"
    )
    return folder


def train_tasks(folder: Path, tasks: Sequence[str]) -> None:
    """One task a step, in the store and in steps.jsonl."""

    async def fill() -> None:
        async with await open_store(store_url(folder / "store.sqlite")) as store:
            await store.training.set_limits(Limits(max_concurrent=99, max_lag=99, batch_groups=1))
            with History.open(folder / "steps.jsonl", GONE) as history:
                for step, task in enumerate(tasks):
                    session = await store.sessions.begin(SessionRequest(task, f"key-{step}", "w0"))
                    made = Version(step + 1, step + 1, "x")
                    history._append("step", Trained(step, step, made, {}, {session.group_id: {session.id: ""}}))

    asyncio.run(fill())


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Taking turns at 10 s a step, side by side at 4 s."""
    sync, other = configure(tmp_path / "sync", 0), configure(tmp_path / "async", 2)
    log(sync / "logs", step_seconds=10.0)
    log(other / "logs", step_seconds=4.0)
    return sync, other


def ask(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([str(word) for word in words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([str(word) for word in words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    return shown.err


def test_it_says_ratio_measurements_bound_and_rewards_whichever_run_is_named_first(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sync, other = pair
    text = ask(capsys, other, sync, "--output", tmp_path / "pictures" / "c.svg")
    rows = {line[:36].strip(): line[36:].split() for line in text.splitlines()}
    assert text.index(f"first: {sync}") < text.index(f"second: {other}")
    assert rows["samples per second"] == ["0.4", "1"]  # 4 sessions by 10 s and by 4 s
    assert rows["tokens per second"] == ["40", "100"]
    assert rows["g: to generate a step [s]"] == ["6", "6"]
    assert rows["t: to train it [s]"] == ["2", "2"]
    assert rows["CV of the durations"] == ["0.9", "0.9"]
    assert rows["waves per step"] == ["2", "2"]
    assert rows["bound (g + h + t) / (g + t)"] == ["1.5", "1.5"]
    assert rows["lag of trained tokens, most"] == ["1", "1"]
    assert "2.50 times as fast as the first in samples, 2.50 times in tokens per second, over steps 1 to 19" in text
    assert "the bound for this workload is 1.50 times, of which 167% was had: more than all" in text
    assert "reward 0.185 after" in text
    assert "190 s, step 19" in text
    assert "76 s, step 19" in text
    assert "whether both trained the same tasks is not known" in text
    assert (tmp_path / "pictures" / "c.svg").read_text().count("seconds of running") == 0  # 190 s are minutes
    assert "minutes of running" in (tmp_path / "pictures" / "c.svg").read_text()


def test_a_gain_within_the_bound_is_a_part_of_it(
    tmp_path: Path, pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    slower = configure(tmp_path / "slower", 4)
    log(slower / "logs", step_seconds=8.0)
    told = json.loads(ask(capsys, pair[0], slower, "--json", "--output", tmp_path / "c.png"))
    assert told["samples_ratio"] == pytest.approx(1.25)
    assert told["bound"] == pytest.approx(1.5)
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert "of which 83% was had; what limits it" in ask(capsys, pair[0], slower, "--output", tmp_path / "c.png")


def test_the_time_between_two_lives_of_a_run_is_no_time_of_training(
    tmp_path: Path, pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    resumed = configure(tmp_path / "resumed", 2)
    path = resumed / "logs" / "metrics.jsonl"
    log(resumed / "logs", step_seconds=4.0)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    again = [row | {"opening": "second", "time": row["time"] + 9000} for row in rows[10:]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:13] + again))
    told = json.loads(ask(capsys, pair[0], resumed, "--json", "--output", tmp_path / "c.png"))
    # Of 19 steps from the end of the first, one (the first of the second life) has no measured beginning.
    assert told["runs"][1]["samples_per_second"] == pytest.approx(19 * 4 / (18 * 4.0))


def test_two_runs_that_log_into_one_folder_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the second text does: the same configuration twice, with another --output-dir and the one switch."""
    logs = f"stats_logger: {{log_dir: {tmp_path / 'logs'}}}\n"
    sync, other = configure(tmp_path / "s", 0, logs, "one"), configure(tmp_path / "a", 2, logs, "two")
    log(tmp_path / "logs", step_seconds=10.0, run="one")
    log(tmp_path / "logs", step_seconds=5.0, run="two")
    assert "2.00 times as fast" in ask(capsys, sync, other, "--output", tmp_path / "c.png")


def test_the_tasks_of_both_runs_are_counted(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_tasks(pair[0], ["a", "b"] * 10)
    train_tasks(pair[1], ["b", "a"] * 10)
    assert "the same tasks: 100% of the trained groups" in ask(capsys, *pair, "--output", tmp_path / "c.png")


def test_other_tasks_and_other_settings_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = configure(tmp_path / "one", 0, "actor: {optimizer: {lr: 0.1}}\n")
    other = configure(tmp_path / "other", 2, "actor: {optimizer: {lr: 0.2}}\n")
    for folder, tasks in ((one, ["a", "b"] * 10), (other, ["a", "c"] * 10)):
        log(folder / "logs", step_seconds=4.0)
        train_tasks(folder, tasks)
    text = ask(capsys, one, other, "--output", tmp_path / "c.png")
    assert "setting that differs: actor.optimizer.lr=0.1 in the first, 0.2 in the second" in text
    assert "trial_name" not in text
    assert "NOT the same tasks: 50% of the trained groups" in text
    assert "only the first trained 'b', …" in text
    assert "only the second trained 'c', …" in text


def test_what_cannot_be_compared_is_one_sentence(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--output", tmp_path / "c.png")
    assert "there is no folder" in refused(capsys, pair[0], tmp_path / "nowhere", *out)
    assert "neither metrics.jsonl nor train.log" in refused(capsys, pair[0], tmp_path, *out)
    begun = configure(tmp_path / "begun", 2)
    log(begun / "logs", step_seconds=4.0, steps=1)
    assert "has trained 1 steps" in refused(capsys, begun, pair[0], *out)
    assert "is not in this log; available:" in refused(capsys, *pair, "--metric", "nope", *out)
    assert not (tmp_path / "c.png").exists()


def test_two_runs_with_one_lag_are_no_comparison_of_the_switch(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twin = configure(tmp_path / "twin", 2)
    log(twin / "logs", step_seconds=4.0)
    assert "both runs have rollout.max_head_offpolicyness=2" in ask(
        capsys, pair[1], twin, "--output", tmp_path / "c.png"
    )


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_the_one_switch_on_two_real_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, enabled in (("async", "true"), ("sync", "false")):
        command = [sys.executable, "-m", "areal.train", "--config", "configs/tiny.yaml", f"async.enabled={enabled}"]
        command += [f"cluster.fileroot={tmp_path}", f"trial_name={name}", "rollout.agent.gateway_port=0"]
        done = subprocess.run(
            [*command, "total_train_steps=12", "evaluator.path=null"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    runs = (tmp_path / "tiny" / "sync", tmp_path / "tiny" / "async")
    told = json.loads(ask(capsys, *runs, "--json", "--output", tmp_path / "c.png"))
    assert told["samples_ratio"] > 0
    assert told["bound"] > 1
    assert told["work"]["settings"] == {}
    assert (
        told["work"]["shared"] > 0.9
    )  # both take the tasks in the order of the data; the last few may have been overtaken
    assert [run["lag"] for run in told["runs"]] == [0, 1]
    assert told["runs"][0]["lag_max"] == 0
