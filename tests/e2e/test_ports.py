"""A port scan of a running service that is open to other hosts: they reach the gateway and nothing else, and no inner port does
anything without the run's token."""

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

from areal.base.hosts import names_loopback
from areal.web.address import reachable_host

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
    words += ["rollout.agent.gateway_host=0.0.0.0", "rollout.agent.admin_api_key=an-admin-key-of-this-test"]
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


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def sockets(controller: psutil.Process, kind: str) -> list[tuple[str, int, str]]:
    """(address, port, state) of every socket of the run."""
    return [
        (one.laddr.ip, one.laddr.port, one.status)
        for process in (controller, *controller.children(recursive=True))
        for one in process.net_connections(kind=kind)
        if one.laddr
    ]


def test_only_the_gateway_listens_beyond_loopback(run: tuple[Path, psutil.Process]) -> None:
    folder, controller = run
    listening = {(ip, port) for ip, port, state in sockets(controller, "tcp") if state == psutil.CONN_LISTEN}
    gateway = port_of(urls(folder)["gateway"])
    assert {(ip, port) for ip, port in listening if ip != "127.0.0.1"} == {("0.0.0.0", gateway)}
    assert {port for _, port in listening} == {port_of(url) for url in urls(folder).values()}
    assert urls(folder).keys() == {"gateway", "worker-0", "server-0", "rank-0"}
    assert sockets(controller, "udp") == []


def test_a_scan_from_outside_finds_the_gateway_alone(run: tuple[Path, psutil.Process]) -> None:
    outside = reachable_host("0.0.0.0")
    if names_loopback(outside):
        pytest.skip("this machine has no address but loopback")
    found = set()
    for name, url in urls(run[0]).items():
        with socket.socket() as link:
            link.settimeout(10)
            if link.connect_ex((outside, port_of(url))) == 0:
                found.add(name)
    assert found == {"gateway"}
    for path in ("/metrics", "/control/challenge"):
        request = urllib.request.Request(f"http://{outside}:{port_of(urls(run[0])['gateway'])}{path}")
        request.method, request.data = ("POST", b"{}") if "control" in path else ("GET", None)
        with pytest.raises(urllib.error.HTTPError) as refused:
            OPENER.open(request, timeout=60)
        assert refused.value.code == 403
        refused.value.close()


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
        OPENER.open(request, timeout=60)
    assert refused.value.code == 401
    refused.value.close()


def test_a_rank_hangs_up_on_who_does_not_say_hello(run: tuple[Path, psutil.Process]) -> None:
    host, _, port = urls(run[0])["rank-0"].removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as link:
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
