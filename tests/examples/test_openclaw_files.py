"""The files that OpenClaw and ZeroClaw read, against what those programs take from them and send."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from areal.base.types import Interaction
from areal.web.auth import DEFAULT_INTERNAL_TOKEN
from tests.examples.service import EXAMPLES, Running, calls, run

FOLDER = EXAMPLES / "openclaw"
TOKEN = f"rollout.agent.internal_token={DEFAULT_INTERNAL_TOKEN}"
SHELL: Any = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def at(service: Running, url: str) -> str:
    """The file's address, with the port of this test."""
    assert url.startswith("http://127.0.0.1:8090/")
    return url.replace("http://127.0.0.1:8090", service.url)


def openclaw() -> tuple[dict[str, Any], dict[str, Any]]:
    """The provider and the model that the file makes OpenClaw's default."""
    config = json.loads((FOLDER / "openclaw.json").read_text())
    assert config["models"]["mode"] == "replace"
    provider, _, name = config["agents"]["defaults"]["model"]["primary"].partition("/")
    found = config["models"]["providers"][provider]
    [model] = [one for one in found["models"] if one["id"] == name]
    return found, model


def test_openclaw_takes_address_key_protocol_and_model_from_its_file() -> None:
    provider, model = openclaw()
    assert provider["api"] == "openai-completions"
    assert provider["baseUrl"].endswith("/v1")  # it appends /chat/completions
    assert provider["apiKey"] == DEFAULT_INTERNAL_TOKEN
    assert model["input"] == ["text"]
    assert model["maxTokens"] < model["contextWindow"] == 16000


@pytest.mark.parametrize(
    "words", [("start_session.py",), ("set_reward.py", "--api-key", "sk-sess-x"), ("demo_lifecycle.py",)]
)
@pytest.mark.parametrize("url", ["127.0.0.1:8090", "http://", "http://127.0.0.1:port"])
def test_an_address_that_is_none_is_a_sentence(words: tuple[str, ...], url: str) -> None:
    script, *flags = words
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), url, *flags], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"failed: {url!r} is no address of a service; write it with http://")
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The service of both agents; each is told by what it asks."""
    script = [
        {"when": "hello.txt", "pieces": [calls("shell", command="cat hello.txt"), "<|im_end|>"]},
        {"when": "hello.txt", "pieces": ["Hi!", "<|im_end|>"]},
        {"when": "What is here", "pieces": ["<think>Look.</think>", calls("shell", command="ls"), "<|im_end|>"]},
        {"when": "What is here", "pieces": ["One file.", "<|im_end|>"]},
    ]
    with run(tmp_path_factory.mktemp("openclaw"), "openclaw/config.yaml", TOKEN, script=script) as started:
        yield started


def recorded_by(service: Running, agent: str) -> tuple[Interaction, ...]:
    """The one session of this agent."""
    [(summary, recorded)] = [
        one for one in service.sessions() if one[0].session.tags.get("user_agent", "").startswith(agent)
    ]
    assert summary.session.task_id.startswith("conversation-")
    return recorded


def test_the_next_command_that_is_printed_takes_the_admin_key_that_this_one_took(
    service: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = [sys.executable, str(FOLDER / "start_session.py"), service.url]
    monkeypatch.delenv("SESSION_API_KEY", raising=False)
    for in_variable, flags, printed in (
        ("areal-admin-key", [], f"{service.url} --api-key"),
        ("another", ["--admin-key", "areal-admin-key"], f"{service.url} --admin-key … --api-key"),
    ):
        monkeypatch.setenv("ADMIN_KEY", in_variable)
        done = subprocess.run([*script, *flags], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert printed in done.stdout.splitlines()[-1]
        key = done.stderr.partition("SESSION_API_KEY=")[2].split()[0]
        ended = requests.post(
            f"{service.url}/rl/end_session", json={}, headers={"Authorization": f"Bearer {key}"}, timeout=60
        )
        assert ended.status_code == 200


def test_openclaws_requests_are_one_session_though_its_context_moves(service: Running) -> None:
    """The bodies that `openclaw agent exec` was seen to send, with the file's address and key."""
    provider, model = openclaw()
    context = {"role": "user", "content": [{"type": "text", "text": "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>> Sunday"}]}
    messages: list[Any] = [
        {"role": "system", "content": "<!-- openclaw:attempt:STABLE --> You are a personal assistant."},
        {"role": "user", "content": "[Sun 2026-11-29 16:18 UTC] read hello.txt"},
    ]
    said = _stream(service, provider, model, [*messages, context])
    call = said["tool_calls"][0]
    echoed = {**call, "id": call["id"].replace("_", ""), "type": "function"}
    messages.append({"role": "assistant", "content": None, "tool_calls": [echoed]})
    messages.append({"role": "tool", "tool_call_id": echoed["id"], "content": "Hello"})
    assert _stream(service, provider, model, [*messages, context])["content"] == "Hi!"
    assert [one.branch_reason for one in recorded_by(service, "OpenAI/JS")] == ["", "context_moved"]


def _stream(service: Running, provider: dict[str, Any], model: dict[str, Any], messages: list[Any]) -> dict[str, Any]:
    body = {
        "model": model["id"],
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [SHELL],
        "tool_choice": "auto",
        "max_completion_tokens": model["maxTokens"],
    }
    answer = requests.post(
        at(service, provider["baseUrl"]) + "/chat/completions",
        json=body,
        headers={"authorization": f"Bearer {provider['apiKey']}", "user-agent": "OpenAI/JS 7.15.0"},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    whole: dict[str, Any] = {"content": ""}
    for choice in (choice for line in lines for choice in json.loads(line)["choices"]):
        whole["content"] += choice["delta"].get("content") or ""
        for piece in choice["delta"].get("tool_calls") or ():
            calls_so_far = whole.setdefault("tool_calls", [])
            if piece["index"] == len(calls_so_far):
                calls_so_far.append({"id": piece["id"], "function": {**piece["function"], "arguments": ""}})
            calls_so_far[piece["index"]]["function"]["arguments"] += piece["function"].get("arguments") or ""
    return whole


def test_zeroclaws_requests_with_its_files_address_key_and_model(service: Running) -> None:
    """As the source of its OpenAI-compatible provider builds them: not streamed, a temperature always, reasoning echoed."""
    config = tomllib.loads((FOLDER / "zeroclaw.toml").read_text())
    kind, _, base = config["default_provider"].partition(":")
    assert kind == "custom"
    messages: list[Any] = [
        {"role": "system", "content": "You are ZeroClaw."},
        {"role": "user", "content": "What is here?"},
    ]
    for _ in range(2):
        answer = requests.post(
            at(service, base).rstrip("/") + "/chat/completions",
            json={
                "model": config["default_model"],
                "messages": messages,
                "temperature": 0.7,
                "tools": [SHELL],
                "tool_choice": "auto",
            },
            headers={"authorization": f"Bearer {config['api_key']}", "user-agent": "zeroclaw"},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        messages.append({name: value for name, value in message.items() if value is not None})
        for call in message.get("tool_calls") or ():
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "a.txt"})
    assert messages[-1]["content"] == "One file."
    first, second = recorded_by(service, "zeroclaw")
    assert (first.token_parent, second.token_parent) == (None, first.id)
