"""A rollout worker: the proxy of its sessions, and the agents that the service runs itself.

    python -m areal.rollout.worker --spec FILE       # job: worker_id, model_dir, servers, store_url, signing_key_path, config

One port on loopback: the public routes as the gateway has them, and with the run's token `POST /agents/run`, which runs the
configured agent once, as a session of its own, through this very port. It heartbeats into the store's registry, which is how
gateways find it. No torch.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from areal.base.background import background
from areal.base.errors import ConfigError, StoreError
from areal.base.logs import open_log
from areal.base.redact import protect
from areal.base.types import WorkerInfo
from areal.chat import load_renderer
from areal.chat.base import Renderer
from areal.chat.scripted import scripted_renderer
from areal.cluster.child import ChildSpec, report_ready, run_child
from areal.config.backend_spec import parse_backend
from areal.config.run import RunConfig
from areal.inference import connect
from areal.inference.router import Router
from areal.inference.upstream.routes import upstream_names
from areal.proxy.app import Proxy, ProxyParts, build_proxy
from areal.rollout.agent_output import open_agent_log
from areal.rollout.agent_runs import AgentRuns
from areal.rollout.servers import InService
from areal.store import REQUEST_PATIENCE_S, open_store
from areal.store.base import Registry, Store
from areal.web.address import bind, url_of
from areal.web.auth import SessionKeys, load_or_create_signing_key
from areal.web.serve import serve

HEARTBEAT_S = 2.0

_log = logging.getLogger("areal.rollout")


class WorkerJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The spec's own keys. servers: URLs of the inference servers; the first is this worker's own, the others step in while that
    one is out."""

    worker_id: str
    model_dir: str
    servers: list[str]
    store_url: str
    signing_key_path: str
    policy_names: list[str]
    config: dict[str, Any]


async def main(spec: ChildSpec) -> None:
    """Serve until SIGTERM. Raises ConfigError for a wrong spec, StoreError, BackendError if a server is not there."""
    try:
        job = msgspec.convert(dict(spec.job), WorkerJob)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the spec of {spec.name} is wrong: {error}; start the run anew") from None
    config = RunConfig.model_validate(job.config)
    protect(spec.run_token, config.rollout.agent.admin_api_key, config.rollout.agent.internal_token)
    listener = bind("127.0.0.1", 0)
    url = url_of(listener)
    with open_log(run_id=spec.name):
        async with AsyncExitStack() as stack:
            store = await stack.enter_async_context(await open_store(job.store_url, patience_s=REQUEST_PATIENCE_S))
            router = await _router(stack, job, config, spec.run_token)
            proxy = await _proxy(router, job, config, store)
            InService(router, job.servers, spec.run_token).add_to(proxy.app)
            logs = Path(config.stats_logger.log_dir or spec.run_dir / "logs")
            stack.enter_context(open_agent_log(logs / f"agents-{job.worker_id}.log"))
            agents = AgentRuns(config, proxy.sessions, reading=store.reading, base_url=url, run_token=spec.run_token)
            (await stack.enter_async_context(agents)).add_to(proxy.app)
            await stack.enter_async_context(_heartbeats(store.registry, job.worker_id, url))
            await serve(
                proxy.app,
                listener,
                ready=lambda served: report_ready(spec, url=served),
                drain=proxy.sessions.drain,
                stop=proxy.sessions.broken,
            )
            if proxy.sessions.failure is not None:
                raise proxy.sessions.failure


async def _router(stack: AsyncExitStack, job: WorkerJob, config: RunConfig, run_token: str) -> Router:
    name = parse_backend(config.rollout.backend).name
    backends = [connect(name, url, run_token) for url in job.servers]
    for backend in backends:
        stack.push_async_callback(backend.close)
    return Router(backends, own=1)


async def _proxy(router: Router, job: WorkerJob, config: RunConfig, store: Store) -> Proxy:
    name = parse_backend(config.rollout.backend).name
    health = await asyncio.gather(*(backend.health() for backend in router.backends))
    return build_proxy(
        ProxyParts(
            store=store,
            renderer=_renderer(name, config, job.model_dir),
            backend=router,
            keys=SessionKeys(load_or_create_signing_key(Path(job.signing_key_path))),
            worker=job.worker_id,
            agent=config.rollout.agent,
            defaults=config.gconfig,
            max_context=min(one.max_context for one in health),
            seed=config.seed,
            eval_temperature=config.evaluator.temperature,
            policy_names=tuple(job.policy_names),
            upstream_names=upstream_names(config.api_gateway, config.model_routing),
            on_session_end=router.forget,
        )
    )


def _renderer(name: str, config: RunConfig, model_dir: str) -> Renderer:
    agent = config.rollout.agent
    own = name == "scripted" and not model_dir  # a script without a model has a vocabulary of its own
    load, source = (scripted_renderer, config.rollout.scripted.path) if own else (load_renderer, model_dir)
    return load(
        source,
        chat_template=agent.chat_template,
        tool_call_parser=agent.tool_call_parser,
        reasoning_parser=agent.reasoning_parser,
    )


@asynccontextmanager
async def _heartbeats(registry: Registry, worker_id: str, url: str) -> AsyncIterator[None]:
    """In the registry while the block runs; leaves it at the end so that no gateway waits for a time-out."""

    async def beat() -> None:
        worker = WorkerInfo(worker_id, url, os.getpid(), socket.gethostname(), time.time())
        await registry.heartbeat(worker)

    async def forever() -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                await beat()
            except StoreError as error:  # a full disk: it passes, and then this worker must be seen again
                _log.warning("the heartbeat of %s failed: %s", worker_id, error)

    await beat()
    try:
        async with background(forever(), name="heartbeat"):
            yield
    finally:
        await registry.leave(worker_id)


if __name__ == "__main__":
    run_child(main)
