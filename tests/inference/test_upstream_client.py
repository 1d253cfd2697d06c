"""The channel's client against a real server that answers as scripted: attempts, failures, streams. The gateway's side: tests/gateway."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any

import pytest

from areal.base.errors import UpstreamError, UpstreamLimit
from areal.base.guide import situation
from areal.config.upstream import ApiGatewayConfig, ModelRoute, ModelRoutingConfig
from areal.inference.upstream.client import CallReport, Channel, wait_before
from tests.channel.stub import SSE, Reply, StubChannel, chat, chunk, error, events, text_stream, zipped

KEY = "upstream-4711-secret"  # not of the shape that is hidden anyway
ASKED = {"messages": [{"role": "user", "content": "how good is it?"}]}
Opened = Callable[..., AbstractAsyncContextManager[Channel]]


@pytest.fixture
def stub() -> Iterator[StubChannel]:
    with StubChannel() as channel:
        yield channel


def settings(url: str, **changes: Any) -> ApiGatewayConfig:
    named = {
        "base_url": url,
        "api_key": KEY,
        "timeout": 20,
        "max_retries": 3,
        "backoff_seconds": 0.0,
        "breaker_failures": 0,
    }
    return ApiGatewayConfig.model_validate(named | changes)


@asynccontextmanager
async def opened(
    url: str, route: dict[str, Any] | None = None, **changes: Any
) -> AsyncIterator[tuple[Channel, list[CallReport]]]:
    judge = ModelRoute.model_validate(
        {"model_id": "judge-large", "temperature": 0.0, "max_tokens": 256} | (route or {})
    )
    reports: list[CallReport] = []
    async with Channel(
        settings(url, **changes), ModelRoutingConfig(judge_model=judge), observe=reports.append
    ) as channel:
        yield channel, reports


async def complete(channel: Channel, **body: Any) -> dict[str, Any]:
    return await channel.complete(channel.routes[0], ASKED | body)


async def streamed(channel: Channel, into: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """All chunks; into: where those that came stand if it fails."""
    heard = [] if into is None else into
    async with aclosing(channel.stream(channel.routes[0], ASKED)) as chunks:
        async for each in chunks:
            heard.append(each)
    return heard


def said(chunks: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for each in chunks for choice in each["choices"])


async def test_a_call_goes_to_the_model_with_the_routes_defaults_where_it_names_none(stub: StubChannel) -> None:
    async with opened(stub.url) as (channel, reports):
        stub.default = chat("7")
        answer = await complete(channel)
        await complete(channel, temperature=0.7, max_completion_tokens=9, model="judge_model", top_p=None)
    first, second = (call.json for call in stub.calls)
    assert answer["choices"][0]["message"]["content"] == "7"
    assert first == {"model": "judge-large", **ASKED, "temperature": 0.0, "max_tokens": 256}
    assert second == {"model": "judge-large", **ASKED, "temperature": 0.7, "max_completion_tokens": 9, "top_p": None}
    assert stub.calls[0].path == "/v1/chat/completions"
    assert stub.calls[0].header("authorization") == f"Bearer {KEY}"
    assert [(one.status, one.attempts, one.prompt_tokens, one.output_tokens) for one in reports] == [
        (200, 1, 10, 5)
    ] * 2


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 422])
async def test_T098_what_the_client_did_wrong_is_not_sent_again(stub: StubChannel, status: int) -> None:
    stub.default = error(status, "no such thing")
    async with opened(stub.url) as (channel, reports):
        with pytest.raises(UpstreamError, match="no such thing") as failed:
            await complete(channel)
    assert (failed.value.status, len(stub.calls), reports[0].attempts, reports[0].status) == (status, 1, 1, status)


@pytest.mark.parametrize("status", [429, 500, 502, 503, 529])
async def test_T098_what_may_pass_is_tried_as_often_as_configured(stub: StubChannel, status: int) -> None:
    stub.default = error(status, "busy", retry_after="0")
    async with opened(stub.url) as (channel, reports):
        for ask in (complete, streamed):
            with pytest.raises(UpstreamError, match="busy") as failed:
                await ask(channel)
            assert failed.value.status == status
            assert failed.value.should_retry is False  # or every SDK would multiply the attempts
    assert (len(stub.calls), [one.attempts for one in reports]) == (8, [4, 4])


async def test_T098_a_success_after_failures_is_a_success(stub: StubChannel) -> None:
    stub.script(
        error(500, "a"),
        Reply(hang_up=True),
        chat("ok"),
        error(500, "b"),
        Reply(body=b'{"choices', hang_up=True),
        text_stream("ok"),
    )
    async with opened(stub.url) as (channel, reports):
        assert (await complete(channel))["choices"][0]["message"]["content"] == "ok"
        assert said(await streamed(channel)) == "ok"
    assert [(one.attempts, one.status) for one in reports] == [(3, 200), (3, 200)]


async def test_T098_refused_connections_and_time_outs_are_tried_again_too(stub: StubChannel) -> None:
    async with opened(StubChannel.refused_url()) as (channel, reports):
        with pytest.raises(UpstreamError) as failed:
            await complete(channel)
        assert situation("channel-unreachable").said_in(str(failed.value))
        assert (failed.value.status, reports[0].attempts) == (502, 4)
    gate = threading.Event()
    stub.default = Reply(gate=gate)
    async with opened(stub.url, timeout=1.0, max_retries=1) as (channel, reports):
        for ask in (complete, streamed):
            with pytest.raises(UpstreamError) as failed:
                await ask(channel)
            assert failed.value.status == 504
            assert situation("channel-slow").said_in(str(failed.value))
    gate.set()
    assert (len(stub.calls), [one.attempts for one in reports]) == (4, [2, 2])


async def test_T103_a_dead_proxy_of_the_environment_is_named_as_the_cause(
    stub: StubChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)  # no test waits for a name server
    refused = StubChannel.refused_url()
    for proxy, excepted, status in (
        (refused, "10.0.0.0/8", 502),
        ("http://no-such-proxy.invalid:3128", "", 502),
        (refused, "127.0.0.0/8", 200),
    ):
        monkeypatch.setenv("http_proxy", proxy)
        monkeypatch.setenv("no_proxy", excepted)
        async with opened(stub.url, max_retries=0) as (channel, reports):
            if status == 200:
                await complete(channel)
            else:
                with pytest.raises(
                    UpstreamError, match=r"the proxy of the environment is not reachable .* into NO_PROXY"
                ):
                    await complete(channel)
            assert [one.status for one in reports] == [status]


async def test_a_call_has_a_deadline_over_all_its_attempts(stub: StubChannel) -> None:
    stub.default = error(503, "busy", retry_after="30")
    async with opened(stub.url, deadline_seconds=20) as (channel, _):
        with pytest.raises(UpstreamError) as failed:
            await complete(channel)
    assert (failed.value.status, failed.value.retry_after_s, len(stub.calls)) == (503, 30, 1)


def test_the_wait_before_an_attempt_is_the_channels_up_to_a_limit_or_doubles() -> None:
    config = settings("http://h", backoff_seconds=1.0, retry_after_limit_seconds=60)
    assert [wait_before(1, said_s, config) for said_s in (0.0, 7.0, 60.0, 3600.0)] == [0.0, 7.0, 60.0, 60.0]
    for attempts, longest in ((1, 1.0), (2, 2.0), (3, 4.0), (20, 30.0)):
        waits = [wait_before(attempts, None, config) for _ in range(200)]
        assert longest / 2 <= min(waits) < max(waits) <= longest


BAD_ANSWERS = {  # and what of it the caller reads
    "an error without a status": (
        b'{"error": {"message": "odd", "code": "broken"}}',
        "an error in the place of an answer: odd",
    ),
    "no choices": (b'{"id": "x", "choices": []}', 'no choices: {"id":"x","choices":[]}'),
    "null choices": (b'{"choices": null}', 'no choices: {"choices":null}'),
    "null": (b"null", "no JSON object but 'null'"),
    "a page": (b"<html>Welcome to nginx</html>", "<html>Welcome to nginx</html>"),
    "nothing": (b"", "an empty body"),
    "a failed choice": (
        b'{"choices": [{"message": {"content": "x"}, "finish_reason": "error"}]}',
        "a choice that failed",
    ),
    "a choice without message": (b'{"choices": [{"finish_reason": "stop"}]}', "a choice without a message"),
    "a message of another shape": (b'{"choices": [{"message": {"tool_calls": "x"}}]}', "a choice of another shape"),
    "a list": (b"[1, 2]", "[1, 2]"),
    "a code that is nearly a number": ('{"error": {"message": "odd", "code": "²"}}'.encode(), "an error in the place"),
    "JSON that nobody could say again": (
        b'{"choices": [{"message": {"content": "x"}, "more": %b%b}]}' % (b"[" * 300, b"]" * 300),
        "no JSON object",
    ),
    "a reason of another shape": (
        b'{"choices": [{"message": {"content": "x"}, "finish_reason": {"type": "stop"}}]}',
        "a choice of another shape",
    ),
    "a tool call of another shape": (
        b'{"choices": [{"message": {"tool_calls": [{"id": 1, "function": {"name": "f"}}]}}]}',
        "a choice of another shape",
    ),
}


@pytest.mark.parametrize(("body", "shown"), BAD_ANSWERS.values(), ids=BAD_ANSWERS)
async def test_T099_a_200_that_is_no_answer_is_502_with_its_cause(stub: StubChannel, body: bytes, shown: str) -> None:
    stub.default = Reply(body=body)
    async with opened(stub.url) as (channel, reports):
        for ask in (complete, streamed):
            with pytest.raises(UpstreamError) as failed:
                await ask(channel)
            assert failed.value.status == 502
            assert shown in str(failed.value)
    assert [(one.attempts, one.status) for one in reports] == [(1, 502), (1, 502)]


@pytest.mark.parametrize(
    ("event", "status", "attempts"),
    [
        (b'data: {"id": "x", "choices": []}', 502, 1),
        (b'data: {"choices": null}', 502, 1),
        (b'data: {"choices": [], "usage": {"prompt_tokens": 10}}', 502, 1),
        (b'data: {"object": "error", "message": "limited", "code": 429}', 429, 2),
        (b'event: error\ndata: {"message": "limited", "code": 429}', 429, 2),
        (b"event: error\ndata: overloaded", 502, 1),
    ],
)
async def test_T099_a_stream_that_has_no_choice_is_no_answer_either(
    stub: StubChannel, event: bytes, status: int, attempts: int
) -> None:
    stub.default = Reply(body=event + b"\n\ndata: [DONE]\n\n", headers=SSE)
    async with opened(stub.url, max_retries=1) as (channel, reports):
        heard: list[dict[str, Any]] = []
        with pytest.raises(UpstreamError) as failed:
            await streamed(channel, into=heard)
    assert (failed.value.status, heard) == (status, [])
    assert [(one.status, one.attempts) for one in reports] == [(status, attempts)]


async def test_T099_events_before_the_first_choice_come_with_it(stub: StubChannel) -> None:
    stub.default = events(b'{"choices": [], "prompt_filter": 1}', chunk({"content": "al"}, finish_reason="stop"))
    async with opened(stub.url) as (channel, _):
        chunks = await streamed(channel)
    assert ([bool(each["choices"]) for each in chunks], said(chunks)) == ([False, True], "al")


async def test_an_answer_beyond_all_measure_is_not_read_to_its_end(
    stub: StubChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal.inference.upstream.client.LARGEST_ANSWER", 100)
    stub.default = chat("x" * 200)
    async with opened(stub.url) as (channel, _):
        for ask in (complete, streamed):
            with pytest.raises(UpstreamError, match="larger than 100 bytes"):
                await ask(channel)


@pytest.mark.parametrize("code", [429, "429", "rate_limit_exceeded"])
async def test_T099_an_error_in_a_200_is_the_error_that_its_code_names(stub: StubChannel, code: str | int) -> None:
    limited = Reply(
        body=b'{"error": {"message": "rate limited", "code": %b}}'
        % (str(code) if code == 429 else f'"{code}"').encode()
    )
    in_stream = events(b'{"error": {"message": "rate limited", "code": 429}}')
    stub.script(*[limited] * 4, limited, chat("ok"), in_stream, text_stream("ok"))
    async with opened(stub.url) as (channel, reports):
        with pytest.raises(UpstreamError, match="rate limited") as failed:
            await complete(channel)
        assert failed.value.status == 429
        await complete(channel)
        assert said(await streamed(channel)) == "ok"
    assert [one.attempts for one in reports] == [4, 2, 2]


async def test_T100_gzip_is_read(stub: StubChannel) -> None:
    stub.script(zipped(chat("packed")), zipped(error(400, "packed too")), zipped(text_stream("a", "b")))
    async with opened(stub.url) as (channel, _):
        assert (await complete(channel))["choices"][0]["message"]["content"] == "packed"
        with pytest.raises(UpstreamError, match="packed too") as failed:
            await complete(channel)
        assert failed.value.status == 400
        assert said(await streamed(channel)) == "ab"
    assert "gzip" in (stub.calls[0].header("accept-encoding") or "")


def _bytewise(stream: bytes) -> list[bytes | float]:
    return [stream[at : at + 1] for at in range(len(stream))]


def _two_in_one_then_cut(stream: bytes) -> list[bytes | float]:
    """A comment, two events in one write, one event cut in the middle of its JSON."""
    whole, at = b": PROCESSING\n\n" + stream, stream.index(b"drei") + len(b": PROCESSING\n\n") + 2
    return [whole[:13], whole[13:at], 0.02, whole[at:]]


SPELLINGS: dict[str, dict[str, Any]] = {
    "as usual": {},
    "CRLF": {"line_end": b"\r\n"},
    "CR": {"line_end": b"\r"},
    "without the space": {"space": b""},
    "byte by byte": {"cut": _bytewise},
    "byte by byte with CRLF": {"cut": _bytewise, "line_end": b"\r\n"},
    "a comment, two at once, one in two halves": {"cut": _two_in_one_then_cut, "line_end": b"\r\n"},
    "all in one write": {"cut": lambda stream: [stream]},
    "with ids, a retry line and a byte-order mark": {
        "cut": lambda stream: [b"\xef\xbb\xbfid: 1\nretry: 10\n" + stream]
    },
    "with events that say nothing": {"cut": lambda stream: [b"data:\n\n", stream.replace(b"\n\n", b"\n\ndata\n\n")]},
    "an event over several lines": {"cut": lambda stream: [stream.replace(b', "choices"', b',\ndata: "choices"')]},
    "without the last blank line": {"cut": lambda stream: [stream.rstrip()]},
    "without the last line end of a CR": {"cut": lambda stream: [stream[:-1]], "line_end": b"\r"},
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
async def test_T104_a_stream_arrives_once_and_in_order_in_every_legal_spelling(
    stub: StubChannel, spelling: dict[str, Any]
) -> None:
    stub.default = text_stream("eins ", "zwei ", "drei ", "四", **spelling)
    async with opened(stub.url) as (channel, reports):
        chunks = await streamed(channel)
    assert said(chunks) == "eins zwei drei 四"
    assert [choice["finish_reason"] for each in chunks for choice in each["choices"]] == [None] * 5 + ["stop"]
    assert (reports[0].status, reports[0].prompt_tokens, reports[0].output_tokens) == (200, 10, 5)
    assert stub.calls[0].json["stream"] is True


async def test_a_stream_that_ends_too_early_or_fails_in_its_middle_is_a_failure_that_is_not_repeated(
    stub: StubChannel,
) -> None:
    begun = chunk({"content": "al"})
    cut = events(begun)
    stub.script(
        cut,
        Reply(body=[b"data: " + begun + b"\n\n"], headers=cut.headers, framing="chunked", hang_up=True),
        events(begun, b'{"error": {"message": "overloaded", "code": 503}}'),
        events(begun, b"{no json"),
        events(begun, chunk({}, finish_reason="error")),
    )
    async with opened(stub.url) as (channel, reports):
        for reason in ("before it was complete", "broke off", "overloaded", "no JSON object", "failed"):
            heard: list[dict[str, Any]] = []
            with pytest.raises(UpstreamError, match=reason):
                await streamed(channel, into=heard)
            assert said(heard) == "al"
    assert [one.attempts for one in reports] == [1] * 5


async def test_a_stream_without_a_done_line_is_complete_with_its_finish_reason(stub: StubChannel) -> None:
    stub.script(
        events(chunk({"content": "al"}), chunk({}, finish_reason="length")), chat("whole", reasoning_content="hm")
    )
    async with opened(stub.url) as (channel, _):
        assert said(await streamed(channel)) == "al"
        chunks = await streamed(channel)  # of a channel that streams nothing
    assert (
        said(chunks),
        chunks[0]["choices"][0]["delta"]["reasoning_content"],
        chunks[1]["usage"]["total_tokens"],
    ) == ("whole", "hm", 15)


async def test_a_stream_that_falls_silent_is_504(stub: StubChannel) -> None:
    stub.default = events(
        chunk({"content": "al"}), chunk({}, finish_reason="stop"), cut=lambda stream: [stream[:-60], 60.0]
    )
    async with opened(stub.url, timeout=1.0) as (channel, reports):
        with pytest.raises(UpstreamError, match="sent nothing") as failed:
            await streamed(channel)
    assert (failed.value.status, reports[0].attempts) == (504, 1)


@pytest.mark.parametrize("wait", ["inf", "9" * 400, "nan", "-5", "soon", "Wed, 21 Oct 2015 07:28:00 +9999999999999"])
async def test_a_retry_after_of_any_kind_is_no_failure_of_its_own(stub: StubChannel, wait: str) -> None:
    stub.default = error(429, "busy", retry_after=wait)
    async with opened(stub.url, max_retries=0) as (channel, _):
        with pytest.raises(UpstreamError, match="busy") as failed:
            await complete(channel)
    assert failed.value.status == 429


async def test_an_account_without_money_is_told_so_and_tried_once(stub: StubChannel) -> None:
    stub.default = error(402, "Insufficient Balance")
    async with opened(stub.url) as (channel, reports):
        with pytest.raises(
            UpstreamError, match=r"nothing left for judge_model \(402: Insufficient Balance\); top it up"
        ):
            await complete(channel)
    assert [(one.status, one.attempts) for one in reports] == [(402, 1)]


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_T108_a_proxy_that_refuses_is_named_without_its_password(
    stub: StubChannel, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    stub.default = Reply(407, b"who are you?")
    monkeypatch.setenv(f"{scheme}_proxy", stub.url.replace("://", "://me:hunter22@"))
    monkeypatch.setenv("no_proxy", "")
    async with opened(f"{scheme}://channel.invalid") as (channel, reports):
        with pytest.raises(UpstreamError, match=r"the proxy of the environment .*407.*NO_PROXY") as failed:
            await complete(channel)
    assert (failed.value.status, reports[0].attempts) == (502, 1)
    assert "hunter22" not in f"{failed.value} {reports[0].reason}"


@pytest.mark.parametrize(("status", "name"), [(401, "channel-key"), (404, "channel-model"), (429, "channel-rate")])
async def test_a_refusal_is_told_as_in_the_guide(stub: StubChannel, status: int, name: str) -> None:
    stub.default = Reply(status, b"no")
    async with opened(stub.url, max_retries=0) as (channel, _):
        with pytest.raises(UpstreamError) as failed:
            await complete(channel)
    assert failed.value.status == status
    assert situation(name).said_in(str(failed.value))


async def test_T106_a_status_counts_whatever_the_body_is(stub: StubChannel) -> None:
    stub.default = Reply(403, b"origin not allowed", headers=())
    async with opened(stub.url) as (channel, _):
        for ask in (complete, streamed):
            with pytest.raises(UpstreamError, match="origin not allowed") as failed:
                await ask(channel)
            assert failed.value.status == 403


async def test_a_redirect_is_not_followed_because_the_key_would_go_with_it(stub: StubChannel) -> None:
    with StubChannel() as other:
        stub.default = Reply(307, b"", headers=(("Location", f"{other.url}/v1/chat/completions"),))
        async with opened(stub.url) as (channel, _):
            with pytest.raises(
                UpstreamError, match=r"put the address that it names into api_gateway\.base_url"
            ) as failed:
                await complete(channel)
        assert (failed.value.status, len(stub.calls), other.calls) == (502, 1, [])


async def test_T108_a_key_that_the_channel_says_back_stays_out_of_error_and_report(stub: StubChannel) -> None:
    for before in ("", "x" * 258 + " "):  # the second is cut off in the middle of the key
        stub.default = error(401, f"Incorrect API key provided: {before}{KEY}")
        async with opened(stub.url) as (channel, reports):
            with pytest.raises(UpstreamError, match="Invalid API key") as failed:
                await complete(channel)
        assert KEY[:12] not in f"{failed.value} {reports[0].reason}"
        assert "Incorrect API key provided" in reports[0].reason


async def test_calls_at_once_are_bounded_and_those_that_wait_too_long_are_429(stub: StubChannel) -> None:
    gate = threading.Event()
    stub.default = Reply(body=chat("x").body, gate=gate)
    async with opened(stub.url, {"concurrency": 2}, queue_timeout_seconds=0.2) as (channel, reports):
        running = [asyncio.create_task(complete(channel)) for _ in range(2)]
        await asyncio.to_thread(stub.wait_for_calls, 2)
        with pytest.raises(UpstreamLimit, match="2 calls of judge_model are under way") as refused:
            await complete(channel)
        assert (refused.value.status, refused.value.should_retry, refused.value.retry_after_s) == (429, True, 1)
        gate.set()
        await asyncio.gather(*running)
        await complete(channel)
    assert (stub.most_at_once, len(stub.calls)) == (2, 3)
    assert sorted((one.status, one.attempts) for one in reports) == [(200, 1)] * 3 + [(429, 0)]


async def test_a_caller_that_leaves_closes_the_call_and_frees_its_place(stub: StubChannel) -> None:
    gate = threading.Event()
    stub.script(Reply(gate=gate), chat("free"), text_stream("a", "b"), chat("free"))
    async with opened(stub.url, {"concurrency": 1}) as (channel, reports):
        task = asyncio.create_task(complete(channel))
        await asyncio.to_thread(stub.wait_for_calls, 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (await complete(channel))["choices"]
        async with aclosing(channel.stream(channel.routes[0], ASKED)) as chunks:
            await anext(chunks)
        await complete(channel)
    gate.set()
    assert [one.status for one in reports] == [499, 200, 499, 200]


async def test_a_budget_counts_by_size_what_the_channel_does_not_say(stub: StubChannel) -> None:
    """A reader that leaves before the usage, which comes last, a stream without one and an answer without one."""
    async with opened(stub.url, {"budget_tokens": 10_000}) as (channel, reports):
        limits = channel._limits["judge_model"]
        stub.script(text_stream("a", "b", "c"), text_stream("a", "b", usage=False), text_stream("a", "b", "c"))
        async with aclosing(channel.stream(channel.routes[0], ASKED)) as chunks:
            for _ in range(3):  # of which the first says nothing but its role
                await anext(chunks)
        prompt = len(stub.calls[0].body) // 4
        assert (prompt > 10, limits._tokens) == (True, prompt + 2)
        await streamed(channel)
        assert limits._tokens == 2 * prompt + 4
        await streamed(channel)
        assert limits._tokens == 2 * prompt + 4 + 15, "as the channel says"
        stub.default = Reply(body=b'{"choices": [{"message": {"content": "%b"}}]}' % (b"x" * 400))
        await complete(channel)
        grown = limits._tokens - (2 * prompt + 4 + 15)
        assert prompt + 90 <= grown <= prompt + 130
    assert [(one.prompt_tokens, one.output_tokens) for one in reports] == [(0, 0), (0, 0), (10, 5), (0, 0)]


async def test_a_large_answer_where_a_stream_was_asked_for_is_read_in_pieces(
    stub: StubChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "x" * 3_000_000
    pieces: list[bytes | float] = list(batched_bytes(chat(text).body, 50_000))
    stub.default = Reply(body=pieces, headers=(("Content-Type", "text/plain"),), framing="chunked")
    async with opened(stub.url) as (channel, _):
        assert said(await streamed(channel)) == text
        monkeypatch.setattr("areal.inference.upstream.client.LARGEST_ANSWER", 100_000)
        with pytest.raises(UpstreamError, match="larger than 100000 bytes"):
            await streamed(channel)


def batched_bytes(data: Any, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


async def test_a_budget_counts_what_was_sent_and_then_given_up_and_nothing_that_was_refused(stub: StubChannel) -> None:
    gate = threading.Event()
    stub.default = Reply(gate=gate)
    async with opened(stub.url, {"budget_tokens": 10_000}, timeout=3, max_retries=0) as (channel, _):
        limits = channel._limits["judge_model"]
        failed = await asyncio.gather(complete(channel), streamed(channel), return_exceptions=True)
        assert [getattr(one, "status", one) for one in failed] == [504, 504]
        prompts = [len(call.body) // 4 for call in stub.calls]
        assert (len(prompts), limits._tokens) == (2, sum(prompts))
    async with opened(stub.url, {"budget_tokens": 10_000}) as (channel, _):
        limits = channel._limits["judge_model"]
        task = asyncio.create_task(complete(channel))
        await asyncio.to_thread(stub.wait_for_calls, 3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        prompt = len(stub.calls[2].body) // 4
        assert limits._tokens == prompt
        gate.set()
        stub.default = error(429, "busy")
        with pytest.raises(UpstreamError, match="busy"):
            await complete(channel)
        assert limits._tokens == prompt
    async with opened(StubChannel.refused_url(), {"budget_tokens": 10_000}) as (channel, _):
        with pytest.raises(UpstreamError, match="not reachable"):
            await complete(channel)
        assert channel._limits["judge_model"]._tokens == 0
