"""A stand-in for an OpenAI-compatible channel: a real HTTP server whose every answer a test scripts to the byte.

    from tests.channel.stub import Reply, StubChannel, chat, error, events, text_stream

    with StubChannel() as channel:                           # a thread with sockets of its own; port 0, loopback
        channel.url                                          # "http://127.0.0.1:41873": any base_url spelling ends here
        channel.script(error(429, "slow down", retry_after="1"), chat("7"))   # in order, one for each call
        channel.default = chat("yes")                        # once the script is through; also a function of the Call
        ...
        channel.calls[-1].json["model"], channel.calls[-1].header("authorization"), channel.most_at_once

What a Reply can do: any status, any headers (`headers=()` leaves even Content-Type out), exact bytes; `body` may be a list, whose
pieces leave in writes of their own and whose numbers are pauses in seconds; `framing` length, chunked or close; `gzip`; `delay_s`
before the head, or `gate`, a threading.Event that holds the head back until the test sets it (waits for no clock); `hang_up` closes the
connection instead (before the answer, or with `body` in its middle). `chat` is an answer, `error` a failure, `text_stream` a stream of
deltas, `events` a stream of any data lines in one of the legal spellings. A server that is not there: `StubChannel.refused_url()`.

As a process, for scripts and shells: `python -m tests.channel.stub --port 9100 --answer 通了` prints its URL and serves until it is ended;
`--key K` refuses every other key with 401 as channels do.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, Self

from tests.ports import quiet_port

Piece = bytes | float
Framing = Literal["length", "chunked", "close"]
JSON: tuple[tuple[str, str], ...] = (("Content-Type", "application/json"),)
SSE: tuple[tuple[str, str], ...] = (("Content-Type", "text/event-stream; charset=utf-8"),)


@dataclass(frozen=True)
class Call:
    """One request as it came. headers: in order, names in lower case. number: 0, 1, … of this server."""

    number: int
    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name.lower()), None)


@dataclass(frozen=True)
class Reply:
    """One scripted answer; see the header of this file."""

    status: int = 200
    body: bytes | Sequence[Piece] = b""
    headers: tuple[tuple[str, str], ...] = JSON
    framing: Framing = "length"
    gzip: bool = False
    delay_s: float = 0.0
    gate: threading.Event | None = None
    hang_up: bool = False


Answer = Reply | Callable[[Call], Reply]


def chat(text: str | None, *, model: str = "upstream-model", finish_reason: str = "stop", **message: Any) -> Reply:
    """A whole Chat Completions answer of 10 + 5 tokens. message: further fields of the message (tool_calls, reasoning_content)."""
    said = {"role": "assistant", "content": text, **message}
    choice = {"index": 0, "message": said, "logprobs": None, "finish_reason": finish_reason}
    return Reply(
        body=_dumps(
            {
                "id": "chatcmpl-upstream",
                "object": "chat.completion",
                "created": 1700000000,
                "model": model,
                "choices": [choice],
                "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
            }
        )
    )


def error(status: int, message: str, *, code: str | int | None = None, retry_after: str | None = None) -> Reply:
    """A failure in OpenAI's shape."""
    headers = JSON if retry_after is None else (*JSON, ("Retry-After", retry_after))
    return Reply(
        status, _dumps({"error": {"message": message, "type": "error", "param": None, "code": code}}), headers=headers
    )


def events(
    *data: bytes, line_end: bytes = b"\n", space: bytes = b" ", cut: Callable[[bytes], list[Piece]] | None = None
) -> Reply:
    """A stream with one event for each data. line_end: LF, CRLF or CR. space: behind `data:`, may be empty. cut: how the bytes of
    the whole stream fall into writes (None: an event in each)."""
    lines = [b"data:" + space + each + line_end * 2 for each in data]
    return Reply(body=cut(b"".join(lines)) if cut is not None else lines, headers=SSE, framing="chunked")


def chunk(delta: dict[str, Any] | None, *, finish_reason: str | None = None, **more: Any) -> bytes:
    """The data of one `chat.completion.chunk`; delta None: no choices, as the chunk of the usage has it."""
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
    head = {
        "id": "chatcmpl-upstream",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": "upstream-model",
    }
    return _dumps(head | {"choices": choices} | more)


USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}


def text_stream(*texts: str, usage: bool = True, **spelling: Any) -> Reply:
    """A stream of these deltas, the finish chunk, a chunk of the usage alone, [DONE]."""
    data = [chunk({"role": "assistant", "content": ""}), *(chunk({"content": text}) for text in texts)]
    data.append(chunk({}, finish_reason="stop"))
    data += [chunk(None, usage=USAGE)] if usage else []
    return events(*data, b"[DONE]", **spelling)


def zipped(reply: Reply) -> Reply:
    """The same answer with `Content-Encoding: gzip`."""
    return replace(reply, gzip=True)


