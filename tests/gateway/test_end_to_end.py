"""The official OpenAI SDK -> gateway process -> proxies -> scripted inference server: what a user's agent lives through."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from areal.base.types import WorkerInfo
from areal.chat import scripted_renderer
from areal.config.rollout import AgentConfig, GenerationConfig
from areal.inference.app import WireApp
from areal.inference.client import HttpBackend
from areal.inference.router import Router
from areal.inference.scripted.engine import ScriptedEngine
from areal.inference.scripted.script import read_script
from areal.proxy.app import ProxyParts, build_proxy
from areal.web.address import bind
from areal.web.serve import serve

SCRIPT = [
    {"pieces": ["The", " answer", " is", " ", {"hex": "e2"}, {"hex": "98"}, {"hex": "83"}, "<|im_end|>"]},
    {"pieces": ["Again", ".", "<|im_end|>"]},
    {"when": "break", "pieces": ["a", "b", "c"], "fail": {"at": 2, "message": "lost GPU"}},
    {"when": "slowly", "pieces": [f"w{n} " for n in range(40)] + ["<|im_end|>"], "delay_ms": 10},
    {"when": "endlessly", "pieces": [f"w{n} " for n in range(1500)] + ["<|im_end|>"], "delay_ms": 40},  # a minute
]


@asynccontextmanager
async def serving(app) -> AsyncIterator[str]:
    stop, url = asyncio.Event(), asyncio.get_running_loop().create_future()
    listener = bind("127.0.0.1", 0)
    task = asyncio.create_task(serve(app, listener, ready=url.set_result, stop=stop, grace_s=1.0))
    try:
        yield await url
    finally:
        stop.set()
        await task


def _spawn(spec: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "areal.gateway.server", "--spec", str(spec)])


class Service:
    """Scripted server and proxies in this process, the gateway in its own."""

    def __init__(self, place, folder: Path, server: str) -> None:
        self.place, self.folder, self.server = place, folder, server
        self.gateway_url = ""
        self.clients: list[AsyncOpenAI] = []
        self.proxies: dict[str, AsyncExitStack] = {}

    async def start_proxy(self, name: str) -> None:
        """A worker of this logical id, wherever it finds a port."""
        self.proxies[name] = stack = AsyncExitStack()
        backend = HttpBackend("scripted", self.server, "run-token")
        stack.push_async_callback(backend.close)
        parts = ProxyParts(
            store=self.place.store,
            renderer=scripted_renderer(self.folder / "script.jsonl"),
            backend=Router([backend]),
            keys=self.place.keys,
            worker=name,
            agent=AgentConfig(admin_api_key=self.place.facts.admin_api_key),
            defaults=GenerationConfig(),
            max_context=2048,
        )
        url = await stack.enter_async_context(serving(build_proxy(parts).app))
        await self._heartbeat(name, url)
        beating = asyncio.create_task(self._beat(name, url))
        stack.callback(beating.cancel)

    async def _heartbeat(self, name: str, url: str) -> None:
        await self.place.store.registry.heartbeat(WorkerInfo(name, url, os.getpid(), "host", time.time()))

    async def _beat(self, name: str, url: str) -> None:
        """As every worker does, so that a slow machine's tests do not outlive their workers' registration."""
        while True:
            await asyncio.sleep(2)
            await self._heartbeat(name, url)

    async def kill_proxy(self, name: str) -> None:
        """It answers no more; the registry still has its last heartbeat."""
        await self.proxies.pop(name).aclose()

    async def start_gateway(self, stack: AsyncExitStack) -> None:
        facts, ready = self.place.facts, self.folder / "gateway.ready.json"
        spec = self.folder / "gateway.spec.json"
        spec.touch(0o600)
        job = {
            "name": "gateway",
            "run_dir": str(self.folder),
            "run_token": "run-token",
            "ready_file": str(ready),
            "parent_pid": os.getpid(),
            "host": "127.0.0.1",
            "port": 0,
            "log_dir": str(self.folder),
            "max_body_bytes": 1 << 20,
            "run_id": facts.run_id,
            "store_url": facts.store_url,
            "signing_key_path": facts.signing_key_path,
            "admin_api_key": facts.admin_api_key,
            "model_names": ["default", "tiny"],
        }
        spec.write_text(json.dumps(job))
        process = _spawn(spec)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        while not ready.exists():
            assert process.poll() is None
            await asyncio.sleep(0.02)
        self.gateway_url = json.loads(ready.read_text())["url"]

    async def start_session(self, http, **body: object) -> dict[str, str]:
        headers = {"authorization": f"Bearer {self.place.facts.admin_api_key}"}
        async with http.post(
            self.gateway_url + "/rl/start_session", json={"task_id": "t", **body}, headers=headers
        ) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    def sdk(self, key: str, **more: object) -> AsyncOpenAI:
        self.clients.append(AsyncOpenAI(base_url=f"{self.gateway_url}/gateway/v1", api_key=key, **more))
        return self.clients[-1]


@pytest.fixture
async def service(run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    script = tmp_path / "script.jsonl"
    script.write_text("".join(json.dumps(line) + "\n" for line in SCRIPT))
    async with AsyncExitStack() as stack:
        engine = ScriptedEngine(read_script(script), version=3)
        server = await stack.enter_async_context(serving(WireApp(engine, "run-token", extra={"/calls": engine.calls})))
        service = Service(run, tmp_path, server)
        await service.start_proxy("w0")
        await service.start_gateway(stack)
        yield service
        for client in service.clients:
            await client.close()
        for name in list(service.proxies):
            await service.kill_proxy(name)


async def test_a_session_from_start_to_export(service, http):
    started = await service.start_session(http)
    client = service.sdk(started["api_key"])
    assert [model.id async for model in await client.models.list()] == ["default"]
    first = await client.chat.completions.create(model="default", messages=[{"role": "user", "content": "2+2?"}])
    assert first.choices[0].message.content == "The answer is \u2603"
    stream = await client.chat.completions.create(
        model="default",
        messages=[
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "sure?"},
        ],
        stream=True,
    )
    deltas = [chunk.choices[0].delta.content async for chunk in stream if chunk.choices]
    assert "".join(delta or "" for delta in deltas) == "Again."
    async with http.post(
        service.gateway_url + "/rl/set_reward",
        json={"reward": 0.5, "interaction_id": first.id},
        headers={"x-api-key": started["api_key"]},
    ) as response:
        assert response.status == 200, await response.text()
    async with http.post(
        service.gateway_url + "/rl/end_session", json={}, headers={"x-api-key": started["api_key"]}
    ) as response:
        assert (await response.json())["interaction_count"] == 2
    async with http.post(
        service.gateway_url + "/export_trajectories",
        json={"session_id": started["session_id"], "style": "concat"},
        headers={"authorization": f"Bearer {service.place.facts.admin_api_key}"},
    ) as response:
        exported = await response.json()
    assert len(exported["trajectories"]) == 1  # both turns are one row: nothing was tokenised again
    with pytest.raises(openai.AuthenticationError):
        await service.sdk(started["api_key"], max_retries=0).chat.completions.create(
            model="default", messages=[{"role": "user", "content": "2+2?"}]
        )


async def test_tokens_reach_the_client_one_by_one(service, http):
    started = await service.start_session(http)
    stream = await service.sdk(started["api_key"]).chat.completions.create(
        model="default", messages=[{"role": "user", "content": "count slowly"}], stream=True
    )
    texts = [
        chunk.choices[0].delta.content async for chunk in stream if chunk.choices and chunk.choices[0].delta.content
    ]
    assert texts == [f"w{n} " for n in range(40)]


async def test_T047_no_worker_is_502_and_then_the_session_goes_on_with_its_history(service, http):
    started = await service.start_session(http)
    client = service.sdk(started["api_key"], max_retries=0)
    messages = [{"role": "user", "content": "2+2?"}]
    first = await client.chat.completions.create(model="default", messages=messages)
    await service.kill_proxy("w0")
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "sure?"},
    ]
    with pytest.raises(openai.InternalServerError) as failure:
        await client.chat.completions.create(model="default", messages=messages)
    assert failure.value.status_code == 502
    assert 1 <= int(failure.value.response.headers["retry-after"]) <= 30
    assert "check that the service runs" in failure.value.message

    await service.start_proxy("w1")  # new sessions go to a live worker meanwhile
    await asyncio.sleep(1.1)
    assert (await service.start_session(http))["api_key"].startswith("sk-sess-w1.")

    await service.start_proxy("w0")  # restarted, on another port
    again = await client.chat.completions.create(model="default", messages=messages)
    assert again.choices[0].message.content
    async with http.post(
        service.gateway_url + "/rl/end_session", json={}, headers={"x-api-key": started["api_key"]}
    ) as response:
        assert (await response.json())["interaction_count"] == 2
    counts = await service.place.store.training.counts()
    assert counts.running_sessions == 1  # only the one on w1: the restart leaked nothing


async def test_T048_two_refreshes_at_once(service, http):
    started = await service.start_session(http)
    client = service.sdk(started["api_key"], max_retries=0)
    await client.chat.completions.create(model="default", messages=[{"role": "user", "content": "2+2?"}])
    headers = {"authorization": f"Bearer {service.place.facts.admin_api_key}"}

    async def refresh() -> tuple[int, dict[str, object]]:
        async with http.post(
            service.gateway_url + "/rl/start_session",
            json={"task_id": "t", "api_key": started["api_key"]},
            headers=headers,
        ) as response:
            if response.status == 409:
                assert response.headers["x-should-retry"] == "false"
            return response.status, await response.json()

    chat = client.chat.completions.create(model="default", messages=[{"role": "user", "content": "and 3+3?"}])
    *refreshes, answer = await asyncio.gather(refresh(), refresh(), chat)
    statuses = sorted(status for status, _ in refreshes)
    assert statuses[0] == 200
    assert statuses[1] in (200, 409)
    assert answer.choices[0].message.content
    assert (await service.place.store.training.counts()).running_sessions == 1


async def test_an_error_in_mid_stream_reaches_the_sdk_as_its_message(service, http):
    started = await service.start_session(http)
    client = service.sdk(started["api_key"], max_retries=0)
    stream = await client.chat.completions.create(
        model="default", messages=[{"role": "user", "content": "break"}], stream=True
    )
    with pytest.raises(openai.APIError, match="lost GPU"):
        async for _ in stream:
            pass


async def test_one_request_id_from_the_client_to_the_workers_answer(service, http):
    started = await service.start_session(http)
    raw = await service.sdk(started["api_key"]).chat.completions.with_raw_response.create(
        model="default", messages=[{"role": "user", "content": "2+2?"}], extra_headers={"x-request-id": "agent-77"}
    )
    assert raw.headers.get_list("x-request-id") == ["agent-77"]


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
async def test_every_protocol_streams_token_by_token_through_the_gateway(service, http, dialect):
    key, messages = (await service.start_session(http))["api_key"], [{"role": "user", "content": "count endlessly"}]
    path, said = {
        "chat": ("/chat/completions", {"messages": messages}),
        "responses": ("/responses", {"input": "count endlessly"}),
        "messages": ("/messages", {"messages": messages, "max_tokens": 1999}),
    }[dialect]
    url, arrived = f"{service.gateway_url}/gateway/v1{path}?beta=true", 0
    async with http.post(url, json={**said, "stream": True}, headers={"x-api-key": key}) as response:
        assert response.status == 200
        assert len(response.headers.getall("x-request-id")) == len(response.headers.getall("request-id")) == 1
        assert response.headers["request-id"] == response.headers["x-request-id"]
        while arrived < 5:
            arrived += bool(re.search(rb'"w\d+ "', await response.content.readline()))
        async with http.get(service.server + "/calls", headers={"authorization": "Bearer run-token"}) as seen:
            assert (await seen.json())["running"] == 1, "the first are here long before the last is sampled"


async def test_the_anthropic_sdk_through_the_gateway(service, http):
    key = (await service.start_session(http))["api_key"]
    async with AsyncAnthropic(base_url=f"{service.gateway_url}/gateway/v1", api_key=key, max_retries=0) as client:
        history = [{"role": "user", "content": "2+2?"}]
        first = await client.messages.create(model="default", max_tokens=50, messages=history)
        assert first.content[0].text == "The answer is \u2603"
        history += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "sure?"}]
        counted = await client.messages.count_tokens(model="default", messages=history)
        second = await client.messages.create(model="default", max_tokens=50, messages=history)
        assert counted.input_tokens == second.usage.input_tokens
        with pytest.raises(anthropic.APIStatusError, match="lost GPU"):
            async with client.messages.stream(
                model="default", max_tokens=50, messages=[{"role": "user", "content": "break"}]
            ) as stream:
                await stream.get_final_message()
    async with AsyncAnthropic(base_url=service.gateway_url, api_key="sk-sess-w0.no.no") as stranger:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await stranger.messages.create(model="default", max_tokens=50, messages=history)
        assert caught.value.body["request_id"] == caught.value.request_id


async def test_a_responses_chain_outlives_its_worker(service, http):
    client = service.sdk((await service.start_session(http))["api_key"])
    first = await client.responses.create(model="default", input="2+2?")
    await service.kill_proxy("w0")
    await service.start_proxy("w0")
    second = await client.responses.create(model="default", input="sure?", previous_response_id=first.id)
    assert second.output_text
    session = (await service.place.store.reading.recent())[0].session
    one, two = await service.place.store.sessions.interactions(session.id)
    assert two.token_parent == one.id == first.id
