"""The model routes: plain-ASGI handlers of each dialect, between the socket and the recorder.

    add_route(app, "/v1/messages", ModelRoute(dialect, callers, recorder))
    add_route(app, "/v1/messages/count_tokens", CountRoute(dialect, dialect, callers, recorder))

The call runs as a task of its own and writes its events out as they come, so a slow client slows down its own call alone; this
side watches over it. A failure before the first token keeps its true status; a stream's headers are held for it up to hold_s, then
200 and a comment every ping_s (settled 13). After that a failure is said in-band. A client that hangs up cancels the task, also
without stream. Knows no field of any protocol. Used by app.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Protocol

import orjson
from starlette.types import Receive, Scope, Send

from areal.base.errors import ArealError, BadRequest, InvalidKey
from areal.base.types import ModelCall
from areal.proxy.callers import Callers
from areal.proxy.dialects.base import Answer, CountsTokens, Dialect, Done, Event, Failed, Piece, StreamEncoder
from areal.proxy.implicit import Guest
from areal.proxy.live import LiveSession
from areal.proxy.recorder import Recorder
from areal.web.app import bugs_as_errors, end_response, request_id, send_chunk, send_json, start_event_stream
from areal.web.auth import SessionKey
from areal.web.body import ClientGone, disconnected, read_body

LONG_BODY = 128 * 1024  # bytes; longer ones are parsed beside the event loop, which serves other sessions meanwhile
HOLD_S = 15.0
PING_S = 15.0


def decode_json(body: bytes) -> object:
    """Any JSON value that can be said again, with room around it for the answer that repeats it. Raises BadRequest."""
    try:
        value: object = orjson.loads(body)
        if body.count(b"{") + body.count(b"[") > 200:  # the encoder takes 254 levels, the decoder many more
            orjson.dumps([[[[value]]]])
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON ({error}); send a JSON object", code="invalid_json") from None
    except orjson.JSONEncodeError:
        raise BadRequest("the body nests deeper than 250 levels; send a flatter one", code="invalid_json") from None
    return value


class ModelRoute:
    """ASGI handler of one dialect's calls."""

    def __init__(
        self,
        dialect: Dialect,
        callers: Callers,
        recorder: Recorder,
        *,
        hold_s: float = HOLD_S,
        ping_s: float = PING_S,
    ) -> None:
        self._dialect = dialect
        self._callers = callers
        self._recorder = recorder
        self._hold_s = hold_s
        self._ping_s = ping_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        who, call = await _read_call(self._dialect, self._callers, scope, receive)
        if call.stream:
            encoder = self._dialect.stream(call)
            reply: _Reply = _Stream(encoder, send, hold_s=self._hold_s, ping_s=self._ping_s)
        else:
            reply = _Whole(lambda answer: self._dialect.format(answer, call), send)
        name = request_id(scope)
        running = asyncio.create_task(self._run(who, call, reply, name), name=name)
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            while not running.done() and not gone.done():
                await asyncio.wait({running, gone}, timeout=reply.quiet_s, return_when=asyncio.FIRST_COMPLETED)
                if not running.done() and not gone.done():
                    await reply.ping_if_due()
            if gone.done():
                await self._note_undelivered(running)
                raise ClientGone
            await reply.end(_result(running)[1])
        except ArealError as error:
            await reply.fail(error)
        finally:
            gone.cancel()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)  # until its tokens are stored

    async def _run(
        self, who: SessionKey | Guest, call: ModelCall, reply: _Reply, name: str
    ) -> tuple[LiveSession, Answer]:
        """A session that ends with this turn has ended when this returns."""
        task = asyncio.current_task()
        assert task is not None
        with bugs_as_errors(f"request {name}"):
            async with self._callers.calling(who, call, task) as live:
                return live, await self._recorder.answer(live, call, self._dialect.id_prefix, reply.put, name)

    async def _note_undelivered(self, running: asyncio.Task[tuple[LiveSession, Answer]]) -> None:
        """Of a call whose client is gone: an answer that is complete was not delivered; of any other the recorder says so."""
        if running.done() and not running.cancelled() and running.exception() is None:
            live, answer = running.result()
            await self._recorder.undelivered(live, [choice.interaction_id for choice in answer.choices])


