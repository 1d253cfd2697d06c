"""The stand-in channel does what its header says: other tests count on it."""

from __future__ import annotations

import gzip
import threading

import pytest
import requests

from tests.channel.stub import Reply, StubChannel, chat, error, text_stream, zipped


def ask(url: str, **body: object) -> requests.Response:
    return requests.post(f"{url}/v1/chat/completions", json={"model": "m", **body}, headers={"X-A": "b"}, timeout=30)


def test_calls_are_answered_as_scripted_and_kept_as_they_came() -> None:
    with StubChannel(chat("yes")) as channel:
        channel.script(error(429, "slow", retry_after="7"), lambda call: chat(str(call.number)))
        refused, second, third = (ask(channel.url, n=n) for n in range(3))
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "7")
        assert [each.json()["choices"][0]["message"]["content"] for each in (second, third)] == ["1", "yes"]
        assert [call.json["n"] for call in channel.calls] == [0, 1, 2]
        assert channel.calls[0].path == "/v1/chat/completions"
        assert channel.calls[0].header("x-a") == "b"


def test_bytes_headers_and_framing_are_the_scripts() -> None:
    with StubChannel(text_stream("a", "b")) as channel:
        stream = ask(channel.url)
        assert stream.headers["transfer-encoding"] == "chunked"
        assert stream.content.count(b"data: ") == 6
        channel.script(
            Reply(403, b"not here", headers=()),
            zipped(chat("z")),
            Reply(body=b"half", hang_up=True),
            Reply(hang_up=True),
        )
        bare = ask(channel.url)
        assert (bare.status_code, bare.text, "content-type" in bare.headers) == (403, "not here", False)
        raw = requests.post(channel.url, json={}, stream=True, timeout=30)
        assert b'"z"' in gzip.decompress(raw.raw.read())
        for _ in range(2):
            with pytest.raises(requests.exceptions.RequestException):
                ask(channel.url)


def test_a_gate_holds_the_answer_back_and_calls_at_once_are_counted() -> None:
    gate = threading.Event()
    with StubChannel(Reply(body=b"{}", gate=gate)) as channel:
        asking = [threading.Thread(target=ask, args=(channel.url,)) for _ in range(3)]
        for each in asking:
            each.start()
        channel.wait_for_calls(3)
        assert channel.most_at_once == 3
        gate.set()
        for each in asking:
            each.join(30)


def test_a_refused_url_refuses() -> None:
    with pytest.raises(requests.exceptions.ConnectionError):
        ask(StubChannel.refused_url())
