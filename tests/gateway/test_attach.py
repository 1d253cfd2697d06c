"""A run finds a gateway, both prove themselves, no key ever crosses the port, and the gateway outlives the run."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys

import msgspec
import pytest

from areal.base.errors import Conflict, Unavailable
from areal.gateway import state
from areal.gateway.app import GatewayApp
from areal.gateway.attach import attach, detach, find
from areal.gateway.attachment import Attachment
from areal.gateway.control import Control, proof_of
from areal.gateway.splice import Splice
from areal.gateway.state import GatewayFacts
from areal.web.address import bind, url_of
from areal.web.serve import serve
from tests.ports import quiet_port

CHAT = "/gateway/v1/chat/completions"


@pytest.fixture(autouse=True)
def state_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def controller():
    """A process that stands for a run's controller."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
async def free():
    """A gateway without a run: (url, port, secret)."""
    listener = bind("127.0.0.1", 0)
    port, secret = listener.getsockname()[1], "the-control-secret"
    state.write(state.gateway_file(port), GatewayFacts(port=port, pid=os.getpid(), url=url_of(listener), secret=secret))
    stop, ready = asyncio.Event(), asyncio.Event()
    async with Attachment(port=port, loopback=True) as attachment, Splice() as splice:
        app = GatewayApp(attachment, splice, Control(attachment, secret), loopback=True, body_limit=1 << 20)
        serving = asyncio.create_task(serve(app, listener, ready=lambda _: ready.set(), stop=stop, grace_s=1.0))
        await ready.wait()
        yield url_of(listener), port, secret
        stop.set()
        await serving


async def test_alone_it_says_that_no_run_is_attached(free, http):
    url, _, _ = free
    async with http.get(url + "/health") as response:
        facts = await response.json()
        assert (facts["status"], facts["workers"], facts["run_id"]) == ("ok", 0, None)
    for path in (CHAT, "/v1/messages", "/rl/start_session"):
        async with http.post(url + path, data=b"{}", headers={"x-api-key": "k"}) as response:
            assert response.status == 503
            assert 1 <= int(response.headers["retry-after"]) <= 30
            assert "no training run is attached yet" in (await response.json())["error"]["message"]


async def test_found_attached_served_detached(free, run, http):
    url, port, _ = free
    await run.add_worker("w0")
    said = []
    handle = await find([f"http://localhost:{port}/gateway/v1"], say=said.append)
    assert handle is not None
    assert (handle.port, handle.run_id, said) == (port, None, [])
    await attach(handle, run.facts)
    file = state.run_file(port)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    async with http.post(url + CHAT, data=b"{}", headers=run.headers()) as response:
        assert response.status == 200
    assert (await find([url], say=said.append)).run_id == run.facts.run_id
    await attach(handle, run.facts)  # the same run again, after a resume for example
    await detach(handle, run.facts)
    assert not file.exists()
    async with http.post(url + CHAT, data=b"{}", headers=run.headers()) as response:
        assert response.status == 503


async def test_no_key_crosses_the_port(run):
    """A relay between both sides sees everything they say to each other: random numbers and proofs."""
    seen = bytearray()
    listener, inner = bind("127.0.0.1", 0), bind("127.0.0.1", 0)
    port, secret = listener.getsockname()[1], "the-control-secret"
    state.write(state.gateway_file(port), GatewayFacts(port=port, pid=os.getpid(), url=url_of(listener), secret=secret))

    async def relay(reader, writer):
        there, back = await asyncio.open_connection(*inner.getsockname())

        async def pump(source, sink):
            while data := await source.read(65536):
                seen.extend(data)
                sink.write(data)
            sink.close()

        await asyncio.gather(pump(reader, back), pump(there, writer), return_exceptions=True)

    stop = asyncio.Event()
    async with Attachment(port=port, loopback=True) as attachment, Splice() as splice:
        app = GatewayApp(attachment, splice, Control(attachment, secret), loopback=True, body_limit=1 << 20)
        serving = asyncio.create_task(serve(app, inner, stop=stop, grace_s=1.0))
        relaying = await asyncio.start_server(relay, sock=listener)
        handle = await find([url_of(listener)], say=print)
        await attach(handle, run.facts)
        assert attachment.run_id == run.facts.run_id
        stop.set()
        await serving
        relaying.close()
    assert b"/control/attach" in seen
    for private in (secret, run.facts.admin_api_key, run.facts.store_url, run.facts.signing_key_path):
        assert private.encode() not in seen


