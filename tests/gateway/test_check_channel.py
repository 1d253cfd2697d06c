"""scripts/check_channel.py: once as a person runs it, then its main in this process, against a channel that is wrong in each of three ways."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.channel.stub import Reply, StubChannel, chat, error

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_channel.py"
KEY = "a-real-key-4711"  # not of the shape that is hidden anyway
Said = tuple[int, str, str]  # exit code, stdout, stderr


def router(folder: Path, url: str, ids: str = "my-") -> list[str]:
    """The words that name the printed router file, with this channel's address and other model ids."""
    text = (SCRIPT.parents[1] / "configs" / "taotoken_router.yaml").read_text().replace("https://taotoken.net", url)
    (folder / "router.yaml").write_text(text.replace("your-", ids))
    return ["--config", str(folder / "router.yaml")]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    main = runpy.run_path(str(SCRIPT))["main"]

    def run(url: str, *arguments: str, key: str | None = KEY, ids: str = "my-") -> Said:
        monkeypatch.setattr(sys, "argv", ["check_channel.py", *router(tmp_path, url, ids), *arguments])
        monkeypatch.delenv("TAOTOKEN_API_KEY", raising=False)
        if key is not None:
            monkeypatch.setenv("TAOTOKEN_API_KEY", key)
        return main(), *capsys.readouterr()

    return run


def test_it_prints_the_answer_and_calls_once_as_the_text_does(tmp_path: Path) -> None:
    with StubChannel(chat("通了")) as channel:
        words = [sys.executable, str(SCRIPT), *router(tmp_path, channel.url)]
        environment = os.environ | {"TAOTOKEN_API_KEY": f"  {KEY}\r\n"}
        done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=300)
        (call,) = channel.calls
    assert (done.returncode, done.stdout) == (0, "通了\n"), done.stderr
    assert (call.path, call.header("authorization")) == ("/api/v1/chat/completions", f"Bearer {KEY}")
    question = [{"role": "user", "content": "回复两个字：通了"}]
    assert call.json == {"model": "my-reward-model-id", "max_tokens": 16, "messages": question}


def test_it_says_which_of_the_three_is_wrong_and_shows_what_the_channel_said(check: Callable[..., Said]) -> None:
    wrong: list[tuple[Reply, int, str]] = [
        (error(401, f"Invalid API key {KEY}"), 3, "the key is wrong: api_gateway.api_key"),
        (
            error(404, "The model `my-judge-model-id` does not exist"),
            5,
            "the model id is wrong: model_routing.judge_model.model_id",
        ),
        (Reply(404, b"not here", headers=()), 4, "the base_url is wrong: api_gateway.base_url"),
        (Reply(body=b"<html>the provider's front page</html>"), 4, "the base_url is wrong: api_gateway.base_url"),
        (Reply(body=b'{"id": "x", "object": "odd"}'), 1, '{"id": "x", "object": "odd"}'),
        (error(503, "overloaded"), 1, "overloaded"),
    ]
    with StubChannel() as channel:
        for answer, code, said in wrong:
            channel.script(answer)
            done = check(channel.url, "--model", "judge_model")
            assert done[:2] == (code, "")
            assert said in done[2]
            assert KEY not in done[2]
        assert [call.json["model"] for call in channel.calls] == ["my-judge-model-id"] * len(
            wrong
        )  # nothing is repeated
    code, _, said = check(StubChannel.refused_url())
    assert (code, "the base_url is wrong" in said) == (4, True)


def test_it_goes_the_way_that_the_gateway_goes(check: Callable[..., Said], monkeypatch: pytest.MonkeyPatch) -> None:
    """A redirect that an SDK follows, and proxies as the gateway reads them."""
    with StubChannel(chat("通了")) as channel, StubChannel() as other:
        other.default = Reply(308, b"", headers=(("Location", f"{channel.url}/v1/chat/completions"),))
        code, _, said = check(other.url)
        assert (code, "put the address that it names into api_gateway.base_url" in said) == (4, True), said
        monkeypatch.setenv("all_proxy", "socks5://me:hunter22@127.0.0.1:9")
        monkeypatch.setenv("no_proxy", "")
        code, _, said = check(channel.url)
        assert (code, "is no HTTP proxy" in said, "hunter22" in said) == (2, True, False), said
        assert channel.calls == []
        monkeypatch.setenv("no_proxy", "127.0.0.0/8")
        assert check(channel.url)[0] == 0


def test_T108_half_a_key_at_the_end_of_a_long_answer_is_not_shown(check: Callable[..., Said]) -> None:
    with StubChannel(Reply(401, b"x" * 1990 + KEY.encode())) as channel:
        assert KEY[:8] not in check(channel.url)[2]


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
    check: Callable[..., Said], key: str | None, ids: str, said: str
) -> None:
    with StubChannel() as channel:
        code, _, shown = check(channel.url, key=key, ids=ids)
        assert (code, channel.calls) == (2, [])
    assert said in shown
