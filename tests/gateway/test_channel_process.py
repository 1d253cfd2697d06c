"""The gateway process with an upstream channel: alone from a router file, and as the child of a run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from areal.config.run import RunConfig
from areal.inference.upstream.routes import upstream_names
from areal.launch import channel_models, without_channel_key
from tests.channel.stub import StubChannel, chat

ROOT = Path(__file__).resolve().parents[2]
KEY = "sk-a-real-key-4711"
READY = re.compile(r"Gateway ready at (http://\S+)")


class Process:
    """One gateway; `url` once it is ready."""

    def __init__(self, folder: Path, *flags: str, **environment: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "areal.gateway.server", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=kept | {"XDG_STATE_HOME": str(folder / "state")} | environment,
        )
        self.url = ""

    def ready(self) -> str:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            if found := READY.search(line):
                threading.Thread(target=self.popen.stdout.read, daemon=True).start()
                return found[1]
        raise AssertionError(self.popen.communicate()[1])

    def end(self) -> tuple[int, str]:
        self.popen.send_signal(signal.SIGTERM)
        _, errors = self.popen.communicate(timeout=60)
        return self.popen.returncode, errors


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Process]]:
    every: list[Process] = []
    yield every
    for process in every:
        process.popen.kill()
        process.popen.communicate()


def router_file(folder: Path, base_url: str) -> str:
    text = (ROOT / "configs" / "taotoken_router.yaml").read_text().replace("https://taotoken.net/api", base_url)
    path = folder / "router.yaml"
    path.write_text(text.replace("your-", "my-"))
    return str(path)


def ask(url: str, key: str, model: str = "reward_model") -> requests.Response:
    session = requests.Session()
    session.trust_env = False
    body = {"model": model, "messages": [{"role": "user", "content": "hm"}]}
    return session.post(
        f"{url}/gateway/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60
    )


def test_T102_T103_alone_it_serves_the_channel_through_the_environments_proxy_with_a_clean_key(
    started: list[Process], tmp_path: Path
) -> None:
    with StubChannel(chat("8")) as proxy:  # which sees the whole address in each request
        flags = (
            "--config",
            router_file(tmp_path, "http://channel.invalid/api/"),
            "--port",
            "0",
            "--log-dir",
            "logs",
            "--log-level",
            "debug",
        )
        process = Process(tmp_path, *flags, TAOTOKEN_API_KEY=f" {KEY}\r\n", HTTP_PROXY=proxy.url, NO_PROXY="10.0.0.0/8")
        started.append(process)
        url = process.ready()
        answer = ask(url, "gateway-internal-token")
        assert (answer.status_code, answer.json()["choices"][0]["message"]["content"]) == (200, "8")
        assert requests.get(f"{url}/health", timeout=60).json()["channel"] == ["judge_model", "reward_model"]
        (call,) = proxy.calls
    assert call.path == "http://channel.invalid/api/v1/chat/completions"
    assert call.header("authorization") == f"Bearer {KEY}"
    assert ask(url, "gateway-internal-token", "default").status_code == 404
    assert process.end()[0] == 0
    log = (tmp_path / "logs" / "gateway.log").read_text()
    found = re.search(
        r"^\[taotoken\] model=reward_model model_id=my-reward-model-id status=200 elapsed_ms=\S+ attempts=1 ts=\S+ ",
        log,
        re.M,
    )
    assert found, log
    assert KEY not in log


def test_T102_a_key_with_a_line_break_inside_ends_the_start(started: list[Process], tmp_path: Path) -> None:
    process = Process(
        tmp_path, "--config", router_file(tmp_path, "http://h"), "--port", "0", TAOTOKEN_API_KEY="sk-a\nbc"
    )
    started.append(process)
    _, errors = process.popen.communicate(timeout=60)
    assert process.popen.returncode == 2
    assert "environment variable TAOTOKEN_API_KEY has a line break" in errors
    assert "sk-a" not in errors
    assert "Traceback" not in errors


def run_spec(folder: Path, url: str) -> dict[str, Any]:
    """As areal/launch.py writes it."""
    routing = {"reward_model": {"model_id": "my-reward"}}
    return {
        "name": "gateway", "run_dir": str(folder), "run_token": "t" * 32, "ready_file": str(folder / "ready.json"), "parent_pid": os.getpid(),
        "host": "127.0.0.1", "port": 0, "log_dir": str(folder / "logs"), "store_url": f"sqlite:///{folder}/store.sqlite",
        "signing_key_path": str(folder / "signing.key"), "admin_api_key": "an-admin-key", "run_id": "e/t", "model_names": ["default"],
        "max_body_bytes": 1 << 20, "channel_token": "sk-channel-0815-0815", "channel_models": {"reward_model": "my-reward"},
        "api_gateway": {"base_url": url, "api_key": KEY}, "model_routing": routing,
    }  # fmt: skip


def test_the_gateway_of_a_run_has_the_runs_channel_and_opens_it_to_the_runs_token(
    started: list[Process], tmp_path: Path
) -> None:
    with StubChannel(chat("8")) as channel:
        spec = tmp_path / "spec.json"
        spec.write_text(json.dumps(run_spec(tmp_path, channel.url)))
        spec.chmod(0o600)
        process = Process(tmp_path, "--spec", str(spec))
        started.append(process)
        while not (tmp_path / "ready.json").exists():
            assert process.popen.poll() is None, process.popen.communicate()[1]
            time.sleep(0.02)
        url = json.loads((tmp_path / "ready.json").read_text())["url"]
        assert ask(url, "sk-channel-0815-0815").status_code == 200
        assert ask(url, "gateway-internal-token").status_code == 401
        assert len(channel.calls) == 1
    process.end()
    log = (tmp_path / "logs" / "gateway.log").read_text()
    assert "[taotoken] model=reward_model" in log
    assert "sk-channel-0815" not in log


def test_a_run_needs_the_model_that_rewards_it() -> None:
    tree: dict[str, Any] = {
        "api_gateway": {"base_url": "http://h", "api_key": KEY},
        "model_routing": {"judge_model": {"model_id": "large"}, "reward_model": {"model_id": "small"}},
    }
    needed = [
        channel_models(RunConfig.model_validate(tree | {"rollout": {"agent": {"reward_source": source}}}))
        for source in ("judge_model", "client")
    ]
    assert needed == [{"judge_model": "large"}, {}]


def test_T108_a_worker_knows_the_channels_names_and_not_its_key() -> None:
    """It runs agents' code; only the gateway asks the channel."""
    told = without_channel_key(
        RunConfig.model_validate(
            {
                "api_gateway": {"base_url": "http://h", "api_key": KEY},
                "model_routing": {"judge_model": {"model_id": "j"}},
            }
        )
    )
    assert KEY not in told.model_dump_json()
    assert upstream_names(told.api_gateway, told.model_routing) == {"judge_model", "j"}
    assert without_channel_key(RunConfig()).api_gateway is None
