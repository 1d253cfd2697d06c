"""The model routes: plain-ASGI handlers of each dialect, between the socket and the recorder.

    add_route(app, "/v1/messages", ModelRoute(dialect, callers, recorder))
    add_route(app, "/v1/messages/count_tokens", CountRoute(dialect, dialect, callers, recorder))

The call runs as a task of its own and puts its events into a mailbox; this side writes them out as they come. A failure before
the first token keeps its true status; a stream's headers are held for it up to hold_s, then 200 and a comment every ping_s (settled
13). After that a failure is said in-band. A client that hangs up cancels the task, also without stream. Knows no field of any
protocol. Used by app.py.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import orjson
from starlette.types import Receive, Scope, Send

from areal.base.errors import ArealError, BadRequest, InvalidKey
from areal.base.types import ModelCall
from areal.proxy.callers import Callers
from areal.proxy.dialects.base import Answer, CountsTokens, Dialect, Done, Event, Failed
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
        running = _Running(self._dialect, self._callers, self._recorder, who, call, request_id(scope))
        gone = asyncio.ensure_future(disconnected(receive))
        gone.add_done_callback(lambda _: running.mailbox.put_nowait(None))
        try:
            if call.stream:
                await self._stream(running, gone, send)
            else:
                await self._whole(running, gone, send)
        finally:
            gone.cancel()
            await running.stop()

    async def _whole(self, running: _Running, gone: asyncio.Future[None], send: Send) -> None:
        while not isinstance(event := await running.mailbox.get(), Done):
            if event is None:
                raise ClientGone
            if isinstance(event, Failed):
                raise event.error
        if gone.done():
            await running.undelivered(event.answer)
            raise ClientGone
        await send_json(send, self._dialect.format(event.answer, running.call))

    async def _stream(self, running: _Running, gone: asyncio.Future[None], send: Send) -> None:
        encoder = self._dialect.stream(running.call)
        with _Quiet(running.mailbox, self._hold_s) as quiet:
            started, ready = False, b""
            while True:
                event = await running.mailbox.get()
                if event is None:
                    raise ClientGone
                if isinstance(event, Failed) and not started:
                    raise event.error
                if not started:
                    await start_event_stream(send)
                    started, quiet.bound_s = True, self._ping_s
                ready += encoder.ping if isinstance(event, _Quiet) else encoder.encode(event)
                if isinstance(event, Done) and gone.done():
                    await running.undelivered(event.answer)
                if isinstance(event, Done | Failed):
                    await end_response(send, ready)
                    return
                if ready and running.mailbox.empty():  # what has come by now leaves together
                    quiet.since = time.monotonic()
                    await send_chunk(send, ready)
                    ready = b""


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


class _Quiet:
    """Puts itself into a mailbox whenever nothing was sent for bound_s: one timer, however many tokens come."""

    def __init__(self, mailbox: asyncio.Queue[Event | _Quiet | None], bound_s: float) -> None:
        self.bound_s = bound_s
        self.since = time.monotonic()
        self._mailbox = mailbox
        self._timer = asyncio.get_running_loop().call_later(bound_s, self._look)

    def __enter__(self) -> _Quiet:
        return self

    def __exit__(self, *exc: object) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        left = self.since + self.bound_s - time.monotonic()
        if left <= 0:
            self._mailbox.put_nowait(self)
            left = self.bound_s
        self._timer = asyncio.get_running_loop().call_later(left, self._look)


class _Running:
    """One call as a task, and the mailbox that its events arrive in. None in the mailbox: the client is gone."""

    def __init__(
        self,
        dialect: Dialect,
        callers: Callers,
        recorder: Recorder,
        who: SessionKey | Guest,
        call: ModelCall,
        name: str,
    ) -> None:
        self.call = call
        self.mailbox: asyncio.Queue[Event | _Quiet | None] = asyncio.Queue()
        self._live: LiveSession | None = None
        self._recorder = recorder
        self._task = asyncio.create_task(self._run(dialect, callers, recorder, who), name=name)

    async def undelivered(self, answer: Answer) -> None:
        if self._live is not None:
            await self._recorder.undelivered(self._live, [choice.interaction_id for choice in answer.choices])

    async def stop(self) -> None:
        """Cancel what still runs and wait until its tokens are stored."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self, dialect: Dialect, callers: Callers, recorder: Recorder, who: SessionKey | Guest) -> None:
        put = self.mailbox.put_nowait
        try:
            task = asyncio.current_task()
            assert task is not None
            with bugs_as_errors(f"request {self._task.get_name()}"):
                async with callers.calling(who, self.call, task) as live:
                    self._live = live
                    answer = await recorder.answer(live, self.call, dialect.id_prefix, put, self._task.get_name())
            put(Done(answer))  # after the block: a session that ends with this turn has ended when the client hears it
        except ArealError as error:
            put(Failed(error))
        except asyncio.CancelledError:
            put(Failed(InvalidKey("the session ended while this call was running; start a new session")))
            raise