class StubChannel:
    """The server. Safe to script from the test's thread at any time; `calls` grows as requests come."""

    def __init__(self, default: Answer | None = None, *, port: int = 0) -> None:
        self.default: Answer = default or chat("ok")
        self.calls: list[Call] = []
        self.most_at_once = 0
        self.url = ""
        self._port = port
        self._script: deque[Answer] = deque()
        self._changed = threading.Condition()
        self._running = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="stub-channel", daemon=True)
        self._up = threading.Event()
        self._stop: asyncio.Event | None = None

    def script(self, *answers: Answer) -> None:
        """Answers for the next calls, after those that still wait."""
        self._script.extend(answers)

    def wait_for_calls(self, count: int, *, within_s: float = 30.0) -> None:
        """Returns once so many calls have come. Raises AssertionError otherwise."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.calls) >= count, within_s), f"{len(self.calls)} calls came"

    @staticmethod
    def refused_url() -> str:
        """Of a port on which nobody listens."""
        return f"http://127.0.0.1:{quiet_port()}"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._up.wait(30), "the stub channel did not start"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        open_: set[asyncio.Task[None]] = set()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            open_.add(task)
            try:
                await self._connection(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                pass  # the client left, or the test is over
            finally:
                open_.discard(task)
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", self._port)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._up.set()
        await self._stop.wait()
        server.close()
        for task in list(open_):
            task.cancel()
        await asyncio.gather(*open_, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while call := await self._read(reader):
            answer = self._script.popleft() if self._script else self.default
            with self._changed:
                self.calls.append(call)
                self._running += 1
                self.most_at_once = max(self.most_at_once, self._running)
                self._changed.notify_all()
            try:
                stays = await _answer(writer, answer if isinstance(answer, Reply) else answer(call))
            finally:
                with self._changed:
                    self._running -= 1
            if not stays:
                return

    async def _read(self, reader: asyncio.StreamReader) -> Call | None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.IncompleteReadError:
            return None
        first, *lines = head.strip().split("\r\n")
        method, path, _ = first.split(" ")
        headers = tuple((name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines))
        sent = dict(headers)
        body = b""
        if sent.get("transfer-encoding") == "chunked":
            while size := int(await reader.readline(), 16):
                body += await reader.readexactly(size)
                await reader.readline()
            await reader.readline()
        elif "content-length" in sent:
            body = await reader.readexactly(int(sent["content-length"]))
        return Call(len(self.calls), method, path, headers, body)


async def _answer(writer: asyncio.StreamWriter, reply: Reply) -> bool:
    """Whether the connection stays open for another call."""
    if reply.gate is not None:
        await asyncio.to_thread(reply.gate.wait, 60)
    await asyncio.sleep(reply.delay_s)
    pieces: Iterable[Piece] = [reply.body] if isinstance(reply.body, bytes) else reply.body
    if reply.hang_up and not reply.body:
        return False
    if reply.gzip:
        pieces = [gzip.compress(b"".join(piece for piece in pieces if isinstance(piece, bytes)))]
    headers = [*reply.headers, *([("Content-Encoding", "gzip")] if reply.gzip else [])]
    if reply.framing == "length":
        size = sum(len(piece) for piece in pieces if isinstance(piece, bytes))
        headers.append(("Content-Length", str(size + (1 if reply.hang_up else 0))))
    headers.append(("Transfer-Encoding", "chunked") if reply.framing == "chunked" else ("Connection", "keep-alive"))
    if reply.framing == "close":
        headers[-1] = ("Connection", "close")
    head = f"HTTP/1.1 {reply.status} Scripted\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers)
    writer.write(head.encode("latin-1") + b"\r\n")
    for piece in pieces:
        if isinstance(piece, bytes):
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if reply.framing == "chunked" and piece else piece)
            await writer.drain()
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(piece)
    if reply.framing == "chunked" and not reply.hang_up:
        writer.write(b"0\r\n\r\n")
    await writer.drain()
    return reply.framing != "close" and not reply.hang_up


def _dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


@dataclass(frozen=True)
class _Guarded:
    """The answers of the process: 401 without the right key, as channels say it; 404 for another path."""

    answer: str
    key: str | None

    def __call__(self, call: Call) -> Reply:
        if self.key is not None and call.header("authorization") != f"Bearer {self.key}":
            return error(401, "Invalid API key", code="invalid_api_key")
        if not call.path.endswith("/chat/completions"):
            return error(404, f"no such path: {call.path}", code="not_found")
        wanted = call.json
        return text_stream(self.answer) if wanted.get("stream") else chat(self.answer, model=wanted["model"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.channel.stub")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--answer", default="ok")
    parser.add_argument("--key")
    arguments = parser.parse_args()
    with StubChannel(_Guarded(arguments.answer, arguments.key), port=arguments.port) as channel:
        print(channel.url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
