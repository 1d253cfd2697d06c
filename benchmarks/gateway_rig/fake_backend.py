"""The backend of every comparison: paced chunks, in Chat Completions and on the inference wire. Prints its URL.

    python fake_backend.py --events 64 --delay-ms 2 --tokens 1

Every answer has `events` chunks, `delay-ms` apart, of `tokens` tokens each, in either protocol. It parses nothing
but where a request ends, so that it costs little beside what is measured. GET /stamps: when the last answer's chunks were
sent (CLOCK_MONOTONIC, ns), which is how latency per chunk is known whatever stands between it and the client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

import uvloop

from areal.inference import wire
from areal.inference.backend import BackendHealth
from areal.web.address import bind, url_of

_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_HEALTH = BackendHealth("fake", version=0, max_context=1 << 20, running=0, waiting=0, kv_tokens_free=1 << 20)
FIRST_ID = 2000  # an ordinary token of any vocabulary of some size


class Answers:
    """The chunks of both protocols, made once."""

    def __init__(self, events: int, tokens: int) -> None:
        self.chat = [self._delta({"content": " word" * tokens}, None) for _ in range(events)]
        self.chat[0] = self._delta({"role": "assistant", "content": " word"}, None)
        self.chat.append(self._delta({}, "stop"))
        self.chat.append(_chunk(b"data: [DONE]\n\n"))
        self.wire = [self._tokens(number, tokens, number == events - 1) for number in range(events)]
        self.wire.append(_chunk(b"data: [DONE]\n\n"))

    def _delta(self, delta: dict[str, str], finish: str | None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        body = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
        return _chunk(b"data: " + json.dumps(body).encode() + b"\n\n")

    def _tokens(self, number: int, tokens: int, last: bool) -> bytes:
        body = {
            "token_ids": [FIRST_ID + number % 64] * tokens,
            "logprobs": [-1.25] * tokens,
            "weight_versions": [0] * tokens,
            "kept_mass": [1.0] * tokens,
            "finish_reason": "length" if last else None,
        }
        return _chunk(b"data: " + json.dumps(body).encode() + b"\n\n")


class Server:
    """Keep-alive HTTP/1.1, just enough of it."""

    def __init__(self, answers: Answers, delay_s: float) -> None:
        self._answers, self._delay_s = answers, delay_s
        self._stamps: list[int] = []  # of the newest answer

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = [line for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
                if length:
                    await reader.readexactly(int(length[0][15:]))
                await self._answer(head.split(b" ", 2)[1], writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _answer(self, path: bytes, writer: asyncio.StreamWriter) -> None:
        if path == b"/stamps":
            writer.write(_json(json.dumps(self._stamps).encode()))
        elif path == b"/health":
            writer.write(_json(wire.encode_health(_HEALTH)))
        else:
            await self._stream(
                self._answers.chat if path.endswith(b"/chat/completions") else self._answers.wire, writer
            )

    async def _stream(self, chunks: list[bytes], writer: asyncio.StreamWriter) -> None:
        writer.write(_STREAM)
        stamps = self._stamps = []
        for chunk in chunks:
            stamps.append(time.monotonic_ns())
            writer.write(chunk)
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
        writer.write(b"0\r\n\r\n")


def _chunk(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


def _json(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=64)
    parser.add_argument("--delay-ms", type=float, default=2.0)
    parser.add_argument("--tokens", type=int, default=1)
    said = parser.parse_args()
    server = Server(Answers(said.events, said.tokens), said.delay_ms / 1000)
    sock = bind("127.0.0.1", 0)
    print(url_of(sock), flush=True)
    async with await asyncio.start_server(server.connection, sock=sock, backlog=1024) as serving:
        await serving.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
