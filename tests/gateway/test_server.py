"""The gateway as a process: its port, its log, its state file, how it stops and starts again."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from areal.gateway import state
from areal.gateway.attach import attach, find

CHAT = "/gateway/v1/chat/completions"
READY = re.compile(r"Gateway ready at (http://\S+)")


@pytest.fixture(autouse=True)
def state_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):  # T103: of no concern to any call in here
        monkeypatch.setenv(name, "http://127.0.0.1:9")


class Processes:
    """Gateway processes of one test; what is left is killed at its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log_dir = folder / "logs"
        self.all: list[subprocess.Popen[str]] = []

    def start(self, *flags: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "areal.gateway.server", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
        )
        self.all.append(process)
        return process

    async def ready(self, *flags: str) -> tuple[subprocess.Popen[str], str]:
        """Started alone; its URL as printed."""
        process = self.start(*flags, "--log-dir", str(self.log_dir))

        def read() -> str:
            for line in process.stdout:
                if found := READY.search(line):
                    return found[1]
            raise AssertionError(process.stderr.read())

        return process, await asyncio.to_thread(read)

    async def end(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        """Its exit code and stderr."""
        _, errors = await asyncio.to_thread(process.communicate, timeout=60)
        return process.returncode, errors


@pytest.fixture
def processes(tmp_path):
    started = Processes(tmp_path)
    yield started
    for process in started.all:
        process.kill()
        process.communicate()


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def test_T093_a_second_start_on_the_port_ends_with_a_sentence(processes, http):
    first, url = await processes.ready("--port", "0")
    port = port_of(url)
    second = processes.start("--port", str(port), "--log-dir", str(processes.folder / "other"))
    code, errors = await processes.end(second)
    assert code == 2
    assert str(port) in errors
    assert f"pid {first.pid}" in errors
    assert "--port" in errors
    assert len(errors.strip().splitlines()) == 1
    async with http.get(url + "/health") as response:
        assert (await response.json())["workers"] == 0
    assert state.read_gateway(port).pid == first.pid  # the loser left the winner's file alone


async def test_T094_an_ipv6_host_is_printed_and_served_as_one(processes, http):
    _, url = await processes.ready("--host", "::1", "--port", "0")
    assert url.startswith("http://[::1]:")
    async with http.get(url + "/health") as response:
        assert response.status == 200
    handle = await find([f"http://localhost:{port_of(url)}/gateway/v1"], say=print)
    assert handle.url == url


@pytest.mark.parametrize("host", ["::1:9000", "127.0.0.1:9000", "no such host"])
async def test_T094_a_host_that_is_none_is_one_sentence(processes, host):
    code, errors = await processes.end(processes.start("--host", host, "--port", "0"))
    assert code == 2
    assert host in errors
    assert len(errors.strip().splitlines()) == 1


async def test_its_log_and_state_file_are_there_and_private(processes, http):
    process, url = await processes.ready("--port", "0", "--log-level", "debug")
    log = processes.log_dir / "gateway.log"
    assert log.read_text().startswith("# run_id=gateway-")
    assert f"Gateway ready at {url}" in log.read_text()
    file = state.gateway_file(port_of(url))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    secret = json.loads(file.read_text())["secret"]
    async with http.post(url + CHAT, data=b"{}", headers={"x-api-key": "sk-sess-WRONG123"}) as response:
        assert response.status == 503
    process.send_signal(signal.SIGTERM)
    assert (await processes.end(process))[0] == 0
    assert not file.exists()
    text = log.read_text()
    assert "[gateway] route=chat status=503" in text
    assert "WRONG123" not in text  # T108
    assert secret not in text


async def test_a_restart_between_requests_is_not_noticed(processes, run, http):
    await run.add_worker("w0")
    key = run.key()
    first, url = await processes.ready("--port", "0")
    await attach(await find([url], say=print), run.facts)
    for end_it in (signal.SIGTERM, signal.SIGKILL):
        async with http.post(url + CHAT, data=b"{}", headers=run.headers(key)) as response:
            assert response.status == 200
        await run.heartbeat(run.workers["w0"])
        first.send_signal(end_it)
        assert (await processes.end(first))[0] == (0 if end_it is signal.SIGTERM else -signal.SIGKILL)
        first, again = await processes.ready("--port", str(port_of(url)))
        assert again == url
    async with http.post(url + CHAT, data=b"{}", headers=run.headers(key)) as response:
        assert response.status == 200


async def test_sigterm_lets_running_streams_finish(processes, run, http):
    go_on = asyncio.Event()

    async def answer(call):
        await call.begin_stream()
        await call.chunk(b"data: 1\n\n")
        await go_on.wait()
        await call.chunk(b"data: 2\n\n")
        await call.end_stream()

    await run.add_worker("w0", answer)
    process, url = await processes.ready("--port", "0")
    await attach(await find([url], say=print), run.facts)
    async with http.post(url + CHAT, data=b"{}", headers=run.headers()) as response:
        assert await response.content.readexactly(9) == b"data: 1\n\n"
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.5)
        assert process.poll() is None
        go_on.set()
        assert await response.content.read() == b"data: 2\n\n"
    assert (await processes.end(process))[0] == 0


