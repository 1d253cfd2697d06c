"""A worker's proxy as it runs in production: sqlite store, scripted inference server, real sockets, one event loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from areal.base.types import Interaction, Limits
from areal.chat import JinjaRenderer, scripted_renderer
from areal.config.rollout import AgentConfig, GenerationConfig
from areal.inference.app import WireApp
from areal.inference.client import HttpBackend
from areal.inference.router import Router
from areal.inference.scripted.engine import ScriptedEngine
from areal.inference.scripted.script import read_script
from areal.proxy.app import Proxy, ProxyParts, build_proxy
from areal.store import open_store, store_url
from areal.store.base import Store
from areal.web.address import bind
from areal.web.auth import SessionKeys
from areal.web.serve import serve

ADMIN = "sk-admin-for-tests"
SIGNING_KEY = b"k" * 32


@dataclass
class Service:
    """A running proxy and what a test needs to look behind it."""

    url: str
    store: Store
    engine: ScriptedEngine
    http: aiohttp.ClientSession
    keys: SessionKeys
    proxy: Proxy
    renderer: JinjaRenderer

    async def post(self, path: str, body: Any, key: str | None = ADMIN, **headers: str) -> tuple[int, Any, Any]:
        """Status, decoded body, headers."""
        sent = {"Authorization": f"Bearer {key}"} if key is not None else {}
        data = body if isinstance(body, str | bytes) else json.dumps(body)
        async with self.http.post(self.url + path, data=data, headers={**sent, **headers}) as response:
            return response.status, await response.json(), response.headers

    async def start(self, task_id: str = "task", **more: Any) -> str:
        status, body, _ = await self.post("/rl/start_session", {"task_id": task_id, **more})
        assert status == 200, body
        return str(body["api_key"])

    async def chat(self, key: str, *texts: str, **more: Any) -> Any:
        """One user turn, or alternating user and assistant turns; the decoded answer."""
        roles = ("user", "assistant")
        messages = [{"role": roles[k % 2], "content": text} for k, text in enumerate(texts)]
        status, body, _ = await self.post("/v1/chat/completions", {"messages": messages, **more}, key)
        assert status == 200, body
        return body

    async def reward(self, key: str, reward: Any, interaction_id: str | None = None) -> tuple[int, Any, Any]:
        return await self.post("/rl/set_reward", {"reward": reward, "interaction_id": interaction_id}, key)

    async def end(self, key: str) -> Any:
        status, body, _ = await self.post("/rl/end_session", {}, key)
        assert status == 200, body
        return body

    async def recorded(self, key: str) -> Sequence[Interaction]:
        session = await self.store.sessions.live(self.keys.check(key).hash)
        assert session is not None
        return await self.store.sessions.interactions(session.id)

    async def prompts(self, key: str) -> list[str]:
        """The recorded prompts as text, special tokens included."""
        decode = self.renderer.tokenizer.decode
        return [decode(one.prompt_ids.tolist(), skip_special=False) for one in await self.recorded(key)]

    def calls(self) -> Any:
        """What the inference server was asked."""
        return json.loads(self.engine.calls())

    def sdk(self, key: str, **more: Any) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, **more)


@asynccontextmanager
async def serving(app: Any, *, grace_s: float = 1.0) -> AsyncIterator[str]:
    """An ASGI app on a socket of its own; its URL."""
    stop, url = asyncio.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        serve(app, bind("127.0.0.1", 0, setting="test"), ready=url.set_result, stop=stop, grace_s=grace_s)
    )
    try:
        yield await url
    finally:
        stop.set()
        await task


@asynccontextmanager
async def running_service(
    folder: Path,
    lines: Sequence[dict[str, Any]],
    *,
    limits: Limits,
    agent: dict[str, Any],
    defaults: dict[str, Any],
    parts: dict[str, Any],
) -> AsyncIterator[Service]:
    script = folder / "script.jsonl"
    script.write_text("".join(json.dumps(line) + "\n" for line in lines))
    engine = ScriptedEngine(read_script(script), version=3)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(WireApp(engine, "run-token")))
        backend = HttpBackend("scripted", server, "run-token")
        stack.push_async_callback(backend.close)
        store = await stack.enter_async_context(
            await open_store(store_url(folder / "store.sqlite"), clock=parts.get("clock", time.time))
        )
        if await store.training.limits() is None:
            await store.training.set_limits(limits)
        keys, router, renderer = SessionKeys(SIGNING_KEY), Router([backend]), scripted_renderer(script)
        whole = {
            "store": store,
            "renderer": renderer,
            "backend": router,
            "keys": keys,
            "worker": "w0",
            "agent": AgentConfig(admin_api_key=ADMIN, **agent),
            "defaults": GenerationConfig(**defaults),
            "max_context": read_script(script).max_context,
            "on_session_end": router.forget,
            **parts,
        }
        proxy = build_proxy(ProxyParts(**whole))
        url = await stack.enter_async_context(serving(proxy.app))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Service(url, store, engine, http, keys, proxy, renderer)


MakeService = Callable[..., Awaitable[Service]]
WIDE = Limits(max_concurrent=200, max_lag=4, batch_groups=100)


@pytest.fixture
async def make_service(tmp_path: Path) -> AsyncIterator[MakeService]:
    """make_service(lines, limits=…, agent={…}, defaults={…}, parts={…}); the same folder again is the same store."""
    async with AsyncExitStack() as stack:

        async def make(
            lines: Sequence[dict[str, Any]] = ({"pieces": ["Hel", "lo", "<|im_end|>"]},),
            *,
            limits: Limits = WIDE,
            agent: dict[str, Any] | None = None,
            defaults: dict[str, Any] | None = None,
            parts: dict[str, Any] | None = None,
        ) -> Service:
            return await stack.enter_async_context(
                running_service(
                    tmp_path, lines, limits=limits, agent=agent or {}, defaults=defaults or {}, parts=parts or {}
                )
            )

        yield make


async def until(condition: Callable[[], Any], bound_s: float = 60.0) -> None:
    """Wait for something that another task brings about."""
    async with asyncio.timeout(bound_s):
        while True:
            found = condition()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return
            await asyncio.sleep(0.01)


@pytest.fixture
def eventually() -> Callable[..., Awaitable[None]]:
    return until
