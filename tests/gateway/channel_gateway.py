"""A gateway with an upstream channel, in this process: alone, or in front of a run (`Place.gateway(door=…)` of conftest.py)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from areal.config.upstream import ApiGatewayConfig, ModelRoutingConfig
from areal.gateway.app import GatewayApp
from areal.gateway.attachment import Attachment
from areal.gateway.channel import ChannelDoor, ChannelMetrics
from areal.gateway.control import Control
from areal.gateway.splice import Splice
from areal.inference.upstream.client import Channel
from areal.web.address import bind, url_of
from areal.web.serve import serve

GUEST = "gateway-internal-token"
UPSTREAM_KEY = "upstream-4711-secret"  # not of the shape that is hidden anyway


@asynccontextmanager
async def serving(app: GatewayApp, listener: socket.socket) -> AsyncIterator[str]:
    """Its URL, while it answers."""
    stop, ready = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(
        serve(app, listener, ready=lambda _: ready.set(), stop=stop, grace_s=1.0), name="gateway"
    )
    await ready.wait()
    try:
        yield url_of(listener)
    finally:
        stop.set()
        await task


@asynccontextmanager
async def channel_door(url: str, *, guest_token: str | None = GUEST, **more: Any) -> AsyncIterator[ChannelDoor]:
    """To a channel at this URL with a reward and a judge model. more: of `api_gateway`, or whole routes."""
    routes = {
        "reward_model": {"model_id": "reward-large", "temperature": 0.0, "max_tokens": 512},
        "judge_model": {"model_id": "judge-large"},
    }
    routes |= {name: more.pop(name) for name in ("reward_model", "judge_model", "policy_model") if name in more}
    gateway = {
        "base_url": url,
        "api_key": UPSTREAM_KEY,
        "timeout": 20,
        "backoff_seconds": 0.0,
        "breaker_failures": 0,
    } | more
    metrics = ChannelMetrics()
    routing = ModelRoutingConfig.model_validate(routes)
    async with Channel(ApiGatewayConfig.model_validate(gateway), routing, observe=metrics.observe) as channel:
        yield ChannelDoor(channel, metrics, guest_token=guest_token)


@asynccontextmanager
async def gateway_alone(door: ChannelDoor) -> AsyncIterator[str]:
    """A gateway without any run; its URL."""
    listener = bind("127.0.0.1", 0)
    async with Attachment(port=listener.getsockname()[1], loopback=True) as attachment, Splice() as splice:
        app = GatewayApp(
            attachment, splice, Control(attachment, "secret"), loopback=True, body_limit=1 << 20, door=door
        )
        async with serving(app, listener) as url:
            yield url
