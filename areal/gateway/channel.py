"""The gateway's side of the upstream channel: calls that name a model of it are answered here, and no worker is asked.

    async with Channel(config.api_gateway, config.model_routing, observe=metrics.observe) as channel:
        door = ChannelDoor(channel, metrics, guest_token="gateway-internal-token")
        if await door.serve(exchange, run): ...                 # answered; else the call is a worker's

Who may: the internal token, and the channel token that a run makes for itself. The key is looked at first, so a session key's call goes to
its worker unread, as before (which refuses these names with 403: a policy must not ask the judge it is scored by). Chat calls pass with the
route's model and defaults put in; Messages and Responses are translated (proxy/dialects/upstream_chat.py). Used by app.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import unquote

import msgspec
import orjson
from prometheus_client import CollectorRegistry, Counter

from areal.base.errors import ArealError, BadRequest, NotFound, Unavailable
from areal.base.types import ModelCall
from areal.gateway.errors import error_event
from areal.gateway.exchange import Exchange
from areal.gateway.routing import Run
from areal.inference.upstream.client import CallReport, Channel
from areal.inference.upstream.names import UPSTREAM_NAMES, nearly_upstream, no_such_model
from areal.inference.upstream.routes import Route
from areal.proxy.dialects.anthropic_messages import AnthropicMessages
from areal.proxy.dialects.base import Dialect, Event, Failed
from areal.proxy.dialects.openai_responses import OpenAIResponses
from areal.proxy.dialects.upstream_chat import ChatEvents, chat_request, read_chat_answer
from areal.proxy.model_list import model_list
from areal.proxy.model_routes import decode_json
from areal.web.auth import MODEL_PREFIX, PREFIX, opens, presented_keys
from areal.web.sse import DONE_EVENT, encode_event

_EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_COUNTS = ("input_tokens", "count_tokens")
_PROBES = ("models", "model")


class _Named(msgspec.Struct):
    model: str | None = None


class ChannelMetrics:
    """Counters of upstream calls; `observe` for the Channel."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        name = "areal_gateway_upstream"
        self._calls = Counter(f"{name}_calls", "Calls to the channel.", ("model", "status"), registry=self.registry)
        self._attempts = Counter(f"{name}_attempts", "Attempts of these calls.", ("model",), registry=self.registry)
        self._seconds = Counter(f"{name}_seconds", "Time these calls took.", ("model",), registry=self.registry)
        self._tokens = Counter(
            f"{name}_tokens", "Tokens, as the channel says.", ("model", "kind"), registry=self.registry
        )

    def observe(self, report: CallReport) -> None:
        role = report.route.role
        self._calls.labels(role, str(report.status)).inc()
        self._attempts.labels(role).inc(report.attempts)
        self._seconds.labels(role).inc(report.elapsed_s)
        self._tokens.labels(role, "prompt").inc(report.prompt_tokens)
        self._tokens.labels(role, "output").inc(report.output_tokens)


