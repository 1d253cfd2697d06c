"""One session = one key = one recorded conversation: the HTTP application of a rollout worker.

    proxy = build_proxy(ProxyParts(store=store, renderer=renderer, backend=router, keys=keys, worker="w0", ...))
    await serve(proxy.app, sock, ready=..., drain=proxy.sessions.drain)

Control routes (control.py) are FastAPI; model routes (model_routes.py) are plain ASGI in the same app, one set per dialect of the
table, under every prefix that clients put before them. Errors have the shape of the protocol whose route was called. The
app keeps nothing that it cannot read again from the store. Used by rollout/worker.py.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from areal.base.errors import ArealError
from areal.chat.base import Renderer
from areal.config.rollout import AgentConfig, GenerationConfig
from areal.proxy.callers import Callers
from areal.proxy.control import ControlRoutes
from areal.proxy.dialects import dialects
from areal.proxy.dialects.base import CountsTokens, Dialect
from areal.proxy.model_list import model_list
from areal.proxy.model_routes import HOLD_S, PING_S, CountRoute, ModelRoute
from areal.proxy.recorder import Generates, Recorder
from areal.proxy.sessions import SessionPolicy, Sessions
from areal.store.base import Store
from areal.web.app import Application, Handler, add_route, create_app, send_json
from areal.web.auth import SessionKeys
from areal.web.error_bodies import openai_error_body

# What clients put before a route: nothing, the SDKs' /v1, S2's /gateway/v1, and the Anthropic SDK's second /v1.
PREFIXES = ("", "/v1", "/v1/v1", "/gateway", "/gateway/v1", "/gateway/v1/v1")


@dataclass(frozen=True, slots=True)
class ProxyParts:
    """What a proxy is made of. max_context: tokens of prompt + output. policy_names: names that mean the policy;
    upstream_names: those of the channel, which the gateway answers.

    closing_bound_s: how long calls in flight may go on after end_session. clock: seconds since the epoch, the same as the store's.
    hold_s, ping_s: how long a stream's headers wait for the first token, and the pause between keep-alive comments."""

    store: Store
    renderer: Renderer
    backend: Generates
    keys: SessionKeys
    worker: str
    agent: AgentConfig
    defaults: GenerationConfig
    max_context: int
    seed: int = 1
    eval_temperature: float = 0.0
    policy_names: tuple[str, ...] = ("default",)
    upstream_names: frozenset[str] = frozenset()
    on_session_end: Callable[[str], None] = field(default=lambda _: None)  # for example Router.forget
    clock: Callable[[], float] = time.time
    closing_bound_s: float = 10.0
    hold_s: float = HOLD_S
    ping_s: float = PING_S


@dataclass(frozen=True, slots=True)
class Proxy:
    """The application, and the sessions in it. `app` may be given further routes by its process."""

    app: Application
    sessions: Sessions
    recorder: Recorder


def proxy_app(parts: ProxyParts) -> Application:
    """The application alone."""
    return build_proxy(parts).app


def build_proxy(parts: ProxyParts) -> Proxy:
    """Wire the parts. Sessions expire while the app's lifespan runs."""
    sessions = Sessions(
        parts.store,
        parts.keys,
        worker=parts.worker,
        policy=SessionPolicy.of(parts.agent, parts.closing_bound_s),
        on_end=parts.on_session_end,
        clock=parts.clock,
    )
    recorder = Recorder(
        parts.store,
        parts.renderer,
        parts.backend,
        defaults=parts.defaults,
        seed=parts.seed,
        max_context=parts.max_context,
        sampling=parts.agent.sampling,
        eval_temperature=parts.eval_temperature,
        policy_names=frozenset(parts.policy_names),
        upstream_names=parts.upstream_names,
    )
    callers = Callers(parts.store, sessions, parts.keys, worker=parts.worker, agent=parts.agent)
    handlers = _model_routes(parts, callers, recorder)
    spoken = {path: dialect for path, (dialect, _) in handlers.items()}

    def error_body(path: str, error: ArealError, request_id: str) -> Any:
        dialect = spoken.get(path)
        return dialect.error_body(error, request_id) if dialect else openai_error_body(error)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with sessions.serving():
            yield

    app = create_app("areal proxy", max_body_bytes=parts.agent.max_body_bytes, error_body=error_body, lifespan=lifespan)
    for path, (_, handler) in handlers.items():
        add_route(app, path, handler)
    _add_probes(app, parts, sessions, callers, recorder)
    ControlRoutes(sessions, parts.store, callers, parts.keys, parts.agent).add_to(app)
    return Proxy(app, sessions, recorder)


def _model_routes(parts: ProxyParts, callers: Callers, recorder: Recorder) -> dict[str, tuple[Dialect, Handler]]:
    """Every path under which a model is called, with the dialect spoken there."""
    found: dict[str, tuple[Dialect, Handler]] = {}
    for dialect in dialects():
        answer = ModelRoute(dialect, callers, recorder, hold_s=parts.hold_s, ping_s=parts.ping_s)
        for prefix in PREFIXES:
            found |= {prefix + route: (dialect, answer) for route in dialect.routes}
            if isinstance(dialect, CountsTokens):
                count = CountRoute(dialect, dialect, callers, recorder)
                found |= {prefix + route: (dialect, count) for route in dialect.count_routes}
    return found


def _add_probes(app: Application, parts: ProxyParts, sessions: Sessions, callers: Callers, recorder: Recorder) -> None:
    """What clients ask before and beside model calls."""
    models = model_list(("default", *parts.policy_names))

    async def list_models(scope: Scope, receive: Receive, send: Send) -> None:
        callers.probes(scope["headers"])
        await send_json(send, models)

    async def one_model(scope: Scope, receive: Receive, send: Send) -> None:
        callers.probes(scope["headers"])
        name = scope["path_params"]["name"]
        recorder.check_model(name)
        known = next((one for one in models["data"] if one["id"] == name), None)
        await send_json(send, known or {**models["data"][0], "id": name})  # any name is served by the policy

    async def hello(scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, {"status": "ok", "service": "areal"})

    async def health(scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, {"status": "ok", "worker": parts.worker, **sessions.counts()})

    add_route(app, "/health", health, ["GET"])
    for prefix in PREFIXES:
        add_route(app, f"{prefix}/models", list_models, ["GET"])
        add_route(app, f"{prefix}/models/{{name:path}}", one_model, ["GET"])
        add_route(app, prefix or "/", hello, ["GET"])
        add_route(app, f"{prefix}/api/hello", hello, ["GET"])
