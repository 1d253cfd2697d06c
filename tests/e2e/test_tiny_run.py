"""The whole system as a user starts it: configs/tiny.yaml, real processes, and what it leaves behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import sqlite3
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from areal.__main__ import main
from areal.base.logs import parse_line
from areal.base.metrics import read_metrics
from areal.rollout.recovery import newest_good
from areal.store import codec, open_store, store_url
from tests.books import balanced
from tests.docs.blocks import blocks
from tests.docs.ways import way_of

ROOT = Path(__file__).resolve().parents[2]
STEPS = 40
pytestmark = pytest.mark.timeout(1200)  # a minute on an idle machine; the bound is for a run that hangs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "run"
    command = [sys.executable, "-m", "areal.train", "--config", "configs/tiny.yaml", "--output-dir", str(folder)]
    overrides = [f"total_train_steps={STEPS}", "rollout.agent.gateway_port=0", f"cluster.fileroot={folder.parent}"]
    proxies = {
        "HTTP_PROXY": "http://127.0.0.1:9",
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "NO_PROXY": "10.0.0.0/8",
    }  # T103
    done = subprocess.run(
        [*command, *overrides], cwd=ROOT, env=os.environ | proxies, capture_output=True, text=True, timeout=1100
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stderr == ""
    return folder


def lines(run: Path, part: str) -> list[dict[str, object]]:
    parsed = (parse_line(line) for line in (run / "logs" / "train.log").read_text().splitlines())
    return [line.facts for line in parsed if line is not None and line.part == part]


def test_the_reward_rises(run: Path) -> None:
    rewards = read_metrics(run / "logs" / "metrics.jsonl").series("train/reward").values
    assert len(rewards) == STEPS
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["eval_reward_after"] > summary["eval_reward_before"]


def test_trainer_and_sampler_agree_on_every_token_of_the_current_version(run: Path) -> None:
    table = read_metrics(run / "logs" / "metrics.jsonl")
    assert max(table.series("train/logprob_gap_max").values) < 1e-3
    assert sum(table.series("train/logprob_gap_tokens").values) > 1000


def test_rollout_and_training_overlap_and_no_token_is_older_than_the_lag(run: Path) -> None:
    trained, generated = lines(run, "train"), lines(run, "rollout")
    assert [row["step"] for row in trained] == list(range(STEPS))
    assert max(int(row["lag_max"]) for row in trained) == 1  # it is asynchronous, within the bound
    order = [(row["ts"], part) for part, rows in (("t", trained), ("r", generated)) for row in rows]
    parts = "".join(part for _, part in sorted(order))
    assert "rr" in parts or "tt" in parts, "strictly alternating lines: that is a synchronous run"


def test_the_log_says_what_running_side_by_side_gains(run: Path) -> None:
    said = lines(run, "speed")
    assert [row["step"] for row in said] == [9, 19, 29, 39]
    assert all(
        float(row["gain"]) >= 1 and float(row["generate_seconds"]) > 0 < float(row["train_seconds"]) for row in said
    )
    gains = read_metrics(run / "logs" / "metrics.jsonl").series("speed/gain")
    assert (gains.steps, gains.values) == ([9, 19, 29, 39], [row["gain"] for row in said])


def test_every_recorded_token_is_trained_masked_dropped_or_still_waiting(run: Path) -> None:
    status = balanced(run)
    books = status.books
    assert (status.state, status.steps, status.processes) == ("stopped", STEPS, ())
    logged = read_metrics(run / "logs" / "metrics.jsonl").series("train/trained_tokens").values
    assert books.trained.tokens == sum(logged) > 0
    assert len(books.trained_by_version) == STEPS
    assert books.evaluation.sessions > 0
    summary = json.loads((run / "summary.json").read_text())["accounts"]
    assert summary["trained"]["tokens"] == books.trained.tokens
    units = {row["unit"]: row for row in lines(run, "account")}
    assert units.keys() == {"tokens", "interactions", "sessions", "groups"}
    for row in units.values():
        parts = (int(row[name]) for name in ("trained", "masked", "dropped", "waiting", "open"))
        assert int(row["recorded"]) == sum(parts) > 0


RUN_COMMANDS = sorted({one for block in blocks() for one in block.commands if getattr(way_of(one), "how", "") == "run"})


@pytest.mark.parametrize("command", RUN_COMMANDS)
def test_a_documented_command_on_a_finished_run(
    run: Path, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # where it writes what it writes
    here = re.sub(r"runs/[\w/-]+|\./checkpoints/run_\w+|\bRUN\b", str(run), command.partition(" > ")[0])
    if not here.startswith("areal "):
        here = here.replace("./logs/areal_async", str(run / "logs")).replace("tail -f", "tail -100")
        done = subprocess.run(
            ["bash", "-c", here.replace("python ", f"{sys.executable} ")], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout
        return
    assert main(shlex.split(here)[1:]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out or any(tmp_path.iterdir())


def replayed(run: Path, step: int, *flags: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "areal.replay", str(run), "--step", str(step), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_every_asynchronous_step_is_made_again_bit_for_bit(run: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file() and "sqlite-" not in path.name}
    code, text = replayed(run, STEPS - 1, "--dump", str(tmp_path / "rows.jsonl"))
    assert code == 0, text
    table = read_metrics(run / "logs" / "metrics.jsonl")
    losses, norms = (table.series(f"train/{name}").values for name in ("loss", "grad_norm"))
    made = re.findall(r"^step (\d+): bit-equal: .* loss=(\S+) grad_norm=(\S+)$", text, re.MULTILINE)
    assert [(int(step), float(loss), float(norm)) for step, loss, norm in made] == list(
        zip(range(STEPS), losses, norms, strict=True)
    )
    assert max(table.series("train/lag_max").values) == 1, "no step was asynchronous"
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert sum(sum(row["trained"]) for row in rows) == table.series("train/trained_tokens").values[-1]
    widths = {
        len(row[name]) == len(row["token_ids"]) for row in rows for name in ("logprobs", "versions", "advantages")
    }
    assert widths == {True}
    assert stat.S_IMODE((tmp_path / "rows.jsonl").stat().st_mode) == 0o600
    after = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file() and "sqlite-" not in path.name}
    assert after == before


async def forge(path: Path, *, step: int) -> str:
    """Another log-prob in one session that this step trained; returns its id."""
    async with await open_store(store_url(path)) as store:
        summaries = await store.reading.recent(100_000)
        session = next(one.session.id for one in summaries if one.fate == f"trained at step {step + 1}")
        one = (await store.sessions.interactions(session))[0]
    done = replace(one.completion, logprobs=one.completion.logprobs - np.float32(0.25))
    _, recording = codec.encode(replace(one, completion=done))
    with sqlite3.connect(path) as connection:
        connection.execute(
            "UPDATE recordings SET logprobs = ? WHERE seq = (SELECT seq FROM interactions WHERE id = ?)",
            (recording["logprobs"], one.id),
        )
    connection.close()
    return session


def test_what_was_tampered_with_is_told_by_a_replay(run: Path, tmp_path: Path) -> None:
    forged = tmp_path / "run"
    forged.mkdir()
    shutil.copyfile(run / "store.sqlite", forged / "store.sqlite")
    session = asyncio.run(forge(forged / "store.sqlite", step=1))
    history = (run / "steps.jsonl").read_text()
    assert '"seed":1,' in history
    (forged / "steps.jsonl").write_text(
        history.replace('"seed":1,', '"seed":2,').replace('"lr":0.00015,', '"lr":0.0002,')
    )
    (forged / "logs").mkdir()
    shutil.copyfile(run / "logs" / "metrics.jsonl", forged / "logs" / "metrics.jsonl")
    code, text = replayed(forged, 1)
    assert code == 1, text
    first, second = text.split("step 1: DIFFERS")
    assert "  line 1 of steps.jsonl is not as it was written" in first
    assert "  lr is 0.0002, 0.00015 then" in first
    assert "makes other rows" not in first
    assert f"  session {session!r} of group g" in second
    assert "makes other rows than those that were trained" in second
    assert "  loss is " in second


def test_the_checkpoint_is_a_model_that_transformers_loads(run: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = newest_good(run / "checkpoints")
    assert found is not None
    assert found.step == STEPS
    model = AutoModelForCausalLM.from_pretrained(found.path)
    tokenizer = AutoTokenizer.from_pretrained(found.path)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "3+4="}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=4, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert re.fullmatch(r"\d\d", tokenizer.decode(answer, skip_special_tokens=True))


def test_the_run_folder_is_whole_private_and_holds_no_secret(run: Path) -> None:
    for name in ("config.yaml", "store.sqlite", "summary.json", "reward.png", "loss.png", "logs/gateway.log"):
        assert (run / name).is_file(), name
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert "areal-admin-key" not in (run / "config.yaml").read_text()
    assert not list((run / "processes").glob("*.spec.json")), "the specs hold the run's token"
    keys = re.compile(r"sk-sess-[\w-]+\.[\w-]{8,}")
    for log in (run / "logs").iterdir():
        assert not keys.search(log.read_text(errors="replace")), log


def test_nothing_is_left_running(run: Path) -> None:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            assert str(run) not in (process / "cmdline").read_text()
        except OSError:
            continue