class ChannelDoor:
    """Decides what is the channel's, and answers it. guest_token: opens it while no run, whose own tokens would, is attached."""

    def __init__(self, channel: Channel, metrics: ChannelMetrics, *, guest_token: str | None) -> None:
        self._channel, self._guest_token = channel, guest_token
        self.registry = metrics.registry
        self._policy = channel.find("policy_model")
        self._dialects: dict[str, Dialect] = {"responses": OpenAIResponses(), "messages": AnthropicMessages()}

    @property
    def models(self) -> dict[str, str]:
        """What is served: role -> model_id."""
        return {route.role: route.model_id for route in self._channel.routes}

    async def serve(self, exchange: Exchange, run: Run | None) -> bool:
        """Answer a call that is the channel's. False: it is not. Raises NotFound, BadRequest, and what the channel raises."""
        asked = exchange.route
        if asked.access not in ("session", "any_key") or not asked.upstream.startswith("/v1/"):
            return False
        presented = presented_keys(exchange.headers)
        if any(key.startswith((PREFIX, MODEL_PREFIX)) for key in presented):
            return False
        own = run is not None and opens(presented, run.channel_token)  # the run's, for its own calls
        if not own and not opens(presented, run.internal_token if run is not None else self._guest_token):
            return False
        if asked.name in _PROBES:
            return await self._probe(exchange, alone=own or run is None)
        body = await exchange.decoded_body()
        route = self._route(body, run, own=own)
        if route is None:
            return False
        if asked.name in _COUNTS:
            raise NotFound(
                f"the channel counts no tokens; send the call itself to {route.role}, its answer has the usage"
            )
        await self._answer(exchange, route, body)
        return True

    def _route(self, body: bytes, run: Run | None, *, own: bool) -> Route | None:
        """The route that the body's model name means, None for the policy of the run. Raises NotFound, BadRequest."""
        try:
            name = msgspec.json.decode(body or b"{}", type=_Named).model or "default"
        except (msgspec.MsgspecError, RecursionError) as error:  # the latter: nested deeper than the decoder goes
            if run is not None and not own:
                return None  # its worker says what is wrong
            raise BadRequest(f"the body is no model call: {error}; send a JSON object with `model`") from None
        policy_names = () if run is None or own else run.model_names
        route = self._channel.find(name) if name in UPSTREAM_NAMES or name not in policy_names else None
        if route is not None:
            return route
        meant = None if name in policy_names else nearly_upstream(name)
        if meant is not None:
            raise NotFound(no_such_model(name, meant))
        if run is not None and not own:
            return None
        if self._policy is not None:  # as everywhere: any other name means the policy
            return self._policy
        raise NotFound(self._unknown(name))

    async def _probe(self, exchange: Exchange, *, alone: bool) -> bool:
        """The models that this key may ask, where no worker knows more."""
        names = [name for route in self._channel.routes for name in route.names]
        if not alone or not names:
            return False
        models = model_list(names)
        if exchange.route.name == "models":
            await exchange.answer(orjson.dumps(models))
            return True
        name = unquote(exchange.route.upstream.removeprefix("/v1/models/"))
        one = next((model for model in models["data"] if model["id"] == name), None)
        if one is None:
            raise NotFound(self._unknown(name))
        await exchange.answer(orjson.dumps(one))
        return True

    def _unknown(self, name: str) -> str:
        return (
            f"there is no model {name[:80]!r} here; the channel serves {', '.join(self.models) or 'none'}, and the policy is there "
            "while a training run is attached, under a session key or the internal token"
        )

    async def _answer(self, exchange: Exchange, route: Route, body: bytes) -> None:
        asked = decode_json(body)
        if not isinstance(asked, dict):
            raise BadRequest("the request body must be a JSON object", code="invalid_json")
        dialect = self._dialects.get(exchange.route.name)
        if dialect is None:
            await self._chat(exchange, route, asked)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in exchange.headers}
        call = dialect.parse(asked, headers)
        if call.previous:
            raise BadRequest("the channel keeps no answers to go on from; send the whole conversation")
        await self._translated(exchange, route, dialect, call)

    async def _chat(self, exchange: Exchange, route: Route, asked: dict[str, Any]) -> None:
        if asked.get("stream") is not True:
            async with exchange.cancelled_on_disconnect():
                answer = await self._channel.complete(route, asked, request_id=exchange.request_id)
                await exchange.answer(orjson.dumps(answer))
            return
        options = asked.get("stream_options") or {}
        if not isinstance(options, dict):
            raise BadRequest("stream_options must be an object", param="stream_options")
        wants_usage = options.get("include_usage") is True
        if route.config.budget_tokens is not None:  # which can only be kept where they are told
            asked = asked | {"stream_options": {**options, "include_usage": True}}

        def write(chunk: dict[str, Any]) -> bytes:
            return encode_event(orjson.dumps(chunk)) if chunk["choices"] or wants_usage else b""

        failed = partial(error_event, dialect="openai", request_id=exchange.request_id)
        await self._stream(exchange, route, asked, _Form(write, lambda: DONE_EVENT, failed))

    async def _translated(self, exchange: Exchange, route: Route, dialect: Dialect, call: ModelCall) -> None:
        sent = chat_request(call)
        if not call.stream:
            async with exchange.cancelled_on_disconnect():
                said = await self._channel.complete(route, sent, request_id=exchange.request_id)
                answer = read_chat_answer(said, call, dialect.id_prefix)
                await exchange.answer(orjson.dumps(dialect.format(answer, call)))
            return
        encoder, events = dialect.stream(call), ChatEvents(call, dialect.id_prefix)

        def encoded(found: list[Event]) -> bytes:
            return b"".join(encoder.encode(event) for event in found)

        form = _Form(
            lambda chunk: encoded(events.feed(chunk)),
            lambda: encoded(events.end()),
            lambda error: encoder.encode(Failed(error)),
        )
        await self._stream(exchange, route, sent, form)

    async def _stream(self, exchange: Exchange, route: Route, sent: dict[str, Any], form: _Form) -> None:
        """Chunks out as they come. A failure before the first keeps its status; after it, it is said in the stream."""
        async with exchange.cancelled_on_disconnect():
            async with aclosing(self._channel.stream(route, sent, request_id=exchange.request_id)) as chunks:
                try:
                    async for chunk in chunks:
                        if not exchange.status:
                            await exchange.begin(200, list(_EVENT_STREAM))
                        if data := form.write(chunk):
                            await exchange.write(data)
                    await exchange.finish(form.end())
                except ArealError as error:
                    if not exchange.status:
                        raise
                    await _broken(exchange, form, error)
                except asyncio.CancelledError:
                    # The gateway stops and this stream outlived the grace; or the client left.
                    if exchange.status and not exchange.gone:
                        await _broken(exchange, form, Unavailable("the gateway is stopping; retry in a few seconds"))
                    raise


@dataclass(frozen=True, slots=True)
class _Form:
    """How a stream is written: a chunk, its end, and what it says where it fails."""

    write: Callable[[dict[str, Any]], bytes]
    end: Callable[[], bytes]
    failed: Callable[[ArealError], bytes]


async def _broken(exchange: Exchange, form: _Form, error: ArealError) -> None:
    exchange.broken = str(error)
    await exchange.finish(form.failed(error))
