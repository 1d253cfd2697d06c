"""scripts/check_channel.py as a person runs it, against a channel that answers, and that is wrong in each of three ways."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.channel.stub import Reply, StubChannel, chat, error

ROOT = Path(__file__).resolve().parents[2]
KEY = "sk-a-real-key-4711"
Check = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    def run(url: str, *arguments: str, key: str | None = KEY, ids: str = "my-") -> subprocess.CompletedProcess[str]:
        router = (ROOT / "configs" / "taotoken_router.yaml").read_text().replace("https://taotoken.net", url)
        (tmp_path / "router.yaml").write_text(router.replace("your-", ids))
        environment = {name: value for name, value in os.environ.items() if name != "TAOTOKEN_API_KEY"}
        environment |= {} if key is None else {"TAOTOKEN_API_KEY": key}
        words = [
            sys.executable,
            str(ROOT / "scripts" / "check_channel.py"),
            "--config",
            str(tmp_path / "router.yaml"),
            *arguments,
        ]
        return subprocess.run(words, capture_output=True, text=True, env=environment, timeout=120)

    return run


def test_it_prints_the_answer_and_calls_once_as_the_text_does(check: Check) -> None:
    with StubChannel(chat("通了")) as channel:
        done = check(channel.url, key=f"  {KEY}\r\n")
        other = check(channel.url, "--model", "judge_model")
    assert (done.returncode, done.stdout) == (0, "通了\n")
    assert other.returncode == 0
    first, second = channel.calls
    assert (first.path, first.header("authorization")) == ("/api/v1/chat/completions", f"Bearer {KEY}")
    assert first.json == {
        "model": "my-reward-model-id",
        "max_tokens": 16,
        "messages": [{"role": "user", "content": "回复两个字：通了"}],
    }
    assert second.json["model"] == "my-judge-model-id"


def test_it_says_which_of_the_three_is_wrong_and_shows_what_the_channel_said(check: Check) -> None:
    wrong: list[tuple[Reply, int, str]] = [
        (error(401, f"Invalid API key {KEY}"), 3, "the key is wrong: api_gateway.api_key"),
        (
            error(404, "The model `my-reward-model-id` does not exist"),
            5,
            "the model id is wrong: model_routing.reward_model.model_id",
        ),
        (Reply(body=b"<html>the provider's front page</html>"), 4, "the base_url is wrong: api_gateway.base_url"),
        (Reply(body=b'{"id": "x", "object": "odd"}'), 1, '{"id": "x", "object": "odd"}'),
    ]
    with StubChannel() as channel:
        for answer, code, said in wrong:
            channel.script(answer)
            done = check(channel.url)
            assert (done.returncode, done.stdout) == (code, "")
            assert said in done.stderr
            assert KEY not in done.stderr
        assert len(channel.calls) == len(wrong)  # nothing is repeated
    done = check(StubChannel.refused_url())
    assert (done.returncode, "the base_url is wrong" in done.stderr) == (4, True)


@pytest.mark.parametrize(
    ("key", "ids", "said"),
    [
        (None, "my-", "TAOTOKEN_API_KEY is not set"),
        ("sk-a\nbc", "my-", "TAOTOKEN_API_KEY has a line break"),
        ("sk-你的key", "my-", "api_gateway.api_key is still the placeholder"),
        (KEY, "your-", "model_routing.reward_model.model_id is still the placeholder"),
    ],
)
def test_a_configuration_that_cannot_work_is_said_before_any_call(
    check: Check, key: str | None, ids: str, said: str
) -> None:
    with StubChannel() as channel:
        done = check(channel.url, key=key, ids=ids)
        assert (done.returncode, channel.calls) == (2, [])
    assert said in done.stderr
