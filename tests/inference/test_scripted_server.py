"""The scripted server as a real process, asked through the real client: streams, aborts, pauses, failures, versions."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from areal.base.errors import BackendError, BackendTimeout, BadRequest, ContextOverflow
from areal.base.types import GenerateRequest, SamplingParams, TokenChunk
from areal.chat import scripted_renderer
from areal.inference import HttpBackend, connect
from tests.ports import quiet_port

TOKEN = "run-token"
SCRIPT = [
    {"settings": {"max_context": 64}},
    {"pieces": ["Hel", "lo", "<|im_end|>"], "logprobs": [-0.25, -0.5, -0.125]},
    {"pieces": ["second"], "finish": "length", "top": [[["second", -0.1], ["other", "-inf"], [5, None]]]},
    {"when": "count", "pieces": list("0123456789"), "delay_ms": 20},
    {"when": "endless", "pieces": ["x"] * 2000, "delay_ms": 20},
    {"when": "refuse", "pieces": [], "fail": {"at": 0, "status": 503, "message": "no GPU"}},
    {"when": "teapot", "pieces": [], "fail": {"at": 0, "status": 400, "message": "bad prompt"}},
    {"when": "break", "pieces": ["a", "b", "c"], "fail": {"at": 2, "message": "lost GPU"}},
    {"when": "nothing", "pieces": []},
    {"when": "wait", "pieces": [{"text": "late", "delay_ms": 60_000}]},
]


class Server:
    """The process, its address and its script."""

    def __init__(self, folder: Path, script: Path, **job: Any) -> None:
        ready, spec = folder / "ready.json", folder / "spec.json"
        content = {"name": "server-0", "run_dir": str(folder), "run_token": TOKEN, "ready_file": str(ready)}
        spec.touch(mode=0o600)
        spec.write_text(json.dumps({**content, "parent_pid": os.getpid(), "path": str(script), **job}))
        command = [sys.executable, "-m", "areal.inference.scripted.server", "--spec", str(spec)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        while not ready.exists():
            if self.process.poll() is not None:
                assert self.process.stderr is not None
                raise RuntimeError(self.process.stderr.read())
            time.sleep(0.01)
        self.facts = json.loads(ready.read_text())
        self.url: str = self.facts["url"]
        self.renderer = scripted_renderer(script)

    def request(self, text: str, session: str, **sampling: Any) -> GenerateRequest:
        prompt = self.renderer.tokenizer.encode(text)
        params = SamplingParams(**{"max_tokens": 5000, "temperature": 1.0, **sampling})
        return GenerateRequest(f"req-{session}", session, np.array(prompt, dtype=np.int32), params, 1)

    async def calls(self) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with aiohttp.ClientSession() as session, session.get(self.url + "/calls", headers=headers) as response:
            return dict(await response.json())

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return self.process.wait(timeout=60)


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("scripted")
    server = Server(folder, write(folder / "script.jsonl", SCRIPT), version=4, ping_s=0.1)
    yield server
    assert server.stop() == 0


async def collect(backend: Any, request: GenerateRequest, into: list[TokenChunk] | None = None) -> list[TokenChunk]:
    """All chunks; those before a failure are left in `into`."""
    received = [] if into is None else into
    async with aclosing(backend.generate(request)) as chunks:
        async for chunk in chunks:
            received.append(chunk)
    return received


def ids(chunks: list[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


@pytest.fixture
async def backend(server: Server) -> Any:
    backend = HttpBackend("scripted", server.url, TOKEN, silence_s=20)
    yield backend
    await backend.close()


async def test_lines_are_played_in_order_for_each_session(server: Server, backend: HttpBackend) -> None:
    assert server.facts["model"] == "scripted"
    first = await collect(backend, server.request("hi", "order-1"))
    assert server.renderer.tokenizer.decode(ids(first), skip_special=False) == "Hello<|im_end|>"
    assert [float(chunk.logprobs[0]) for chunk in first] == [-0.25, -0.5, -0.125]
    assert [chunk.finish_reason for chunk in first] == [None, None, "stop"]
    second = await collect(backend, server.request("hi", "order-1", top_logprobs=3))
    assert second[-1].finish_reason == "length"
    vocabulary = server.renderer.tokenizer
    other = vocabulary.encode("other")[0]
    assert second[0].top == (((ids(second)[0], -0.1), (other, -np.inf), (5, -np.inf)),)
    assert ids(await collect(backend, server.request("hi", "order-2"))) == ids(first)
    assert ids(await collect(backend, server.request("hi", "order-1"))) == ids(first)  # starts over


async def test_every_token_has_the_version_it_was_sent_under(server: Server, backend: HttpBackend) -> None:
    before = (await backend.health()).version
    versions: list[int] = []
    async with aclosing(backend.generate(server.request("count", "swap"))) as chunks:
        async for chunk in chunks:
            versions += chunk.versions
            if len(versions) == 3:
                assert await backend.load_weights({"kind": "none"}, before + 1) == before + 1
    assert len(versions) == 10
    assert versions == sorted(versions)
    assert (versions[0], versions[-1]) == (before, before + 1)


async def test_a_paused_stream_waits_behind_pings_and_goes_on(server: Server, backend: HttpBackend) -> None:
    impatient = HttpBackend("scripted", server.url, TOKEN, silence_s=2.5)
    seen: list[int] = []
    async with aclosing(impatient.generate(server.request("count", "pause"))) as chunks:
        async for chunk in chunks:
            seen += ids([chunk])
            if len(seen) == 2:
                await backend.pause()
                resumed = asyncio.create_task(resume_later(backend, 5.0))  # longer than the client's patience
    await resumed
    await impatient.close()
    assert server.renderer.tokenizer.decode(seen) == "0123456789"


async def resume_later(backend: HttpBackend, seconds: float) -> None:
    await asyncio.sleep(seconds)
    assert (await backend.health()).waiting >= 1
    await backend.resume()


async def test_leaving_the_stream_aborts_the_request(server: Server, backend: HttpBackend) -> None:
    aborted = (await server.calls())["aborted"]
    async with aclosing(backend.generate(server.request("endless", "leave"))) as chunks:
        async for _ in chunks:
            break
    received: list[TokenChunk] = []
    cancelled = asyncio.create_task(collect(backend, server.request("endless", "cancel"), received))
    async with asyncio.timeout(60):
        while not received:  # noqa: ASYNC110 (filled by the other task)
            await asyncio.sleep(0.01)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    async with asyncio.timeout(60):
        while (calls := await server.calls())["aborted"] < aborted + 2 or calls["running"]:  # noqa: ASYNC110 (a process)
            await asyncio.sleep(0.02)
    states = {call["session_id"]: call for call in calls["calls"]}
    assert states["leave"]["state"] == states["cancel"]["state"] == "aborted"
    assert states["leave"]["sent"] < 1000


async def test_max_tokens_and_stop_ids_end_the_answer(server: Server, backend: HttpBackend) -> None:
    short = await collect(backend, server.request("count", "limit", max_tokens=3))
    assert (len(ids(short)), short[-1].finish_reason) == (3, "length")
    stop = server.renderer.tokenizer.encode("4")[0]
    stopped = await collect(backend, server.request("count", "stop", stop_token_ids=(stop,)))
    assert (ids(stopped)[-1], len(ids(stopped)), stopped[-1].finish_reason) == (stop, 5, "stop")
    [nothing] = await collect(backend, server.request("nothing", "nothing"))
    assert (len(nothing.token_ids), nothing.finish_reason) == (0, "stop")


async def test_failures_keep_their_status_before_the_first_token_and_their_reason_after(
    server: Server, backend: HttpBackend
) -> None:
    with pytest.raises(BackendError, match="no GPU") as refused:
        await collect(backend, server.request("refuse", "f1"))
    assert refused.value.status == 503
    with pytest.raises(BadRequest, match="bad prompt"):
        await collect(backend, server.request("teapot", "f2"))
    received: list[TokenChunk] = []
    with pytest.raises(BackendError, match="lost GPU"):
        await collect(backend, server.request("break", "f3"), received)
    assert server.renderer.tokenizer.decode(ids(received)) == "ab"
    with pytest.raises(ContextOverflow, match="70 tokens > 64"):
        await collect(backend, server.request("é" * 35, "f4"))


async def test_silence_is_a_timeout(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # accepts, never answers
        backend = HttpBackend("native", f"http://127.0.0.1:{deaf.getsockname()[1]}", TOKEN, silence_s=0.3)
        with pytest.raises(BackendTimeout, match="silent"):
            await collect(backend, server.request("hi", "deaf"))
        with pytest.raises(BackendTimeout):
            await backend.health()
        await backend.close()


async def test_a_server_that_is_not_there_is_named(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    port = quiet_port()
    backend = connect("scripted", f"http://127.0.0.1:{port}", TOKEN)
    with pytest.raises(BackendError, match=f"127.0.0.1:{port} is not reachable"):
        await backend.health()
    await backend.close()


async def test_T103_proxy_variables_disturb_nothing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    backend = connect("scripted", server.url, TOKEN)
    assert (await backend.health()).model == "scripted"
    await backend.close()


async def test_only_the_run_token_opens_the_port(server: Server) -> None:
    stranger = connect("scripted", server.url, "another")
    with pytest.raises(BackendError, match="run token"):
        await stranger.health()
    with pytest.raises(BackendError, match="run token"):
        await collect(stranger, server.request("hi", "stranger"))
    await stranger.close()


async def test_a_server_that_dies_in_mid_stream_is_a_backend_error(tmp_path: Path) -> None:
    server = Server(tmp_path, write(tmp_path / "script.jsonl", SCRIPT))
    backend = connect("scripted", server.url, TOKEN)
    received: list[TokenChunk] = []
    stream = asyncio.create_task(collect(backend, server.request("endless", "kill"), received))
    async with asyncio.timeout(60):
        while not received:  # noqa: ASYNC110 (filled by the other task)
            await asyncio.sleep(0.01)
    server.process.kill()
    with pytest.raises(BackendError, match="server 'scripted'"):
        await stream
    await backend.close()
    assert server.process.wait() == -signal.SIGKILL
    assert server.process.stderr is not None
    server.process.stderr.close()


async def test_sigterm_ends_the_process_although_a_stream_is_open(tmp_path: Path) -> None:
    server = Server(tmp_path, write(tmp_path / "script.jsonl", SCRIPT))
    backend = connect("scripted", server.url, TOKEN)
    stream = asyncio.create_task(collect(backend, server.request("wait", "drain")))
    async with asyncio.timeout(60):
        while not (await server.calls())["running"]:  # noqa: ASYNC110 (a process)
            await asyncio.sleep(0.02)
    assert await asyncio.to_thread(server.stop) == 0
    with pytest.raises(BackendError):
        await stream
    await backend.close()


def test_a_wrong_script_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    script = write(tmp_path / "script.jsonl", [{"pieces": ["a"]}, {"pieces": "b"}])
    spec = tmp_path / "spec.json"
    spec.touch(mode=0o600)
    facts = {
        "name": "s",
        "run_dir": str(tmp_path),
        "run_token": TOKEN,
        "ready_file": str(tmp_path / "r"),
        "parent_pid": 0,
    }
    spec.write_text(json.dumps({**facts, "path": str(script)}))
    command = [sys.executable, "-m", "areal.inference.scripted.server", "--spec", str(spec)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"{script}:2:" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_torch_is_imported() -> None:
    code = "import sys, areal.inference.scripted.server, areal.chat; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