async def test_a_stream_that_outlives_the_grace_is_told_so(run, http):
    async def answer(call):
        await call.begin_stream()
        await call.chunk(b"data: 1\n\n")
        await asyncio.Event().wait()

    await run.add_worker("w0", answer)
    async with run.gateway() as url:  # its grace is one second
        response = await http.post(url + CHAT, data=b"{}", headers=run.headers())
        await response.content.readany()
    assert b"the gateway is stopping" in await response.read()
    response.close()


ROUTER = str(Path(__file__).parents[2] / "configs" / "taotoken_router.yaml")


async def test_a_wrong_config_is_one_line_there_and_in_the_log(processes, monkeypatch):
    monkeypatch.delenv("TAOTOKEN_API_KEY", raising=False)
    process = processes.start("--config", ROUTER, "--port", "0", "--log-dir", str(processes.log_dir))
    code, errors = await processes.end(process)
    assert code == 2
    assert "TAOTOKEN_API_KEY" in errors
    assert len(errors.strip().splitlines()) == 1
    assert "TAOTOKEN_API_KEY" in (processes.log_dir / "gateway.log").read_text()


async def test_the_router_file_starts_it_and_its_key_shows_nowhere(processes, http, monkeypatch):
    monkeypatch.setenv("TAOTOKEN_API_KEY", "upstream-secret-0815")
    _, url = await processes.ready("--config", ROUTER, "--port", "0", "--log-level", "debug")
    async with http.get(url + "/health") as response:
        assert "0815" not in await response.text()
    assert "upstream-secret-0815" not in (processes.log_dir / "gateway.log").read_text()


def spec_of(folder: Path, facts: state.RunFacts, **changes: object) -> Path:
    job = {
        "name": "gateway",
        "run_dir": str(folder),
        "run_token": "run-token-0815",
        "ready_file": str(folder / "gateway.ready.json"),
        "parent_pid": os.getpid(),
        "host": "127.0.0.1",
        "port": 0,
        "log_level": "info",
        "log_dir": str(folder / "logs"),
        "max_body_bytes": 1 << 20,
        "run_id": facts.run_id,
        "store_url": facts.store_url,
        "signing_key_path": facts.signing_key_path,
        "admin_api_key": facts.admin_api_key,
        "model_names": list(facts.model_names),
    } | changes
    file = folder / "gateway.spec.json"
    file.touch(0o600)
    file.write_text(json.dumps(job))
    return file


async def test_as_a_child_it_serves_its_run_from_the_start(processes, run, http, tmp_path):
    await run.add_worker("w0")
    process = processes.start("--spec", str(spec_of(tmp_path, run.facts)))
    ready = tmp_path / "gateway.ready.json"
    while not ready.exists():
        assert process.poll() is None, process.stderr.read()
        await asyncio.sleep(0.02)
    facts = json.loads(ready.read_text())
    assert facts["pid"] == process.pid
    async with http.post(facts["url"] + CHAT, data=b"{}", headers=run.headers()) as response:
        assert response.status == 200
    async with http.get(facts["url"] + "/health") as response:
        assert (await response.json())["workers"] == 1
    assert psutil.Process(process.pid).memory_info().rss < 150 * 2**20
    assert run.facts.admin_api_key not in " ".join(psutil.Process(process.pid).cmdline())
    process.send_signal(signal.SIGTERM)
    assert (await processes.end(process))[0] == 0
    text = (tmp_path / "logs" / "gateway.log").read_text()
    assert text.startswith(f"# run_id={run.facts.run_id} ")
    assert run.facts.admin_api_key not in text


async def test_T109_the_default_admin_key_does_not_start_off_loopback(processes, run, tmp_path):
    file = spec_of(tmp_path, run.facts, host="0.0.0.0", admin_api_key="areal-admin-key")
    code, errors = await processes.end(processes.start("--spec", str(file)))
    assert code == 2
    assert "rollout.agent.admin_api_key" in errors


async def test_a_spec_that_lacks_a_key_is_one_line(processes, run, tmp_path):
    file = spec_of(tmp_path, run.facts)
    file.write_text(
        json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "store_url"})
    )
    code, errors = await processes.end(processes.start("--spec", str(file)))
    assert code == 2
    assert "'store_url'" in errors


def test_the_front_door_is_light():
    """Neither torch nor anything of its size is loaded by the gateway."""
    heavy = ("torch", "transformers", "matplotlib", "tokenizers", "jinja2", "pandas", "openai")
    script = f"import areal.gateway.server, sys; print([name for name in {heavy!r} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_small_answers_are_not_held_back_by_the_kernel(free_listener):
    """asyncio sets TCP_NODELAY only on sockets that name their protocol; without it each answer waits 40 ms for an ACK."""
    assert free_listener.proto == 6


@pytest.fixture
def free_listener():
    from areal.web.address import bind

    listener = bind("127.0.0.1", 0)
    yield listener
    listener.close()
