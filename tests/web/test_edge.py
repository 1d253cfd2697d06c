"""The HTTP edge over a real socket: every failure is JSON with a remedy, bodies are bounded, streams flow."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import socket
import sys
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from areal.base.errors import BackendError, BackendTimeout, Conflict, NoCapacity
from areal.web.address import bind, url_of
from areal.web.app import (
    add_route,
    create_app,
    end_response,
    request_id,
    send_chunk,
    send_json,
    start_event_stream,
)
from areal.web.body import read_body
from areal.web.client import JsonClient, UnexpectedAnswer
from areal.web.serve import serve
from areal.web.sse import DONE_EVENT, PING, encode_event

LIMIT = 4096


class Numbers(BaseModel):
    a: int
    temperature: float = 1.0


def make_app() -> FastAPI:
    app = create_app("test", max_body_bytes=LIMIT)

    @app.post("/add")
    async def add(body: Numbers) -> dict[str, float]:
        return {"sum": body.a + body.temperature}

    @app.post("/full")
    async def full() -> None:
        raise NoCapacity(running=12, limit=12, retry_after_s=7)

    @app.post("/busy")
    async def busy() -> None:
        raise Conflict("sk-sess-w0.SECRETSECRET.mac is being refreshed; wait for it")

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("the secret plans")

    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, {"body": (await read_body(receive)).decode(), "id": request_id(scope)})

    async def plain_full(scope: Scope, receive: Receive, send: Send) -> None:
        raise NoCapacity(running=1, limit=1)

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await start_event_stream(send)
        await send_chunk(send, PING)
        for n in range(3):
            await send_chunk(send, encode_event(json.dumps({"n": n}).encode()))
        await send_chunk(send, DONE_EVENT)
        await end_response(send)

    async def dies(scope: Scope, receive: Receive, send: Send) -> None:
        await start_event_stream(send)
        await send_chunk(send, encode_event(b"{}"))
        raise RuntimeError("in mid-stream")

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(1.0)
        await send_json(send, {"late": True})

    for path, handler in {
        "/echo": echo,
        "/plain_full": plain_full,
        "/stream": stream,
        "/dies": dies,
        "/slow": slow,
    }.items():
        add_route(app, path, handler)
    return app


@asynccontextmanager
async def running(app: FastAPI, host: str = "127.0.0.1") -> AsyncIterator[str]:
    sock = bind(host, 0)
    url, stop = url_of(sock), asyncio.Event()
    started = asyncio.Event()
    server = asyncio.create_task(serve(app, sock, ready=lambda _: started.set(), stop=stop, grace_s=2))
    await started.wait()
    try:
        yield url
    finally:
        stop.set()
        await server


async def call(url: str, path: str, data: bytes = b"{}", method: str = "POST", **headers: str) -> tuple[Any, Any, Any]:
    named = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    async with aiohttp.ClientSession(trust_env=False) as session:
        async with session.request(method, url + path, data=data, headers=named) as response:
            assert response.content_type == "application/json"
            return response.status, json.loads(await response.read()), response.headers


async def test_what_a_stop_does_not_wait_for_is_503_and_no_bug(caplog: pytest.LogCaptureFixture) -> None:
    app, arrived = make_app(), asyncio.Event()

    async def hang(scope: Scope, receive: Receive, send: Send) -> None:
        arrived.set()
        await asyncio.sleep(600)

    add_route(app, "/hang", hang)
    async with running(app) as url:
        answer = asyncio.create_task(call(url, "/hang"))
        await arrived.wait()
    status, body, headers = await answer
    assert (status, body["error"]["code"]) == (503, "unavailable")
    assert "retry in a few seconds" in body["error"]["message"]
    assert (headers["retry-after"], headers["x-should-retry"]) == ("5", "true")
    assert not [one for one in caplog.records if one.exc_info]


async def test_T012_bad_requests_are_400_in_openai_shape_with_the_field() -> None:
    async with running(make_app()) as url:
        for data, param in ((b"not json", None), (b'{"a": "x"}', "a"), (b"{}", "a"), (b"", None), (b"[]", None)):
            status, body, headers = await call(url, "/add", data)
            assert status == 400, data
            assert set(body["error"]) == {"message", "type", "param", "code"}
            assert body["error"]["type"] == "invalid_request_error"
            assert body["error"]["param"] == param
            assert headers["x-should-retry"] == "false"
        status, body, _ = await call(url, "/add", b'{"a": 1, "temperature": "hot"}')
        assert (status, body["error"]["param"]) == (400, "temperature")


async def test_errors_carry_status_retry_headers_and_a_request_id_from_both_kinds_of_route() -> None:
    async with running(make_app()) as url:
        for path in ("/full", "/plain_full"):
            status, body, headers = await call(url, path)
            assert status == 429
            assert body["error"]["code"] == "no_capacity"
            assert 1 <= int(headers["retry-after"]) <= 30
            assert headers["x-should-retry"] == "true"
            assert headers["x-request-id"].startswith("req_")
        status, _, headers = await call(url, "/busy", x_request_id="mine-1")
        assert (status, headers["x-should-retry"], headers["x-request-id"]) == (409, "false", "mine-1")
        status, body, headers = await call(url, "/echo", b"{}", x_request_id="bad id!")
        assert body["id"] == headers["x-request-id"] != "bad id!"


async def test_T108_an_error_body_holds_no_secret() -> None:
    async with running(make_app()) as url:
        _, body, _ = await call(url, "/busy")
    assert "SECRETSECRET" not in json.dumps(body)


async def test_unknown_routes_wrong_methods_and_bugs_are_json_too(caplog: pytest.LogCaptureFixture) -> None:
    async with running(make_app()) as url:
        assert (await call(url, "/nope"))[0] == 404
        status, body, headers = await call(url, "/add", method="GET")
        assert (status, headers["allow"]) == (405, "POST")
        status, body, headers = await call(url, "/broken", method="GET")
    assert status == 500
    assert "secret plans" not in json.dumps(body)
    assert headers["x-request-id"] in caplog.text  # the cause is in the log, under the id the client saw
    assert "secret plans" in caplog.text


async def test_bodies_are_limited_also_after_decompression() -> None:
    fits, bomb = b"x" * LIMIT, b"x" * (LIMIT + 1)
    raw = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    deflated = raw.compress(fits) + raw.flush()
    async with running(make_app()) as url:
        assert (await call(url, "/echo", fits))[1]["body"] == fits.decode()
        assert (await call(url, "/echo", bomb))[0] == 413
        assert (await call(url, "/echo", gzip.compress(fits), content_encoding="gzip"))[1]["body"] == fits.decode()
        assert (await call(url, "/echo", deflated, content_encoding="deflate"))[0] == 200
        assert (await call(url, "/echo", zlib.compress(fits), content_encoding="deflate"))[0] == 200
        assert (await call(url, "/echo", gzip.compress(bomb * 100), content_encoding="gzip"))[0] == 413
        assert (await call(url, "/echo", b"junk", content_encoding="gzip"))[0] == 400
        assert (await call(url, "/echo", b"{}", content_encoding="br"))[0] == 400
        assert (await call(url, "/echo", gzip.compress(fits)[:-12], content_encoding="gzip"))[0] == 400
        assert (await call(url, "/add", gzip.compress(b'{"a": 3}'), content_encoding="gzip"))[1] == {"sum": 4.0}
        async with aiohttp.ClientSession() as session:  # no content-length: counted as it comes
            async with session.post(url + "/echo", data=_pieces(bomb)) as response:
                assert response.status == 413


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(data), 512):
        yield data[at : at + 512]


async def test_a_stream_arrives_event_by_event_and_a_broken_one_ends_as_broken() -> None:
    async with running(make_app()) as url, JsonClient(url) as client:
        events = [event.data async for event in client.events("/stream", {})]
        assert events == [b'{"n": 0}', b'{"n": 1}', b'{"n": 2}', b"[DONE]"]
        with pytest.raises(BackendError):
            _ = [event async for event in client.events("/dies", {})]


async def test_client_errors_are_typed_and_keep_the_answer() -> None:
    async with running(make_app()) as url, JsonClient(url, timeout_s=20) as client:
        assert await client.post("/add", {"a": 1}) == {"sum": 2.0}
        assert (await client.post("/echo", {"n": 2**70}))["body"] == f'{{"n":{2**70}}}', "a task may hold any integer"
        with pytest.raises(UnexpectedAnswer, match="no free slot") as failed:
            await client.post("/full", {})
        assert failed.value.answered == 429
        with pytest.raises(BackendTimeout):
            await client.post("/slow", {}, timeout_s=0.05)
    async with JsonClient(url) as client:
        with pytest.raises(BackendError, match="not reachable"):
            await client.get("/health")


async def test_T103_proxy_variables_disturb_no_internal_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "10.0.0.0/8")
    async with running(make_app()) as url, JsonClient(url) as client:
        assert await client.post("/add", {"a": 1}) == {"sum": 2.0}


@pytest.mark.skipif(not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6"), reason="no IPv6 on this host")
async def test_T094_an_ipv6_service_prints_a_url_with_brackets_and_answers_there() -> None:
    async with running(make_app(), "::1") as url, JsonClient(url) as client:
        assert url.startswith("http://[::1]:")
        assert await client.post("/add", {"a": 1}) == {"sum": 2.0}


PROGRAM = """
import asyncio, sys
from areal.web.address import bind
from areal.web.app import add_route, create_app, send_json
from areal.web.serve import serve

