"""A worker's proxy over the native engine with a random net: sqlite store, real sockets, one process, the engine in its thread."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import torch

from areal.chat import load_renderer
from areal.config.rollout import AgentConfig, GenerationConfig
from areal.inference.app import WireApp
from areal.inference.client import HttpBackend
from areal.inference.native.grammars import Grammars
from areal.inference.native.runner import NativeBackend, receive_through
from areal.inference.native.server import ServerSpec, build_engine
from areal.inference.router import Router
from areal.proxy.app import ProxyParts, build_proxy
from areal.store import open_store, store_url
from areal.web.auth import SessionKeys
from tests.proxy.service import ADMIN, SIGNING_KEY, WIDE, Service, serving

CONTEXT = 1000


@asynccontextmanager
async def native_service(folder: Path, model_dir: Path, **renderer: Any) -> AsyncIterator[Service]:
    """`engine` of the Service is the native backend; everything else is as over a script."""
    engine = build_engine(ServerSpec(model_dir=str(model_dir), max_context=CONTEXT, threads=1))
    grammars = Grammars(model_dir, vocab_size=engine.net.config.vocab_size, eos_ids=engine.eos_ids)
    async with AsyncExitStack() as stack:
        native = NativeBackend(engine, name="net", receive=receive_through(folder), threads=1, grammars=grammars)
        stack.push_async_callback(native.close)
        server = await stack.enter_async_context(serving(WireApp(native, "run-token")))
        backend = HttpBackend("native", server, "run-token")
        stack.push_async_callback(backend.close)
        store = await stack.enter_async_context(await open_store(store_url(folder / "store.sqlite")))
        await store.training.set_limits(WIDE)
        keys, words = SessionKeys(SIGNING_KEY), load_renderer(model_dir, **renderer)
        proxy = build_proxy(
            ProxyParts(
                store=store,
                renderer=words,
                backend=Router([backend]),
                keys=keys,
                worker="w0",
                agent=AgentConfig(admin_api_key=ADMIN),
                defaults=GenerationConfig(),
                max_context=CONTEXT,
            )
        )
        url = await stack.enter_async_context(serving(proxy.app))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        stack.callback(torch.set_num_threads, threads)
        yield Service(url, store, native, http, keys, proxy, words)  # type: ignore[arg-type]