async def test_refused_is_none_at_once_and_a_stranger_gets_a_sentence_and_no_secret(run):
    said = []
    assert await find([f"http://localhost:{quiet_port()}"], say=said.append) is None
    assert said == []

    got = bytearray()

    async def stranger(reader, writer):
        got.extend(await reader.read(65536))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    server = await asyncio.start_server(stranger, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert await find([f"http://localhost:{port}"], say=said.append) is None
    assert "not a gateway of this user" in said[-1]
    assert "rollout.agent.gateway_port" in said[-1]
    # the same port, where a gateway has died without removing its file and another process took its pid
    state.write(state.gateway_file(port), GatewayFacts(port=port, pid=os.getpid(), url="", secret="s3cret-of-the-dead"))
    assert await find([f"http://localhost:{port}"], say=said.append) is None
    assert "is not the gateway that wrote" in said[-1]
    assert b"s3cret-of-the-dead" not in got
    server.close()


async def test_what_accepts_but_is_not_ready_is_waited_for(run):
    listener = bind("127.0.0.1", 0)  # the kernel accepts; nobody answers yet
    port, secret = listener.getsockname()[1], "the-control-secret"
    state.write(state.gateway_file(port), GatewayFacts(port=port, pid=os.getpid(), url=url_of(listener), secret=secret))
    said = []
    assert await find([url_of(listener)], say=said.append, wait_s=0.3) is None
    assert "did not answer in time" in said[-1]
    finding = asyncio.create_task(find([url_of(listener)], say=said.append, wait_s=30))
    await asyncio.sleep(0.2)
    stop = asyncio.Event()
    async with Attachment(port=port, loopback=True) as attachment, Splice() as splice:
        app = GatewayApp(attachment, splice, Control(attachment, secret), loopback=True, body_limit=1 << 20)
        serving = asyncio.create_task(serve(app, listener, stop=stop, grace_s=1.0))
        assert (await finding).port == port
        stop.set()
        await serving


async def test_control_calls_need_a_fresh_proof(free, run, http):
    url, port, secret = free
    state.write(state.run_file(port), run.facts)

    async def control(call: str, body: dict[str, object]) -> int:
        async with http.post(f"{url}/control/{call}", data=json.dumps(body)) as response:
            return response.status

    async def nonce() -> str:
        async with http.post(f"{url}/control/challenge", data=b'{"nonce": "n"}') as response:
            answer = await response.json()
        assert answer["proof"] == proof_of(secret, "challenge", port, "n", answer["nonce"])
        return answer["nonce"]

    good = await nonce()
    assert await control("attach", {"nonce": good, "proof": "00"}) == 401
    assert await control("attach", {"nonce": good, "proof": proof_of(secret, "attach", port, good)}) == 401  # used up
    other = await nonce()
    assert await control("attach", {"nonce": other, "proof": proof_of(secret, "detach", port, other)}) == 401
    invented = "made-up"
    assert await control("attach", {"nonce": invented, "proof": proof_of(secret, "attach", port, invented)}) == 401
    assert await control("attach", {}) == 400
    assert await control("nothing", {"nonce": "x", "proof": "y"}) == 401
    last = await nonce()
    assert await control("attach", {"nonce": last, "proof": proof_of(secret, "attach", port, last)}) == 200


async def test_one_gateway_serves_one_living_run(free, run, controller):
    url, port, _ = free
    handle = await find([url], say=print)
    theirs = msgspec.structs.replace(run.facts, run_id="exp/other", pid=controller.pid)
    await attach(handle, theirs)
    with pytest.raises(Conflict, match=rf"exp/other \(process {controller.pid}\)"):
        await attach(handle, run.facts)
    assert state.read_run(port).run_id == "exp/other"  # the loser leaves the winner's facts alone
    controller.kill()
    controller.wait()
    await asyncio.sleep(1.1)  # the gateway looks at the controller's process once a second
    await attach(handle, run.facts)
    assert (await find([url], say=print)).run_id == run.facts.run_id


async def test_a_run_that_died_is_let_go(free, run, http, controller):
    url, _, _ = free
    await attach(await find([url], say=print), msgspec.structs.replace(run.facts, pid=controller.pid))
    controller.kill()
    controller.wait()
    await asyncio.sleep(1.1)
    async with http.post(url + CHAT, data=b"{}", headers=run.headers()) as response:
        assert response.status == 503
        assert "has ended" in (await response.json())["error"]["message"]
    async with http.get(url + "/health") as response:
        assert (await response.json())["run_id"] is None


async def test_a_run_that_cannot_be_served_is_refused_and_leaves_nothing(free, run):
    url, port, _ = free
    handle = await find([url], say=print)
    with pytest.raises(Unavailable, match="unknown store"):
        await attach(handle, msgspec.structs.replace(run.facts, store_url="nonsense"))
    assert not state.run_file(port).exists()
    await attach(handle, run.facts)


async def test_T109_the_default_admin_key_is_refused_off_loopback(run, tmp_path):
    async with Attachment(port=1, loopback=False) as attachment:
        with pytest.raises(Exception, match="works on loopback only"):
            await attachment.attach(msgspec.structs.replace(run.facts, admin_api_key="areal-admin-key"))
        assert attachment.run_id is None
        await attachment.attach(run.facts)


def test_a_file_that_others_may_read_is_not_believed(run_facts_file):
    run_facts_file.chmod(0o644)
    with pytest.raises(Exception, match="may be read or written by others"):
        state.read_gateway(4711)


@pytest.fixture
def run_facts_file():
    state.write(state.gateway_file(4711), GatewayFacts(port=4711, pid=os.getpid(), url="", secret="s"))
    assert state.read_gateway(4711) is not None
    return state.gateway_file(4711)


def test_a_process_that_got_a_dead_ones_id_is_not_taken_for_it(controller):
    """Containers give the same small ids again: a run of yesterday must not seem to live."""
    assert state.alive(controller.pid)
    assert state.alive(controller.pid, state.birth(controller.pid))
    assert not state.alive(controller.pid, state.birth(os.getpid()))
    controller.kill()
    while state.birth(controller.pid) and state.alive(controller.pid):
        pass
    assert not state.alive(controller.pid)  # a zombie until it is waited for