app = create_app("drain", max_body_bytes=1000)
entered = asyncio.Event()

async def slow(scope, receive, send):
    print("entered", flush=True)
    await asyncio.sleep(0.5)
    await send_json(send, {"done": True})

async def drain():
    print("draining", flush=True)
    if "hang" in sys.argv:
        await asyncio.sleep(1000)

add_route(app, "/slow", slow)
asyncio.run(serve(app, bind("127.0.0.1", 0), ready=lambda url: print(url, flush=True), drain=drain))
print("closed", flush=True)
"""


async def test_sigterm_drains_and_lets_a_request_in_flight_finish() -> None:
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    url = (await child.stdout.readline()).decode().strip()
    async with JsonClient(url) as client:
        answer = asyncio.create_task(client.post("/slow", {}))
        assert await child.stdout.readline() == b"entered\n"
        child.send_signal(signal.SIGTERM)
        assert await answer == {"done": True}
    assert (await child.stdout.read()).split() == [b"draining", b"closed"]
    assert await child.wait() == 0


async def test_a_second_signal_skips_the_waiting() -> None:
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, "hang", stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    await child.stdout.readline()
    child.send_signal(signal.SIGTERM)
    assert await child.stdout.readline() == b"draining\n"
    child.send_signal(signal.SIGTERM)
    assert await child.stdout.read() == b"closed\n"
    assert await child.wait() == 0


async def test_a_server_takes_as_many_connections_as_the_system_lets_it_have() -> None:
    program = """
import asyncio, resource
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard))
from areal.web.address import bind
from areal.web.app import create_app
from areal.web.serve import serve
asyncio.run(serve(create_app("many", max_body_bytes=1000), bind("127.0.0.1", 0), ready=lambda url: print(url, flush=True)))
"""
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    host, port = (await child.stdout.readline()).decode().strip().removeprefix("http://").split(":")
    clients = [await asyncio.open_connection(host, int(port)) for _ in range(60)]
    for reader, writer in clients:  # all of them are open at once
        writer.write(b"GET /nothing HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 404")
    for _, writer in clients:
        writer.close()
    child.send_signal(signal.SIGTERM)
    assert await child.wait() == 0
