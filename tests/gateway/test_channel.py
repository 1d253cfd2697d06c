"""The upstream channel through the gateway, with the real SDKs: who may ask, what is sent, what comes back, what the log says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import msgspec
import openai
import pytest

from areal.base.errors import ConfigError
from areal.base.logs import open_log, parse_line
from areal.gateway.attachment import Attachment
from tests.channel.stub import USAGE, Reply, StubChannel, chat, chunk, error, events, text_stream, zipped
from tests.gateway.channel_gateway import GUEST, UPSTREAM_KEY, channel_door, gateway_alone

ASKED: list[Any] = [{"role": "user", "content": "how good is it?"}]
CHANNEL_TOKEN = "sk-channel-of-this-life-of-the-run"


@pytest.fixture
async def url(upstream: StubChannel) -> AsyncIterator[str]:
    """A gateway without a run in front of `upstream`."""
    async with channel_door(upstream.url) as door, gateway_alone(door) as url:
        yield url


def openai_sdk(url: str, key: str = GUEST, **more: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/gateway/v1", api_key=key, **more)


async def ask(url: str, model: str = "reward_model", key: str = GUEST, **more: Any) -> Any:
    async with openai_sdk(url, key, max_retries=0) as client:
        return await client.chat.completions.create(model=model, messages=ASKED, **more)


async def test_the_channel_is_served_without_any_run_and_passes_what_it_does_not_know(
    url: str, upstream: StubChannel
) -> None:
    upstream.default = chat("8", reasoning_content="hm", service_tier="x")
    answer = await ask(url, extra_body={"logit_bias": {"5": 1}, "a_field_of_tomorrow": [1]})
    by_id = await ask(url, "judge-large", temperature=0.5, max_tokens=7)
    assert (answer.choices[0].message.content, answer.usage.total_tokens) == ("8", 15)
    assert answer.choices[0].message.reasoning_content == "hm"
    assert by_id.choices[0].message.content == "8"
    first, second = (call.json for call in upstream.calls)
    assert first == {
        "model": "reward-large", "messages": ASKED, "temperature": 0.0, "max_tokens": 512, "logit_bias": {"5": 1}, "a_field_of_tomorrow": [1],
    }  # fmt: skip
    assert second == {"model": "judge-large", "messages": ASKED, "temperature": 0.5, "max_tokens": 7}
    assert {call.header("authorization") for call in upstream.calls} == {f"Bearer {UPSTREAM_KEY}"}


@pytest.mark.parametrize("prefix", ["", "/v1", "/v1/v1", "/gateway", "/gateway/v1", "/gateway/v1/v1"])
async def test_T101_it_answers_under_every_prefix(url: str, http: aiohttp.ClientSession, prefix: str) -> None:
    body = {"model": "reward_model", "messages": ASKED}
    async with http.post(f"{url}{prefix}/chat/completions", json=body, headers={"x-api-key": GUEST}) as answer:
        assert (await answer.json())["choices"][0]["message"]["content"] == "ok"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 429, 500, 502, 503])
async def test_T098_attempts_are_as_configured_though_the_clients_retry_too(
    url: str, upstream: StubChannel, status: int
) -> None:
    upstream.default = error(status, "the upstream's reason", retry_after="0")
    async with openai_sdk(url, max_retries=2) as client:
        with pytest.raises(openai.APIStatusError, match="the upstream's reason") as failed:
            await client.chat.completions.create(model="reward_model", messages=ASKED)
        assert failed.value.status_code == status
        assert len(upstream.calls) == (4 if status in (429, 500, 502, 503) else 1)
    async with anthropic.AsyncAnthropic(base_url=url, api_key=GUEST, max_retries=2) as claude:
        with pytest.raises(anthropic.APIStatusError) as said:
            await claude.messages.create(model="judge_model", messages=ASKED, max_tokens=9)
        assert said.value.status_code == status
        assert len(upstream.calls) == (8 if status in (429, 500, 502, 503) else 2)


async def test_T098_a_call_that_succeeds_in_the_end_is_an_answer(url: str, upstream: StubChannel) -> None:
    upstream.script(error(500, "a"), error(500, "b"), chat("9"))
    assert (await ask(url)).choices[0].message.content == "9"
    assert len(upstream.calls) == 3


@pytest.mark.parametrize(
    "body", [b'{"id": "x", "choices": []}', b'{"choices": null}', b"null", b"<html>front page</html>"]
)
async def test_T099_a_200_without_an_answer_is_502_with_a_snippet(url: str, upstream: StubChannel, body: bytes) -> None:
    upstream.default = Reply(body=body)
    for more in ({}, {"stream": True}):
        with pytest.raises(openai.InternalServerError) as failed:
            await ask(url, **more)
        assert failed.value.status_code == 502
        assert body.decode().replace(" ", "").removesuffix("page</html>") in failed.value.message.replace(" ", "")


async def test_T100_nothing_of_the_upstreams_encoding_passes(
    url: str, upstream: StubChannel, http: aiohttp.ClientSession
) -> None:
    upstream.script(zipped(chat("packed")), zipped(error(400, "packed too")))
    for status, text in ((200, '"packed"'), (400, "packed too")):
        body = {"model": "reward_model", "messages": ASKED}
        async with http.post(
            f"{url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {GUEST}"}
        ) as answer:
            data = await answer.read()
            assert answer.status == status
            assert "content-encoding" not in answer.headers
            assert int(answer.headers["content-length"]) == len(data)
            assert text in data.decode()


async def streamed(url: str, model: str = "reward_model", **more: Any) -> tuple[str, list[Any]]:
    async with openai_sdk(url, max_retries=0) as client:
        stream = await client.chat.completions.create(model=model, messages=ASKED, stream=True, **more)
        chunks = [each async for each in stream]
    return "".join(choice.delta.content or "" for each in chunks for choice in each.choices), chunks


async def test_T104_a_chat_stream_passes_chunk_by_chunk_however_it_was_cut(url: str, upstream: StubChannel) -> None:
    upstream.script(
        text_stream(
            "eins ", "zwei", line_end=b"\r\n", cut=lambda stream: [b": PROCESSING\r\n\r\n" + stream[:200], stream[200:]]
        ),
        events(chunk({"content": "al"}), chunk({"content": "les"}, finish_reason="stop", usage=USAGE)),
    )
    text, chunks = await streamed(url, stream_options={"include_usage": True})
    assert (text, chunks[-1].choices, chunks[-1].usage.completion_tokens) == ("eins zwei", [], 5)
    text, chunks = await streamed(url)
    assert (text, len(chunks)) == ("alles", 2)  # usage beside the last content: once


async def test_T105_a_usage_chunk_stays_with_who_asked_for_it(url: str, upstream: StubChannel) -> None:
    upstream.default = text_stream("a", "b")
    text, chunks = await streamed(url)
    assert text == "ab"
    assert all(each.choices for each in chunks)  # clients index into them


TOOL_STREAM = events(
    chunk({"reasoning_content": "let me see"}),
    chunk({"content": "One moment."}),
    chunk(
        {
            "tool_calls": [
                {"index": 3, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": ""}}
            ]
        }
    ),
    chunk({"tool_calls": [{"index": 3, "function": {"arguments": '{"at": '}}]}),
    chunk({"tool_calls": [{"index": 3, "function": {"arguments": "1}"}}]}),
    chunk({}, finish_reason="tool_calls"),
    chunk(None, usage=USAGE),
    b"[DONE]",
)
CHUNKS_OF_T105 = {
    "a usage chunk of its own": text_stream("It is ", "good."),
    "usage beside the last content": events(
        chunk({"content": "It is "}), chunk({"content": "good."}, finish_reason="stop", usage=USAGE)
    ),
    "no finish chunk and no usage in it": events(
        chunk({"content": "It is good."}), chunk(None, usage=USAGE), b"[DONE]"
    ),
    "log-probs and details of another shape": events(
        b'{"choices": [{"index": 0, "delta": null}]}',
        chunk({"content": "It is good."}, usage=USAGE | {"prompt_tokens_details": [5]}).replace(
            b'"finish_reason": null', b'"finish_reason": "stop", "logprobs": {"content": [{"bytes": ["x"]}, 5]}'
        ),
    ),
}


@pytest.mark.parametrize("stream", CHUNKS_OF_T105.values(), ids=CHUNKS_OF_T105)
async def test_T105_messages_and_responses_end_with_their_closing_events_and_the_usage(
    url: str, upstream: StubChannel, stream: Reply
) -> None:
    upstream.default = stream
    async with anthropic.AsyncAnthropic(base_url=url, api_key=GUEST) as claude:
        async with claude.messages.stream(model="reward_model", messages=ASKED, max_tokens=9, system="Judge.") as heard:
            kinds = [event.type async for event in heard]
            message = await heard.get_final_message()
    assert (message.content[0].text, message.usage.input_tokens, message.usage.output_tokens) == ("It is good.", 10, 5)
    assert (message.stop_reason, kinds[-1]) == ("end_turn", "message_stop")
    async with openai_sdk(url) as client:
        async with client.responses.stream(
            model="reward_model", input="how good is it?", instructions="Judge."
        ) as answer:
            names = [event.type async for event in answer]
            final = await answer.get_final_response()
    assert (final.output_text, final.usage.input_tokens, final.usage.output_tokens) == ("It is good.", 10, 5)
    assert (final.status, names[0], names[-1]) == ("completed", "response.created", "response.completed")
    for call in upstream.calls:
        assert call.json["messages"] == [{"role": "system", "content": "Judge."}, *ASKED]
        assert call.json["stream_options"] == {"include_usage": True}
    assert [call.json["max_tokens"] for call in upstream.calls] == [9, 512]


async def test_tool_calls_and_reasoning_come_through_both_front_ends(url: str, upstream: StubChannel) -> None:
    upstream.default = TOOL_STREAM
    claude_tool: Any = {
        "name": "look",
        "description": "Looks.",
        "input_schema": {"type": "object", "properties": {"at": {"type": "integer"}}},
    }
    async with anthropic.AsyncAnthropic(base_url=url, api_key=GUEST) as claude:
        forced: Any = {"type": "tool", "name": "look"}
        async with claude.messages.stream(
            model="judge_model", messages=ASKED, max_tokens=9, tools=[claude_tool], tool_choice=forced
        ) as heard:
            message = await heard.get_final_message()
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        assert (message.content[2].name, message.content[2].input, message.stop_reason) == (
            "look",
            {"at": 1},
            "tool_use",
        )
        upstream.default = chat(
            None,
            finish_reason="tool_calls",
            tool_calls=[{"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": 2}'}}],
        )
        again: Any = [
            *ASKED,
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "nothing"}]},
        ]
        whole = await claude.messages.create(model="judge_model", messages=again, max_tokens=9, tools=[claude_tool])
    assert (whole.content[0].input, whole.usage.output_tokens) == ({"at": 2}, 5)
    first, second = (call.json for call in upstream.calls)
    assert first["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    assert first["tools"][0]["function"]["parameters"] == claude_tool["input_schema"]
    assert second["messages"][1]["tool_calls"][0] == {
        "id": "call_1",
        "type": "function",
        "function": {"name": "look", "arguments": '{"at":1}'},
    }
    assert second["messages"][2] == {"role": "tool", "content": "nothing", "tool_call_id": "call_1"}
    async with openai_sdk(url) as client:
        form: Any = {
            "format": {
                "type": "json_schema",
                "name": "verdict",
                "schema": {"type": "object", "properties": {}},
                "strict": True,
            }
        }
        upstream.default = chat('{"good": true}')
        answer = await client.responses.create(model="judge_model", input="how good?", text=form, max_output_tokens=11)
    assert answer.output_text == '{"good": true}'
    assert upstream.calls[-1].json["response_format"]["json_schema"]["schema"] == form["format"]["schema"]
    assert upstream.calls[-1].json["max_tokens"] == 11


async def test_a_stream_that_breaks_says_so_in_each_protocol(url: str, upstream: StubChannel) -> None:
    upstream.default = events(chunk({"content": "al"}), b'{"error": {"message": "overloaded", "code": 503}}')
    with pytest.raises(openai.APIError, match="overloaded"):
        await streamed(url)
    async with anthropic.AsyncAnthropic(base_url=url, api_key=GUEST) as claude:
        heard = await claude.messages.create(model="reward_model", messages=ASKED, max_tokens=9, stream=True)
        with pytest.raises(anthropic.APIStatusError, match="overloaded"):
            [event async for event in heard]
    async with openai_sdk(url) as client:
        answer = await client.responses.create(model="reward_model", input="x", stream=True)
        last = [event async for event in answer][-1]
        assert (last.type, "overloaded" in last.response.error.message) == ("response.failed", True)
    assert len(upstream.calls) == 3


async def test_T106_a_refusal_without_a_content_type_keeps_status_and_text(url: str, upstream: StubChannel) -> None:
    upstream.default = Reply(403, b"origin not allowed", headers=())
    with pytest.raises(openai.PermissionDeniedError, match="origin not allowed"):
        await ask(url)
    with pytest.raises(openai.PermissionDeniedError, match="origin not allowed"):
        await ask(url, stream=True)


async def test_T108_no_key_is_in_answers_log_or_metrics(
    upstream: StubChannel, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    upstream.script(chat("8"), error(401, f"Incorrect API key {UPSTREAM_KEY}"), text_stream("a"))
    with open_log(tmp_path / "gateway.log", run_id="t", terminal=False, level="debug"):
        async with channel_door(upstream.url) as door, gateway_alone(door) as url:
            await ask(url)
            with pytest.raises(openai.AuthenticationError, match="Invalid API key") as failed:
                await ask(url, "judge_model")
            await streamed(url)
            with pytest.raises(openai.APIStatusError):
                await ask(url, key="sk-sess-WRONG123")
            async with http.get(f"{url}/metrics") as answer:
                metrics = await answer.text()
    log = (tmp_path / "gateway.log").read_text()
    assert UPSTREAM_KEY not in f"{log}{failed.value}{metrics}"
    assert "WRONG123" not in log
    lines = [line for text in log.splitlines() if (line := parse_line(text)) and line.part == "taotoken"]
    shown = [[line.facts[name] for name in ("model", "model_id", "status", "attempts")] for line in lines]
    assert shown == [
        ["reward_model", "reward-large", 200, 1],
        ["judge_model", "judge-large", 401, 1],
        ["reward_model", "reward-large", 200, 1],
    ]
    assert [list(line.facts)[:6] for line in lines] == [
        ["model", "model_id", "status", "elapsed_ms", "attempts", "ts"]
    ] * 3
    assert all(float(str(line.facts["elapsed_ms"])) >= 0 and line.facts["request_id"] for line in lines)
    for counted in (
        'areal_gateway_upstream_calls_total{model="reward_model",status="200"} 2.0',
        'areal_gateway_upstream_calls_total{model="judge_model",status="401"} 1.0',
        'areal_gateway_upstream_attempts_total{model="reward_model"} 2.0',
        'areal_gateway_upstream_tokens_total{kind="prompt",model="reward_model"} 20.0',
    ):
        assert counted in metrics


@pytest.mark.parametrize("name", ["Reward-Model", "judge model", "reward_modle", "JUDGE_MODEL"])
async def test_a_near_miss_is_404_and_asks_nobody(url: str, upstream: StubChannel, name: str) -> None:
    with pytest.raises(openai.NotFoundError, match="is served by the gateway if model_routing"):
        await ask(url, name)
    with pytest.raises(openai.NotFoundError, match="the channel serves reward_model, judge_model"):
        await ask(url, "default")
    async with openai_sdk(url) as client:
        with pytest.raises(openai.NotFoundError, match="counts no tokens"):
            await client.responses.input_tokens.count(model="reward_model", input="x")
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve(name)
        assert [model.id async for model in client.models.list()] == [
            "reward_model",
            "reward-large",
            "judge_model",
            "judge-large",
        ]
        assert (await client.models.retrieve("judge-large")).id == "judge-large"
    assert upstream.calls == []


async def test_bodies_that_are_no_call_are_400_before_anything_is_asked(
    url: str, upstream: StubChannel, http: aiohttp.ClientSession
) -> None:
    odd_options = b'{"model": "reward_model", "stream": true, "stream_options": [1]}'
    for body in (b"{", b"[]", b'{"model": 5}', b"[" * 5000, odd_options):
        async with http.post(f"{url}/v1/chat/completions", data=body, headers={"x-api-key": GUEST}) as answer:
            assert answer.status == 400
    body = b'{"model": "reward_model", "max_tokens": 9, "messages": "x"}'
    async with http.post(f"{url}/v1/messages", data=body, headers={"x-api-key": GUEST}) as answer:
        assert (answer.status, (await answer.json())["type"]) == (400, "error")
    async with openai_sdk(url) as client:
        with pytest.raises(openai.BadRequestError, match="send the whole conversation"):
            await client.responses.create(model="reward_model", input="x", previous_response_id="resp_1")
    assert upstream.calls == []


async def test_with_a_run_the_internal_and_the_channel_token_open_it_and_no_other_key(
    run: Any, upstream: StubChannel
) -> None:
    await run.add_worker("w0")
    run.facts = msgspec.structs.replace(run.facts, internal_token="tok-internal-4711", channel_token=CHANNEL_TOKEN)
    async with channel_door(upstream.url) as door, run.gateway(door=door) as url:
        for key in ("tok-internal-4711", CHANNEL_TOKEN):
            assert (await ask(url, key=key)).choices[0].message.content == "ok"
        assert len(upstream.calls) == 2
        for key in (GUEST, "test-admin-key-4711", "sk-channel-of-an-earlier-life"):
            with pytest.raises(openai.AuthenticationError):
                await ask(url, key=key)
        with pytest.raises(openai.NotFoundError, match="the channel serves"):
            await ask(url, "default", key=CHANNEL_TOKEN)
        assert len(upstream.calls) == 2
        worker = run.workers["w0"]
        assert worker.calls == []
        for key, name in (
            (run.key(), "reward_model"),
            ("tok-internal-4711", "policy"),
            ("tok-internal-4711", "anything"),
        ):
            await _post(url, key, name)
        await _post(
            url, run.key(), "reward_model", beside=CHANNEL_TOKEN
        )  # a session key goes first where both are sent
        assert [call.path for call in worker.calls] == ["/v1/chat/completions"] * 4
        assert len(upstream.calls) == 2


async def _post(url: str, key: str, name: str, beside: str = "") -> None:
    async with aiohttp.ClientSession() as session:
        body, headers = {"model": name, "messages": ASKED}, {"authorization": f"Bearer {key}", "x-api-key": beside}
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
            assert answer.status == 200


async def test_an_upstream_policy_answers_for_every_name_without_any_worker(upstream: StubChannel) -> None:
    async with (
        channel_door(upstream.url, policy_model={"model_id": "large-one", "upstream": True}) as door,
        gateway_alone(door) as url,
    ):
        for name in ("default", "policy_model", "large-one", "any-name"):
            await ask(url, name)
        await ask(url, "judge_model")
        with pytest.raises(openai.NotFoundError):
            await ask(url, "reward-model")
        async with anthropic.AsyncAnthropic(base_url=url, api_key=GUEST) as claude:
            message = await claude.messages.create(model="claude-x", messages=ASKED, max_tokens=9)
    assert (message.content[0].text, message.model) == ("ok", "claude-x")
    assert [call.json["model"] for call in upstream.calls] == ["large-one"] * 4 + ["judge-large", "large-one"]


async def test_a_slow_or_dead_judge_is_refused_at_once_with_the_time_to_come_back(
    upstream: StubChannel, http: aiohttp.ClientSession
) -> None:
    upstream.default = error(500, "dead")
    async with channel_door(upstream.url, breaker_failures=2, max_retries=0) as door, gateway_alone(door) as url:
        for _ in range(2):
            with pytest.raises(openai.InternalServerError):
                await ask(url, "judge_model")
        body = {"model": "judge_model", "messages": ASKED}
        async with http.post(f"{url}/v1/chat/completions", json=body, headers={"x-api-key": GUEST}) as answer:
            said = await answer.json()
            assert (answer.status, answer.headers["retry-after"], said["error"]["code"]) == (
                503,
                "30",
                "upstream_limit",
            )
        upstream.default = chat("alive")
        assert (await ask(url, "reward_model")).choices[0].message.content == "alive"  # a route of its own
    assert len(upstream.calls) == 3


async def test_a_budget_counts_streams_too_though_their_reader_asked_for_no_usage(upstream: StubChannel) -> None:
    upstream.default = text_stream("a", "b")
    route = {"model_id": "judge-large", "budget_tokens": 20}
    async with channel_door(upstream.url, judge_model=route) as door, gateway_alone(door) as url:
        for _ in range(2):
            text, chunks = await streamed(url, model="judge_model")
            assert (text, all(each.choices for each in chunks)) == ("ab", True)
        with pytest.raises(openai.RateLimitError, match="30 tokens of its 20"):
            await ask(url, "judge_model")
    assert [call.json["stream_options"] for call in upstream.calls] == [{"include_usage": True}] * 2


async def test_a_stream_that_outlives_the_gateway_is_told_so(upstream: StubChannel) -> None:
    upstream.default = events(chunk({"content": "al"}), cut=lambda stream: [stream, 600.0])
    async with channel_door(upstream.url) as door, AsyncExitStack() as gateway:
        url = await gateway.enter_async_context(gateway_alone(door))
        async with openai_sdk(url, max_retries=0) as client:
            answer = await client.chat.completions.create(model="reward_model", messages=ASKED, stream=True)
            assert (await anext(aiter(answer))).choices[0].delta.content == "al"
            stopping = asyncio.create_task(gateway.pop_all().aclose())
            with pytest.raises(openai.APIError, match="the gateway is stopping"):
                [each async for each in answer]
        await stopping


@pytest.mark.parametrize(
    ("served", "said"),
    [
        ({}, "serves no such model"),
        ({"reward_model": "another"}, "serves another as it"),
        ({"reward_model": "reward-large", "policy_model": "x"}, "answers for the policy by the channel"),
    ],
)
async def test_a_run_that_needs_another_channel_is_told_to_start_the_gateway_with_its_file(
    run: Any, served: dict[str, str], said: str
) -> None:
    facts = msgspec.structs.replace(run.facts, channel_models={"reward_model": "reward-large"})
    async with Attachment(port=1, loopback=True, channel_models=served) as attachment:
        with pytest.raises(ConfigError, match=said):
            await attachment.attach(facts)
        assert attachment.run_if_any() is None
    async with Attachment(port=1, loopback=True, channel_models={"reward_model": "reward-large"}) as attachment:
        await attachment.attach(facts)
        assert attachment.run_if_any() is not None
