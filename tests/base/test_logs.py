"""Log lines: the grammar of grep and the plot tool, read back exactly; files from the first second; no secrets."""

from __future__ import annotations

import logging
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.base.errors import ConfigError
from areal.base.logs import Log, announce, format_line, open_log, parse_line, warn
from areal.base.redact import hint, protect, redact

AT = time.mktime((2026, 11, 29, 14, 23, 1, 0, 0, -1)) + 0.221
KEY = "sk-sess-w0.AbCdEfGhIjKlMnOp.QrStUvWxYz"


def test_first_fields_stand_in_the_documented_order_up_to_ts() -> None:
    facts = {"reward": 0.5, "tokens": 18420, "generated": 32, "step": 120, "queue": "5/256"}
    assert format_line("rollout", facts, AT) == (
        "[rollout] step=120 generated=32 tokens=18420 ts=14:23:01.221 reward=0.5 queue=5/256"
    )
    line = format_line("train", {"step": 118, "updated": 32, "loss": 0.421, "version": 4}, AT)
    assert line == "[train] step=118 updated=32 loss=0.421 ts=14:23:01.221 version=4"
    assert format_line("doctor", {"b": 1, "a": 2}, AT) == "[doctor] b=1 a=2 ts=14:23:01.221"


names = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True).filter(lambda name: name != "ts")
values = st.one_of(st.integers(), st.booleans(), st.none(), st.text(), st.floats(allow_nan=False, width=16))


@given(st.dictionaries(names, values, max_size=6), st.sampled_from(["rollout", "train", "other"]))
def test_a_line_reads_back_as_what_was_written(facts: dict[str, object], part: str) -> None:
    line = format_line(part, facts, AT)
    assert "\n" not in line
    parsed = parse_line(line + "\n")
    assert parsed is not None
    assert parsed.part == part
    assert parsed.facts.pop("ts") == "14:23:01.221"
    for name, value in facts.items():
        if isinstance(value, float):
            assert parsed.facts[name] == pytest.approx(value, rel=1e-5)
        else:
            assert parsed.facts[name] == value
            assert type(parsed.facts[name]) is type(value)


def test_scalars_of_numpy_and_non_finite_numbers_are_written_plainly() -> None:
    line = format_line("other", {"a": np.float32(0.5), "b": np.int64(3), "c": float("nan"), "d": 12345.678}, AT)
    assert line.startswith("[other] a=0.5 b=3 c=nan d=12345.7 ts=")


def test_other_lines_are_not_log_lines() -> None:
    for text in ("", "# run_id=x", "(AReaL) RLTrainer INFO: hello a=1", "[train] loose words", "[train] a=1 b"):
        assert parse_line(text) is None


def test_file_exists_at_once_with_a_header_and_the_terminal_gets_the_same_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "logs" / "train.log"
    with open_log(path, run_id="exp/trial/7"):
        assert path.read_text().startswith("# run_id=exp/trial/7 pid=")
        assert path.stat().st_mode & 0o777 == 0o600
        Log("train").line(step=1, updated=2, loss=0.25)
        announce("RLTrainer", "Proxy gateway available at http://127.0.0.1:8090")
        warn("RLTrainer", "queue is full: raise rollout.queue_size")
        lines = path.read_text().splitlines()[1:]  # flushed line by line
    assert lines[0].startswith("[train] step=1 updated=2 loss=0.25 ts=")
    assert lines[1] == "(AReaL) RLTrainer INFO: Proxy gateway available at http://127.0.0.1:8090"
    assert lines[2] == "(AReaL) RLTrainer WARNING: queue is full: raise rollout.queue_size"
    assert capsys.readouterr().out.splitlines() == lines


def test_a_log_that_cannot_be_written_is_a_sentence_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "train.log", tmp_path):  # its folder is a file; it is a folder itself
        with (
            pytest.raises(ConfigError, match=rf"cannot write the log {re.escape(str(path))} \(.+\); choose a folder"),
            open_log(path, run_id="r"),
        ):
            pytest.fail("the log was opened")


def test_a_second_run_appends_and_is_told_apart_by_its_header(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    for run in ("one", "two"):
        with open_log(path, run_id=run, terminal=False):
            Log("train").line(step=0)
    runs = [line.split()[1] for line in path.read_text().splitlines() if line.startswith("#")]
    assert runs == ["run_id=one", "run_id=two"]


def test_lines_of_many_threads_arrive_whole(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    with open_log(path, run_id="r", terminal=False):
        workers = [
            threading.Thread(target=lambda: [Log("other").line(text="x" * 200, n=n) for n in range(50)]) for _ in "1234"
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert sum(parse_line(line) is not None for line in path.read_text().splitlines()) == 200


def test_after_the_block_nothing_is_written(tmp_path: Path) -> None:
    with open_log(tmp_path / "a.log", run_id="r", terminal=False):
        pass
    Log("train").line(step=1)
    assert len((tmp_path / "a.log").read_text().splitlines()) == 1
    assert logging.getLogger("areal").handlers == []


def test_T108_no_secret_reaches_a_log_file_or_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    protect("my-secret-admin-key")
    path = tmp_path / "gateway.log"
    with open_log(path, run_id="r"):
        Log("taotoken").line(model="reward_model", model_id="m", status=401, error=f"bad key {KEY}")
        announce("Gateway", "wrong key sk-sess-WRONG123 and my-secret-admin-key")
        try:
            raise ValueError(f"header was Authorization: Bearer abc{KEY[8:]}")
        except ValueError:
            logging.getLogger("areal.proxy").exception("call failed with x-api-key: hunter2hunter2")
    for text in (path.read_text(), capsys.readouterr().out):
        for secret in (KEY, KEY[8:], "WRONG123", "my-secret-admin-key", "hunter2hunter2"):
            assert secret not in text
        assert "wrong key sk-…G123 and …-key" in text


def test_redaction_leaves_ordinary_text_alone() -> None:
    for text in (
        "task-id-1 and my-task-0",
        "a bearer of news: all well",
        "step=3 desk-lamp",
        "api_keys=3 of 4",
        "api_gateway.api_key: environment variable K is not set",
    ):
        assert redact(text) == text
    assert redact('{"api_key": "abcdefgh", "x": 1}') == '{"api_key": "…", "x": 1}'
    assert redact("sk-你的key") == "sk-…"
    assert redact(redact(f"x {KEY}")) == redact(f"x {KEY}") == f"x sk-…{KEY[-4:]}"


def test_a_hint_shows_four_characters_at_most() -> None:
    assert hint(KEY) == "sk-…WxYz"
    assert hint("short") == "…"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://user:geheim@host:5432/db?sslmode=require", "postgresql://user:…@host:5432/db?sslmode=require"),
        ("postgresql://host/db?user=u&password=geheim&x=1", "postgresql://host/db?user=u&password=…&x=1"),
        ("postgresql://user@host/db", "postgresql://user@host/db"),
    ],
)
def test_of_a_url_only_the_password_is_hidden(url: str, shown: str) -> None:
    assert hint(url) == shown
    protect(url)
    assert redact(f"opened {url} now") == f"opened {shown} now"
