"""A port scan of a running run: everything listens on loopback, and no inner port does anything without the run's token."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
INNER = [
    ("server-0", "GET", "/health"),
    ("server-0", "POST", "/inference/v1/generate"),
    ("server-0", "POST", "/load_weights"),
    ("server-0", "POST", "/pause"),
    ("worker-0", "POST", "/agents/run"),
    ("worker-0", "POST", "/rl/start_session"),
    ("worker-0", "POST", "/v1/chat/completions"),
    ("worker-0", "GET", "/v1/models"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, psutil.Process]]:
    folder = tmp_path_factory.mktemp("ports") / "run"
    words = ["-m", "areal.train", "--output-dir", str(folder), "actor.path=tiny-qwen3", "rollout.agent.mode=online"]
    words += ["rollout.agent.gateway_port=0", f"cluster.fileroot={folder.parent}", "rollout.native.max_context=128"]
    with subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        try:
            log, deadline = folder / "logs" / "train.log", time.monotonic() + 120
            while not (log.exists() and "Proxy gateway available" in log.read_text()):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield folder, psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            finally:
                process.kill()


def urls(folder: Path) -> dict[str, str]:
    ready = (folder / "processes").glob("*.ready.json")
    return {path.name.removesuffix(".ready.json"): json.loads(path.read_text())["url"] for path in ready}


def test_everything_listens_on_loopback_and_nowhere_else(run: tuple[Path, psutil.Process]) -> None:
    folder, controller = run
    listening = {
        (one.laddr.ip, one.laddr.port)
        for process in (controller, *controller.children(recursive=True))
        for one in process.net_connections(kind="inet")
        if one.status == psutil.CONN_LISTEN
    }
    assert {address for address, _ in listening} == {"127.0.0.1"}
    assert {port for _, port in listening} == {int(url.rpartition(":")[2]) for url in urls(folder).values()}
    assert urls(folder).keys() == {"gateway", "worker-0", "server-0", "rank-0"}


@pytest.mark.parametrize(("name", "method", "path"), INNER)
@pytest.mark.parametrize("key", [None, "guess"])
def test_no_inner_port_does_anything_without_the_runs_token(
    run: tuple[Path, psutil.Process], name: str, method: str, path: str, key: str | None
) -> None:
    request = urllib.request.Request(urls(run[0])[name] + path, method=method)
    request.data = b"{}" if method == "POST" else None
    if key:
        request.add_header("authorization", f"Bearer {key}")
    with pytest.raises(urllib.error.HTTPError) as refused:
        OPENER.open(request, timeout=20)
    assert refused.value.code == 401
    refused.value.close()


def test_a_rank_hangs_up_on_who_does_not_say_hello(run: tuple[Path, psutil.Process]) -> None:
    host, _, port = urls(run[0])["rank-0"].removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as link:
        link.sendall(b"GET / HTTP/1.1\r\n\r\n")
        link.shutdown(socket.SHUT_WR)
        assert link.recv(100) == b""


def test_no_secret_stands_on_a_command_line(run: tuple[Path, psutil.Process]) -> None:
    folder, controller = run
    tokens = {json.loads(path.read_text())["run_token"] for path in (folder / "processes").glob("*.spec.json")}
    assert len(tokens) == 1
    for process in controller.children(recursive=True):
        assert not any(token in " ".join(process.cmdline()) for token in tokens)
        assert (folder / "processes").stat().st_mode & 0o077 == 0
    assert os.stat(folder / "store.sqlite").st_mode & 0o077 == 0
