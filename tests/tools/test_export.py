"""`areal export`: what comes out is what was recorded, through the one path that the HTTP route takes."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from areal.base.types import Completion, Interaction, Limits, Message, Session, SessionRequest, Share, Version
from areal.proxy import records
from areal.store import open_store, store_url
from areal.store.base import SessionSummary
from areal.tools import export
from areal.tools.export import ONLY, main
from areal.tools.parquet_rows import SCHEMA

PAGE = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
A_SESSION = Session("s", "t", "", 0, "k", "w", "train", {}, 0.0, 0.0, None, None, 0)


def turn(session_id: str, index: int, prompt: int) -> Interaction:
    """Two turns whose prompts extend each other, so that concat makes one row of them."""
    ids = np.arange(prompt + 3, dtype=np.int32)
    floats = np.array([-0.5, -0.25, np.nan], np.float32)
    done = Completion(ids[-3:], floats, np.full(3, 7, np.int32), np.ones(3, np.float32), 0.7, "stop")
    said = (Message("user", f"{index}?"),)
    one = Interaction(f"{session_id}/{index}", session_id, index, ids[:-3], done, said, Message("assistant", "!"))
    return replace(one, credit_parent=f"{session_id}/{index - 1}" if index else None)


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    async with await open_store(store_url(tmp_path / "store.sqlite")) as store:
        await store.training.set_limits(Limits(max_concurrent=9, max_lag=2, batch_groups=2))
        for name, purpose in (("a", "train"), ("b", "train"), ("empty", "train"), ("trial", "eval"), ("runs", "train")):
            await store.sessions.begin(SessionRequest(name, f"k-{name}", "w0", purpose=purpose, tags={"user": name}))
            for index in range(0 if name == "empty" else 2):
                await store.sessions.add(turn(name, index, 2 + 3 * index))
            if name != "runs":
                await store.sessions.end(name, "ended") if name == "empty" else await store.sessions.reward(
                    name, 1.0, None
                )
                await store.sessions.end(name, "ended")
        await store.sessions.exclude("b", "asked", delete=True)
        [group] = await store.training.ready()
        await store.training.account("a", {"": Share(4, 2), "stale": Share(2, 0)})
        await store.training.advance(Version(1, 1, "x"), [group.id])
    (tmp_path / "config.yaml").write_text(
        "rollout: {agent: {export_style: concat, turn_discount: 0.5, reward_clip: 0.75}}\n"
    )
    return tmp_path


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


async def test_every_session_comes_out_as_the_route_gives_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "PAGE", 2)
    async with await open_store(store_url(run / "store.sqlite"), read_only=True) as store:
        found = [body async for body in export.sessions(store, export.How("concat", 0.5, None))]
    assert [body["session_id"] for body in found] == ["a", "b", "empty", "trial", "runs"]


def test_lines_are_those_of_the_route_with_the_account(
    run: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(["--run", str(run)]) == 0
    a, b, empty, trial, runs = lines(capsysbinary.readouterr().out.decode())
    assert (a["account"], a["fate"], a["tags"]) == (
        {"trained": 4, "masked": {"stale": 2}},
        "trained at step 1",
        {"user": "a"},
    )
    assert (b["fate"], b["interactions"], b["drop_reason"]) == ("dropped (excluded), content deleted", [], "excluded")
    assert (empty["drop_reason"], trial["fate"], runs["fate"]) == ("empty", "evaluation", "running")
    # The run's own style, discount and clip.
    [row] = a["trajectories"]
    assert (a["style"], a["discount"], a["reward_clip"]) == ("concat", 0.5, 0.75)
    assert row["token_ids"] == list(range(8))
    assert [span["reward"] for span in row["spans"]] == [0.375, 0.75]
    assert a["interactions"][0]["logprobs"] == [-0.5, -0.25, None]
    assert main(["--run", str(run), "--style", "individual", "--discount", "1", "--only", "trained"]) == 0
    [alone] = lines(capsysbinary.readouterr().out.decode())
    assert len(alone["trajectories"]) == 2
    assert (alone["style"], alone["discount"]) == ("individual", 1.0)
    assert alone.keys() - {"account", "drop_reason"} == _route_keys()


def _route_keys() -> set[str]:
    return set(records.exported(SessionSummary(A_SESSION, 0, None, "running"), (), "concat", 1.0))


@pytest.mark.parametrize(("account", "trained"), [({}, False), ({"stale": 5}, False), ({"stale": 5, "": 1}, True)])
def test_a_session_of_which_every_token_is_masked_was_not_trained(account: dict[str, int], trained: bool) -> None:
    assert ONLY["trained"](SessionSummary(A_SESSION, 5, None, "trained at step 1", account=account)) is trained


def test_parquet_has_the_same_rows(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "rows.parquet"
    target.parent.mkdir()
    assert main(["--run", str(run), "--format", "parquet", "--output", str(target)]) == 0
    table = pq.read_table(target).to_pylist()
    assert [(row["session_id"], row["row"]) for row in table] == [
        ("a", 0), ("b", None), ("empty", None), ("trial", 0), ("runs", 0),
    ]  # fmt: skip
    first = table[0]
    assert first["token_ids"] == list(range(8))
    assert first["loss_mask"] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert first["versions"] == [-1, -1, *[7] * 6]
    assert (first["tags"], first["masked_tokens"], first["trained_tokens"]) == ([("user", "a")], [("stale", 2)], 4)
    assert [span["reward"] for span in first["spans"]] == [0.375, 0.75]
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert [path.name for path in target.parent.iterdir()] == ["rows.parquet"]


def test_what_cannot_be_done_is_said(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, sentence in (
        (["--run", str(tmp_path / "none")], "has no store.sqlite"),
        (["--run", str(run), "--format", "parquet"], "needs --output FILE"),
        (["--run", str(run), "--discount", "2"], "must be from 0 to 1"),
        (["--run", str(run), "--output", str(tmp_path / "no" / "x.jsonl")], "cannot write"),
    ):
        assert main(words) == 2
        assert sentence in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "areal.tools.parquet_rows", raising=False)
    assert main(["--run", str(run), "--format", "parquet", "--output", str(tmp_path / "x")]) == 2
    assert "pip install 'areal[parquet]'" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error(run: Path) -> None:
    command = f"{sys.executable} -m areal export --run {run} | head -c 10"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=400)
    assert (done.returncode, len(done.stdout)) == (0, 10)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["export --run", "status"])
def test_a_full_disk_below_the_output_is_one_line(run: Path, command: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "areal", *command.split(), str(run)], stdout=full, stderr=subprocess.PIPE, text=True
        )
    name = command.split()[0]
    assert (done.returncode, done.stderr) == (1, f"areal {name}: [Errno 28] No space left on device\n")


def test_what_is_no_file_is_not_replaced_and_a_link_is_followed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe, link, real = tmp_path / "pipe", tmp_path / "link", tmp_path / "real"
    os.mkfifo(pipe)
    assert main(["--run", str(run), "--output", str(pipe)]) == 2
    assert "pipe is no file; name one, or leave --output out" in capsys.readouterr().err
    assert pipe.is_fifo()
    link.symlink_to(real)
    assert main(["--run", str(run), "--output", str(link)]) == 0
    assert link.is_symlink()
    assert len(real.read_text().splitlines()) > 0


def test_the_page_names_every_option_and_column() -> None:
    assert [f"`{name}`" for name in SCHEMA.names if f"`{name}`" not in PAGE] == []
    assert [name for name in ONLY if f"`{name}`" not in PAGE] == []
    options = {word for action in export._parser()._actions for word in action.option_strings} - {"-h", "--help"}
    assert [option for option in options if not re.search(rf"`{option}\b", PAGE)] == []
