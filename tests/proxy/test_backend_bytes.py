"""What an inference server may do to its answer on the wire, seen by clients of all three protocols: cuts, comments, odd chunks, refusals."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from areal.inference.client import HttpBackend
from areal.web.sse import SseDecoder

PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
DIALECTS = list(PATHS)
Write = Callable[[bytes], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def event(ids: bytes, finish: str | None = None, **more: Any) -> str:
    """One chunk; in the vocabulary of the scripted renderer a byte is a token."""
    count = len(ids)
    body = {
        "token_ids": list(ids),
        "logprobs": [-0.5] * count,
        "weight_versions": [3] * count,
        "kept_mass": [1.0] * count,
    }
    return json.dumps({**body, "finish_reason": finish, **more})


@asynccontextmanager
async def server(answer: Callable[[Write], Awaitable[None]]) -> AsyncIterator[str]:
    """Reads a request and lets `answer` write the bytes."""

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)

        async def write(data: bytes) -> None:
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0.01)  # a network read of its own on the other side

        await answer(write)
        writer.close()

    listening = await asyncio.start_server(connection, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()


async def service_over(make_service: Any, url: str) -> Any:
    backend = HttpBackend("stub", url, "run-token")
    service = await make_service(parts={"backend": backend})
    service.close_backend = backend.close  # in the loop that opened it
    return service


def body_of(dialect: str, stream: bool) -> dict[str, Any]:
    said: Any = {"input": "hi"} if dialect == "responses" else {"messages": [{"role": "user", "content": "hi"}]}
    more = {"stream_options": {"include_usage": True}} if dialect == "chat" and stream else {}
    return {**said, "stream": stream, **more}


async def answered(service: Any, key: str, dialect: str, stream: bool) -> tuple[str, Any]:
    """The text, and the usage as (input, output)."""
    if not stream:
        status, body, _ = await service.post(PATHS[dialect], body_of(dialect, stream), key)
        assert status == 200, body
        text = {
            "chat": lambda: body["choices"][0]["message"]["content"],
            "responses": lambda: body["output"][0]["content"][0]["text"],
            "messages": lambda: body["content"][0]["text"],
        }[dialect]()
        usage = body["usage"]
    else:
        decoder, events = SseDecoder(), []
        async with service.http.post(
            service.url + PATHS[dialect], json=body_of(dialect, stream), headers={"x-api-key": key}
        ) as response:
            async for chunk in response.content.iter_any():
                events += decoder.feed(chunk)
        said = [json.loads(one.data) for one in events if one.data != b"[DONE]"]
        if dialect == "chat":
            assert events[-1].data == b"[DONE]"
            text = "".join(one["choices"][0]["delta"].get("content") or "" for one in said if one["choices"])
            usage = said[-1]["usage"]
        elif dialect == "responses":
            assert [one.name for one in events][-1] == "response.completed"
            text = "".join(one["delta"] for one in said if one["type"] == "response.output_text.delta")
            usage = said[-1]["response"]["usage"]
        else:
            assert [one.name for one in events][-2:] == ["message_delta", "message_stop"]
            text = "".join(one["delta"].get("text", "") for one in said if one["type"] == "content_block_delta")
            usage = {**said[0]["message"]["usage"], **said[-2]["usage"]}
    names = ("prompt_tokens", "completion_tokens") if dialect == "chat" else ("input_tokens", "output_tokens")
    return text, tuple(usage[name] for name in names)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_T104_events_arrive_once_and_in_order_however_the_network_cuts_them(
    make_service: Any, dialect: str, stream: bool
) -> None:
    async def answer(write: Write) -> None:
        await write(HEAD + b": PROCESSING\n\n")
        await write(f"data: {event(b'He')}\n\ndata: {event(b'llo')}\n\n".encode())  # two in one write
        cut = f"data: {event(b' there')}\r\n\r\n".encode()  # one in two, with the other line ends
        await write(cut[:40])
        await write(cut[40:])
        await write(f"data: {event(b'.', 'stop')}\r\r".encode() + b"data: [DONE]\r\n\r\n")

    async with server(answer) as url:
        service = await service_over(make_service, url)
        key = await service.start()
        text, usage = await answered(service, key, dialect, stream)
        await service.close_backend()
    (one,) = await service.recorded(key)
    assert text == "Hello there."
    assert bytes(one.completion.token_ids.tolist()) == b"Hello there."
    assert usage == (len(one.prompt_ids), 12)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shape", ["empty last", "empties between", "all in one", "empty first"])
async def test_T105_T030_chunks_without_tokens_break_nothing_and_no_text_comes_twice(
    make_service: Any, dialect: str, stream: bool, shape: str
) -> None:
    none = event(b"")
    chunks = {
        "empty last": [event(b"12345"), event(b"", "stop")],
        "empties between": [event(b"12"), none, none, event(b"345"), none, event(b"", "stop", usage={"x": 1})],
        "all in one": [event(b"12345", "stop", usage={"completion_tokens": 5})],
        "empty first": [none, event(b"12345"), event(b"", "stop")],
    }[shape]

    async def answer(write: Write) -> None:
        await write(HEAD)
        for chunk in chunks:
            await write(f"data: {chunk}\n\n".encode())
        await write(b"data: [DONE]\n\n")

    async with server(answer) as url:
        service = await service_over(make_service, url)
        key = await service.start()
        text, usage = await answered(service, key, dialect, stream)
        await service.close_backend()
    (one,) = await service.recorded(key)
    assert text == "12345"
    assert usage == (len(one.prompt_ids), 5)
    assert one.tags == ()


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "body", "wanted", "says"),
    [
        (403, b"origin not allowed", 403, "origin not allowed"),
        (422, b'{"detail":"n is too large"}', 422, "n is too large"),
        (429, b"slow down", 429, "slow down"),
        (500, b"<html>oh no</html>", 500, "oh no"),
        (502, b"", 502, "no body"),
        (400, b"too long", 400, "too long"),
        (401, b'{"error":{"message":"wrong key sk-run-0815abcdef"}}', 502, "refused the run token"),
    ],
)
async def test_T106_T019_T028_a_refusal_keeps_its_status_and_text_whatever_its_type(
    make_service: Any, dialect: str, stream: bool, status: int, body: bytes, wanted: int, says: str
) -> None:
    async def answer(write: Write) -> None:
        head = f"HTTP/1.1 {status} Something\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        await write(head.encode() + body)

    async with server(answer) as url:
        service = await service_over(make_service, url)
        key = await service.start()
        got, answer_body, headers = await service.post(PATHS[dialect], body_of(dialect, stream), key)
        await service.close_backend()
    assert got == wanted
    assert headers["content-type"] == "application/json"
    assert says in answer_body["error"]["message"]
    assert (answer_body.get("type") == "error") == (dialect == "messages")
    assert headers["x-should-retry"] == ("true" if wanted >= 500 or wanted == 429 else "false")
    assert ("retry-after" in headers) == (wanted in (429, 503))
    assert "0815" not in json.dumps(answer_body)  # T108
    assert await service.recorded(key) == ()


@pytest.mark.parametrize("status", [200, 400])
async def test_T100_a_compressed_answer_of_the_server_is_read(make_service: Any, status: int) -> None:
    said = f"data: {event(b'ok', 'stop')}\n\ndata: [DONE]\n\n" if status == 200 else '{"error":{"message":"too long"}}'
    packed = gzip.compress(said.encode())
    kind = "text/event-stream" if status == 200 else "application/json"

    async def answer(write: Write) -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-encoding: gzip\r\ncontent-length: {len(packed)}\r\n\r\n"
        await write(head.encode() + packed)

    async with server(answer) as url:
        service = await service_over(make_service, url)
        got, body, headers = await service.post(PATHS["chat"], body_of("chat", False), await service.start())
        await service.close_backend()
    assert (got, "content-encoding" in headers) == (status, False)
    if status == 200:
        assert body["choices"][0]["message"]["content"] == "ok"
    else:
        assert "too long" in body["error"]["message"]


async def test_T100_a_compressed_answer_that_is_damaged_is_the_servers_failure(make_service: Any) -> None:
    async def answer(write: Write) -> None:
        await write(HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n") + b"this is no gzip")

    async with server(answer) as url:
        service = await service_over(make_service, url)
        got, body, _ = await service.post(PATHS["chat"], body_of("chat", False), await service.start())
        await service.close_backend()
    assert got == 502
    assert "damaged gzip" in body["error"]["message"]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "sent",
    [
        {"token_ids": [72, 105, 33]},
        {"token_ids": [72, 105, 33], "logprobs": [-0.5, -0.5]},
        {"token_ids": [72, 105, 33], "logprobs": [-0.5, None, -0.5], "weight_versions": [1, 1, 1]},
    ],
)
async def test_T054_what_the_server_leaves_out_is_answered_and_never_trained(
    make_service: Any, dialect: str, stream: bool, sent: dict[str, Any]
) -> None:
    async def answer(write: Write) -> None:
        await write(HEAD + f"data: {json.dumps({**sent, 'finish_reason': 'stop'})}\n\ndata: [DONE]\n\n".encode())

    async with server(answer) as url:
        service = await service_over(make_service, url)
        key = await service.start()
        text, _ = await answered(service, key, dialect, stream)
        await service.close_backend()
    assert text == "Hi!"
    (one,) = await service.recorded(key)
    assert one.tags == ("untrainable",)
    _, exported, _ = await service.post("/rl/export_trajectories", {"session_id": "task"})
    assert (exported["trajectories"], exported["tokens"]["masked"]) == ([], {"untrainable": 3})
    assert None in exported["interactions"][0]["logprobs"]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "said",
    ['{"text":"hello"}', '{"text":"hello","finish_reason":"stop"}', '{"choices":[]}', "null", "<html>", '{"token_ids":["a"]}'],
)  # fmt: skip
async def test_T054_an_answer_without_ids_is_a_failure_and_not_an_empty_answer(
    make_service: Any, dialect: str, stream: bool, said: str
) -> None:
    async def answer(write: Write) -> None:
        await write(HEAD + f"data: {said}\n\ndata: [DONE]\n\n".encode())

    async with server(answer) as url:
        service = await service_over(make_service, url)
        key = await service.start()
        status, body, _ = await service.post(PATHS[dialect], body_of(dialect, stream), key)
        await service.close_backend()
    assert status == 502, body
    assert body["error"]["message"]
    assert await service.recorded(key) == ()
