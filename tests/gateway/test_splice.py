"""Bytes pass the gateway untouched, at once, in both directions; what breaks on one side is told on the other."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest

CHAT = "/v1/chat/completions"


async def test_T104_chunks_leave_when_they_arrive_and_bytes_are_untouched(place, http):
    pieces = [
        b": PROCESSING\n\n",
        b'data: {"a": 1}\n\ndata: {"b": "\xf0\x9f',
        b'\x98\x80"}\n\n',
        b'event: x\r\ndata: {"c": 3}\r\n\r\n',
        b"data: [DONE]\n\n",
    ]
    go = [asyncio.Event() for _ in pieces]

    async def answer(call):
        await call.begin_stream()
        for piece, may_go in zip(pieces, go, strict=True):
            await may_go.wait()
            await call.chunk(piece)
        await call.end_stream()

    place.workers["w0"].answer = answer
    async with http.post(place.url + CHAT, data=b"{}", headers=place.headers()) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        for piece, may_go in zip(pieces, go, strict=True):
            may_go.set()  # the worker writes this piece only now, so having it proves that nothing waits for the next
            assert await asyncio.wait_for(response.content.readexactly(len(piece)), 60) == piece
        assert await response.content.read() == b""


async def test_T100_compressed_bodies_keep_their_encoding_and_length(place, http):
    packed = gzip.compress(b'{"ok": true, "text": "' + b"a" * 500 + b'"}')

    async def answer(call):
        status = "400 Bad Request" if b"bad" in call.body else "200 OK"
        await call.reply(packed, status=status, headers="content-encoding: gzip\r\n")

    place.workers["w0"].answer = answer
    for body, status in ((b"{}", 200), (b"bad", 400)):
        async with http.post(place.url + CHAT, data=body, headers=place.headers()) as response:
            assert response.status == status
            assert response.headers["content-encoding"] == "gzip"
            assert int(response.headers["content-length"]) == len(packed)
            assert await response.read() == packed


async def test_hop_by_hop_headers_stay_on_their_hop(place, http):
    async def answer(call):
        await call.reply(
            json.dumps(call.headers).encode(),
            headers="connection: keep-alive, x-secret-hop\r\nx-secret-hop: 1\r\nkeep-alive: timeout=5\r\nx-kept: yes\r\n"
            "date: Sun, 29 Nov 2026 18:33:42 GMT\r\n",
        )

    place.workers["w0"].answer = answer
    sent = place.headers() | {"te": "trailers", "connection": "x-private", "x-private": "1", "x-areal-worker": "w9"}
    async with http.post(place.url + CHAT, data=b"{}", headers=sent | {"x-mine": "2"}) as response:
        assert "x-secret-hop" not in response.headers
        assert "keep-alive" not in response.headers
        assert response.headers["x-kept"] == "yes"
        assert len(response.headers.getall("date")) == 1
        got = await response.json()
    assert got["x-mine"] == "2"
    assert not {"te", "x-private", "x-areal-worker"} & set(got)
    assert got["host"] == place.workers["w0"].url.removeprefix("http://")


async def test_one_request_id_on_the_whole_way(place, http):
    async with http.post(place.url + CHAT, data=b"{}", headers=place.headers()) as response:
        made = response.headers["x-request-id"]
        assert response.headers.getall("x-request-id") == [made]
        assert (await response.json())["headers"]["x-request-id"] == made
    given = place.headers() | {"x-request-id": "mine-1"}
    async with http.post(place.url + "/v1/messages", data=b"{}", headers=given) as response:
        assert response.headers["x-request-id"] == response.headers["request-id"] == "mine-1"
        assert (await response.json())["headers"]["x-request-id"] == "mine-1"


async def test_a_large_body_streams_up_whole_and_one_over_the_limit_is_413(run, http):
    await run.add_worker("w0")
    async with run.gateway(body_limit=300_000) as url:
        body = bytes(range(256)) * 1000
        async with http.post(url + CHAT, data=body, headers=run.headers()) as response:
            assert (await response.json())["body"].encode("latin-1") == body

        async def endless():
            for _ in range(100):
                yield b"x" * 10_000

        for too_large in (b"x" * 300_001, endless()):
            async with http.post(url + CHAT, data=too_large, headers=run.headers()) as response:
                assert response.status == 413
                error = (await response.json())["error"]
                assert "rollout.agent.max_body_bytes" in error["message"]
        assert len(run.workers["w0"].calls) <= 2  # what was declared too large never reached the worker


async def test_a_client_that_leaves_closes_the_workers_connection_at_once(place, http, caplog):
    async def answer(call):
        await call.begin_stream()
        await call.chunk(b"data: 1\n\n")
        await asyncio.Event().wait()

    worker = place.workers["w0"]
    worker.answer = answer
    response = await http.post(place.url + CHAT, data=b"{}", headers=place.headers())
    await response.content.readany()
    caplog.set_level("INFO", "areal")
    response.close()
    await asyncio.wait_for(worker.client_left.wait(), 60)
    while "status=499" not in caplog.text:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert "stopping" not in caplog.text  # it is the client that ended this


async def test_a_client_that_leaves_before_the_answer_begins_is_noticed_too(place, http):
    asked = asyncio.Event()

    async def answer(call):
        asked.set()
        await asyncio.Event().wait()

    worker = place.workers["w0"]
    worker.answer = answer
    request = asyncio.create_task(http.post(place.url + CHAT, data=b"{}", headers=place.headers()))
    await asyncio.wait_for(asked.wait(), 60)
    request.cancel()
    await asyncio.wait_for(worker.client_left.wait(), 60)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (CHAT, [b'data: {"error":{"message":"worker w0 went away', b'"code":"backend_error"']),
        ("/v1/messages", [b"event: error\n", b'{"type":"error","error":{"type":"api_error"']),
        ("/v1/responses", [b"event: error\n", b'{"type":"error","code":"backend_error","message":"worker w0']),
    ],
)
async def test_a_worker_that_dies_in_mid_stream_is_told_in_band(place, http, path, expected):
    async def answer(call):
        await call.begin_stream()
        await call.chunk(b"data: 1\n\n")
        call.writer.transport.abort()

    place.workers["w0"].answer = answer
    async with http.post(place.url + path, data=b"{}", headers=place.headers()) as response:
        first, rest = (await response.read()).split(b"\n\n", 1)
    assert first == b"data: 1"
    assert all(piece in rest for piece in expected), rest
    assert rest.endswith(b"\n\n")


@pytest.mark.parametrize("content_type", ["text/event-stream", "application/json"])
async def test_half_an_event_or_body_is_never_ended_as_if_it_were_whole(place, http, content_type):
    async def answer(call):
        await call.begin_stream(content_type)
        await call.chunk(b'data: {"half": ')
        await asyncio.sleep(0.05)
        call.writer.transport.abort()

    place.workers["w0"].answer = answer
    async with http.post(place.url + CHAT, data=b"{}", headers=place.headers()) as response:
        with pytest.raises(Exception, match=r"payload|peer|disconnected"):
            await response.read()


async def test_a_silent_worker_is_504_before_the_answer_and_an_event_in_it(run, http):
    streaming = False

    async def answer(call):
        if streaming:
            await call.begin_stream()
            await call.chunk(b"data: 1\n\n")
        await asyncio.Event().wait()

    await run.add_worker("w0", answer)
    async with run.gateway(silence_timeout_s=1.0) as url:
        async with http.post(url + CHAT, data=b"{}", headers=run.headers()) as response:
            assert response.status == 504
            assert (await response.json())["error"]["code"] == "backend_timeout"
        streaming = True
        async with http.post(url + CHAT, data=b"{}", headers=run.headers()) as response:
            assert response.status == 200
            assert b"sent nothing for" in await response.read()


async def test_a_client_that_reads_late_is_no_silent_worker(run, http):
    body = b"x" * (8 << 20)  # more than the sockets on the way hold, so the worker has to wait as well

    async def answer(call):
        await call.reply(body)

    await run.add_worker("w0", answer)
    async with (
        run.gateway(silence_timeout_s=1.5) as url,
        http.post(url + CHAT, data=b"{}", headers=run.headers()) as response,
    ):
        await asyncio.sleep(2.5)
        assert await response.read() == body


async def test_a_worker_that_answers_nothing_is_502(place, http):
    async def answer(call):
        call.writer.transport.abort()

    place.workers["w0"].answer = answer
    async with http.post(place.url + CHAT, data=b"{}", headers=place.headers()) as response:
        assert response.status == 502
        assert "closed the connection without an answer" in (await response.json())["error"]["message"]


async def test_a_hundred_streams_at_once_each_get_their_own_bytes(place, http):
    everyone_is_here = asyncio.Event()

    async def answer(call):
        await call.begin_stream()
        if len(place.workers["w0"].calls) == 100:
            everyone_is_here.set()
        await everyone_is_here.wait()
        for number in range(20):
            await call.chunk(b"data: %b-%d\n\n" % (call.body, number))
            await asyncio.sleep(0)
        await call.end_stream()

    place.workers["w0"].answer = answer

    async def one(number: int) -> bool:
        async with http.post(place.url + CHAT, data=b"c%d" % number, headers=place.headers()) as response:
            body = await response.read()
        return body == b"".join(b"data: c%d-%d\n\n" % (number, event) for event in range(20))

    assert all(await asyncio.gather(*(one(number) for number in range(100))))


async def test_T103_dead_proxy_variables_disturb_nothing(run, http, monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "10.0.0.0/8")
    await run.add_worker("w0")
    async with run.gateway() as url:
        async with http.post(url + CHAT, data=b"{}", headers=run.headers()) as response:
            assert response.status == 200


async def test_a_client_that_leaves_in_mid_upload_is_gone_not_a_worker_failure(place, http):
    halfway = asyncio.Event()

    async def upload():
        yield b"x" * 1000
        halfway.set()
        await asyncio.Event().wait()

    request = asyncio.create_task(http.post(place.url + CHAT, data=upload(), headers=place.headers()))
    await asyncio.wait_for(halfway.wait(), 60)
    await asyncio.sleep(0.1)
    request.cancel()
    while True:
        async with http.get(place.url + "/metrics") as response:
            if 'route="chat",status="499"' in (text := await response.text()):
                break
        await asyncio.sleep(0.02)
    assert 'status="502"' not in text


async def test_a_gateway_that_stops_says_so_to_whom_it_does_not_wait_for(run, http, caplog):
    """503 before the answer, an event in a stream: never a 500, which no client would try again."""
    arrived = asyncio.Event()

    async def answer(call):
        if b"stream" in call.body:
            await call.begin_stream()
            await call.chunk(b'data: {"a": 1}\n\n')
        arrived.set()
        await asyncio.sleep(600)

    await run.add_worker("w0", answer)
    async with run.gateway() as url:
        stream = await http.post(url + CHAT, data=b'{"stream": true}', headers=run.headers())
        assert await stream.content.readexactly(16) == b'data: {"a": 1}\n\n'
        arrived.clear()
        held = asyncio.create_task(http.post(url + CHAT, data=b"{}", headers=run.headers()))
        await arrived.wait()
    async with await held as response:
        assert response.status == 503
        assert response.headers["x-should-retry"] == "true"
        assert "retry in a few seconds" in (await response.json())["error"]["message"]
    assert b"retry in a few seconds" in await stream.content.read()
    assert not [one for one in caplog.records if one.exc_info]