class CountRoute:
    """ASGI handler of a dialect's token counting: the same body as a call, nothing sampled, nothing recorded."""

    def __init__(self, dialect: Dialect, form: CountsTokens, callers: Callers, recorder: Recorder) -> None:
        self._dialect = dialect
        self._form = form
        self._callers = callers
        self._recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        who, call = await _read_call(self._dialect, self._callers, scope, receive)
        tokens = await self._recorder.count(await self._callers.conversation(who, call), call)
        await send_json(send, self._form.format_count(tokens))


async def _read_call(
    dialect: Dialect, callers: Callers, scope: Scope, receive: Receive
) -> tuple[SessionKey | Guest, ModelCall]:
    who = callers.who(scope["headers"], model_only=True)
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    body = await read_body(receive)

    def parse() -> ModelCall:
        return replace(dialect.parse(decode_json(body), headers), size=len(body))

    return who, parse() if len(body) < LONG_BODY else await asyncio.to_thread(parse)


def _result(running: asyncio.Task[tuple[LiveSession, Answer]]) -> tuple[LiveSession, Answer]:
    """Of a call that is done. Raises what went wrong."""
    if running.cancelled():
        raise InvalidKey("the session ended while this call was running; start a new session")
    return running.result()


class _Reply(Protocol):
    """How an answer leaves. quiet_s: how long from now nothing may be sent; None: for ever."""

    @property
    def quiet_s(self) -> float | None: ...

    async def put(self, event: Event) -> None: ...

    async def ping_if_due(self) -> None: ...

    async def end(self, answer: Answer) -> None: ...

    async def fail(self, error: ArealError) -> None: ...


class _Whole:
    """All at once, at the end."""

    quiet_s = None

    def __init__(self, form: Callable[[Answer], Any], send: Send) -> None:
        self._form, self._send = form, send

    async def put(self, event: Event) -> None:
        """The answer holds it, too."""

    async def ping_if_due(self) -> None:
        """There is nothing that a client would not take for the answer."""

    async def end(self, answer: Answer) -> None:
        await send_json(self._send, self._form(answer))

    async def fail(self, error: ArealError) -> None:
        raise error


class _Stream:
    """Events as they come, a comment after `ping_s` without any, the head with the first of either or after hold_s."""

    def __init__(self, encoder: StreamEncoder, send: Send, *, hold_s: float, ping_s: float) -> None:
        self._encoder, self._send, self._hold_s, self._ping_s = encoder, send, hold_s, ping_s
        self._ready = b""  # leaves with what comes next
        self._begun = False
        self._one_begins = asyncio.Lock()
        self._sent_at = time.monotonic()

    @property
    def quiet_s(self) -> float:
        return self._sent_at + (self._ping_s if self._begun else self._hold_s) - time.monotonic()

    async def put(self, event: Event) -> None:
        """Send it at once; but what opens an answer or ends a choice together with what follows at once."""
        self._ready += self._encoder.encode(event)
        if self._ready and isinstance(event, Piece):
            await self._flush()

    async def ping_if_due(self) -> None:
        if self.quiet_s <= 0:
            self._ready += self._encoder.ping
            await self._flush()

    async def end(self, answer: Answer) -> None:
        await end_response(self._send, self._ready + self._encoder.encode(Done(answer)))

    async def fail(self, error: ArealError) -> None:
        """In band, if it is too late for a status."""
        if not self._begun:
            raise error
        await end_response(self._send, self._ready + self._encoder.encode(Failed(error)))

    def _flush(self) -> Awaitable[None]:
        if not self._begun:
            return self._begin()
        data, self._ready, self._sent_at = self._ready, b"", time.monotonic()
        return send_chunk(self._send, data)

    async def _begin(self) -> None:
        async with self._one_begins:  # a ping or a choice
            if not self._begun:
                await start_event_stream(self._send)
                self._begun = True
        await self._flush()
