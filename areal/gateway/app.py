"""The gateway's ASGI app: one URL for every client, whichever worker holds its session.

    app = GatewayApp(attachment, splice, Control(attachment, secret), loopback=True, body_limit=32 << 20)

Plain ASGI, so that nothing stands between the client's bytes and the worker's. Model and session routes are routed by
key and spliced; health, metrics and what clients probe for are answered here; /control/… is how a run attaches.
Errors come in the shape of the protocol whose path was called, each with its request id. Keeps nothing that it could
not read again. Used by server.py; routing.py, splice.py, exchange.py and attachment.py do the work.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from starlette.types import Receive, Scope, Send

import areal
from areal.base.errors import ArealError, Forbidden, InternalError, MethodNotAllowed, NotFound, StoreError
from areal.base.logs import Log
from areal.gateway.attachment import Attachment
from areal.gateway.control import Control
from areal.gateway.exchange import Exchange
from areal.gateway.implicit import TokenRouter
from areal.gateway.paths import Route, dialect_of, find_route
from areal.gateway.routing import Router, Target
from areal.gateway.splice import Splice, WorkerRefused
from areal.web.address import is_loopback
from areal.web.app import bugs_as_errors, stops_as_errors
from areal.web.auth import presented_keys, refuse_credentials_of_anthropic
from areal.web.body import ClientGone
from areal.web.origin import check_host, check_origin

if TYPE_CHECKING:
    from areal.gateway.channel import ChannelDoor

_log = logging.getLogger("areal.Gateway")
_line = Log("gateway")
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_COUNTERS = 256  # by route and status; there are fewer


class GatewayApp:
    """One per process. loopback: bound to this machine only, so Host and Origin must name it (DNS rebinding)."""

    def __init__(
        self,
        attachment: Attachment,
        splice: Splice,
        control: Control,
        *,
        loopback: bool,
        body_limit: int,
        router: Router | None = None,
        door: ChannelDoor | None = None,
    ) -> None:
        self._attachment, self._splice, self._control = attachment, splice, control
        self._loopback, self._body_limit = loopback, body_limit
        self._router = router or TokenRouter()
        self._door = door
        self._own = {
            "health": self._health,
            "metrics": self._metrics,
            "hello": self._hello,
            "root": self._hello,
        }
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "areal_gateway_requests", "Requests answered.", ("route", "status"), registry=self._registry
        )
        self._counted = lru_cache(_COUNTERS)(self._requests.labels)
        self._running = Gauge("areal_gateway_running_requests", "Requests under way.", registry=self._registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        path: str = scope["path"]
        control = path.startswith("/control/")
        route = Route("control", ("POST",), "none") if control else find_route(path)
        known = route or Route("unknown", (scope["method"],), "none", dialect_of(path))
        exchange = Exchange(scope, receive, send, known, self._body_limit)
        began = time.perf_counter()
        self._running.inc()
        try:
            with stops_as_errors(), bugs_as_errors(f"request {exchange.request_id}"):
                self._check_caller(scope, exchange)
                if route is None:
                    raise NotFound(
                        f"there is no route {path[:200]}; check the path after the base URL: model calls go to "
                        "/v1/chat/completions, /v1/responses or /v1/messages"
                    )
                if exchange.method not in route.methods:
                    raise MethodNotAllowed(f"{path} takes {' or '.join(route.methods)}, not {exchange.method}")
                if control:
                    await exchange.answer(
                        orjson.dumps(await self._control.answer(path[9:], await exchange.body.read()))
                    )
                else:
                    await self._serve(exchange)
        except ClientGone:
            exchange.status = 499
        except InternalError as bug:
            exchange.broken = "a bug in the gateway, see its log"
            if not exchange.status:
                await exchange.refuse(bug)
        except ArealError as error:
            if not exchange.status:  # else it has been said in the stream
                await exchange.refuse(error)
        finally:
            self._running.dec()
            self._note(exchange, began)

    async def _serve(self, exchange: Exchange) -> None:
        own = self._own.get(exchange.route.name)
        if own is not None:
            await own(exchange)
            return
        if self._door is not None and await self._door.serve(exchange, self._attachment.run_if_any()):
            return
        if self._attachment.run_if_any() is None:  # once there is one, another key of the same request may be good
            refuse_credentials_of_anthropic(presented_keys(exchange.headers))
        run = self._attachment.run()
        target = await self._router.route(exchange, run)
        await exchange.body.peek()
        refused: set[str] = set()
        while True:
            try:
                with run.directory.starting(target) if exchange.route.access == "start" else nullcontext():
                    await self._forward(exchange, target)
                return
            except WorkerRefused:
                refused.add(target.url)
                run.directory.refused(target)
                await run.directory.live(anew=True)
                target = await self._router.route(exchange, run)  # where it lives now, or another where any will do
                if target.url in refused:
                    raise

    async def _forward(self, exchange: Exchange, target: Target) -> None:
        exchange.worker = target.worker
        await self._splice.forward(exchange, target)

    async def _health(self, exchange: Exchange) -> None:
        facts: dict[str, Any] = {"status": "ok", "workers": 0, "run_id": self._attachment.run_id, "models": []}
        if facts["run_id"] is not None:
            run = self._attachment.run()
            facts["models"] = run.model_names
            try:
                facts["workers"] = len(await run.directory.live())
                limits = await run.training.limits()
                if limits is not None and limits.held:
                    facts["held"] = limits.held
            except StoreError as error:
                facts |= {"status": "degraded", "reason": str(error)}
        if self._door is not None:
            facts["channel"] = sorted(self._door.models)
        await exchange.answer(orjson.dumps(facts | {"pid": os.getpid(), "areal": areal.__version__}))

    async def _metrics(self, exchange: Exchange) -> None:
        text = generate_latest(self._registry) + (
            generate_latest(self._door.registry) if self._door is not None else b""
        )
        await exchange.answer(text, content_type=_PROMETHEUS)

    async def _hello(self, exchange: Exchange) -> None:
        await exchange.answer(orjson.dumps({"service": "areal gateway", "areal": areal.__version__}))

    def _check_caller(self, scope: Scope, exchange: Exchange) -> None:
        """Raises Forbidden for a page of another site in this user's browser, and for remote readers of metrics."""
        client = scope.get("client")
        if exchange.route.name in ("metrics", "control") and client and not is_loopback(client[0]):
            raise Forbidden(f"{exchange.route.name} answers on loopback only; ask from the gateway's own host")
        if not self._loopback:
            return
        check_host(exchange.headers, "this gateway")
        check_origin(exchange.headers, "this gateway")

    def _note(self, exchange: Exchange, began: float) -> None:
        """Count the request; log what failed, and with --log-level debug everything."""
        self._counted(exchange.route.name, str(exchange.status)).inc()
        failed = exchange.status >= 400 or exchange.broken
        if failed or _log.isEnabledFor(logging.DEBUG):
            _line.line(
                route=exchange.route.name,
                status=exchange.status,
                elapsed_ms=round((time.perf_counter() - began) * 1000, 1),
                worker=exchange.worker,
                request_id=exchange.request_id,
                **({"broken": exchange.broken} if exchange.broken else {}),
            )


async def _lifespan(receive: Receive, send: Send) -> None:
    """What is opened is opened and closed by server.py around the serving."""
    for event in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{event}.complete"})
