"""The official Anthropic SDK, sync and async, against a worker's proxy: nothing but a base URL and a key."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic

HI: list[Any] = [{"role": "user", "content": "hi"}]
SPOKEN = {"pieces": ["Hel", "lo", "<|im_end|>"], "logprobs": [-0.5, -0.25, -0.125]}
SH: Any = {
    "name": "sh",
    "description": "Run a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}


def ask(**more: Any) -> Any:
    return {"model": "default", "max_tokens": 100, "messages": HI, **more}


@pytest.mark.parametrize("prefix", ["", "/v1", "/gateway", "/gateway/v1"])
async def test_every_base_url_that_clients_are_given_works(make_service: Any, prefix: str) -> None:
    service = await make_service([SPOKEN])
    async with AsyncAnthropic(base_url=service.url + prefix, api_key=await service.start()) as client:
        answer = await client.messages.create(**ask())
        assert answer.content[0].text == "Hello"
        assert answer._request_id
        models = await client.models.list()
        assert models.data[0].id == "default"


async def test_an_auth_token_is_as_good_as_an_api_key_and_both_may_come(make_service: Any) -> None:
    service = await make_service([SPOKEN])
    key = await service.start()
    async with AsyncAnthropic(base_url=service.url, auth_token=key) as client:
        await client.messages.create(**ask())
    headers = {"x-api-key": key}  # as Claude Code sends it where both are set
    async with AsyncAnthropic(base_url=service.url, auth_token=key, default_headers=headers) as client:
        await client.messages.create(**ask())
    assert len(await service.recorded(key)) == 2


async def test_the_sync_client_answers_streams_and_counts(make_service: Any) -> None:
    service = await make_service([SPOKEN])
    key = await service.start()

    def talk() -> tuple[Any, Any, list[str], int]:
        with Anthropic(base_url=service.url, api_key=key) as client:
            counted = client.messages.count_tokens(model="default", messages=HI, system="Be terse.", tools=[SH])
            more = {"system": "Be terse.", "tools": [SH]}
            whole = client.messages.create(**ask(**more))
            with client.messages.stream(**ask(**more)) as stream:
                texts = list(stream.text_stream)
                final = stream.get_final_message()
        return whole, final, texts, counted.input_tokens

    whole, final, texts, counted = await asyncio.to_thread(talk)
    assert texts == ["Hel", "lo"]
    assert [block.text for block in final.content] == [block.text for block in whole.content]
    assert (final.stop_reason, whole.stop_reason) == ("end_turn", "end_turn")
    one, two = await service.recorded(key)
    assert counted == whole.usage.input_tokens == final.usage.input_tokens == len(one.prompt_ids)
    assert whole.usage.output_tokens == final.usage.output_tokens == 3
    assert [one.id, two.id] == [whole.id, final.id]


async def test_raw_events_and_the_helper_fold_alike(make_service: Any) -> None:
    service = await make_service([SPOKEN])
    async with AsyncAnthropic(base_url=service.url, api_key=await service.start()) as client:
        raw = [event.type async for event in await client.messages.create(**ask(), stream=True)]
        async with client.messages.stream(**ask()) as stream:
            final = await stream.get_final_message()
    assert raw == [
        "message_start", "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert final.content[0].text == "Hello"


async def test_pings_before_the_first_token_disturb_nothing(make_service: Any) -> None:
    late = {"pieces": ["late", "<|im_end|>"], "delay_ms": 250}
    service = await make_service([late], parts={"hold_s": 0.05, "ping_s": 0.05})
    async with AsyncAnthropic(base_url=service.url, api_key=await service.start()) as client:
        async with client.messages.stream(**ask()) as stream:
            assert (await stream.get_final_message()).content[0].text == "late"


async def test_the_answer_sent_back_continues_its_own_tokens(make_service: Any) -> None:
    service = await make_service([SPOKEN])
    key = await service.start()
    history: list[Any] = list(HI)
    async with AsyncAnthropic(base_url=service.url, api_key=key) as client:
        for _ in range(3):
            answer = await client.messages.create(**ask(messages=history, system="Be terse."))
            history += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "more"}]
    one, two, three = await service.recorded(key)
    assert (two.token_parent, three.token_parent) == (one.id, two.id)


async def test_errors_arrive_as_the_sdks_own_types_and_are_not_retried(make_service: Any) -> None:
    service = await make_service([SPOKEN])
    key = await service.start()
    async with AsyncAnthropic(base_url=service.url, api_key="sk-sess-w0.wrong.mac") as stranger:
        with pytest.raises(anthropic.AuthenticationError, match="Invalid API key") as caught:
            await stranger.messages.create(**ask())
        assert caught.value.type == "authentication_error"
        assert caught.value.request_id
    async with AsyncAnthropic(base_url=service.url, api_key=key) as client:
        with pytest.raises(anthropic.BadRequestError, match="the tools of this call are"):
            await client.messages.create(**ask(tools=[SH], tool_choice={"type": "tool", "name": "rm"}))
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**ask(model="reward-model"))
    assert service.calls()["calls"] == []


async def test_T019_a_failure_in_mid_stream_is_an_api_error(make_service: Any) -> None:
    service = await make_service([{"pieces": ["a", "b"], "fail": {"at": 1, "message": "out of memory"}}])
    async with AsyncAnthropic(base_url=service.url, api_key=await service.start()) as client:
        with pytest.raises(anthropic.APIStatusError, match="out of memory"):
            async with client.messages.stream(**ask()) as stream:
                await stream.get_final_message()


CALL = '<tool_call>\n{"name": "sh", "arguments": {"command":  "ls -la"}}\n</tool_call>'
THINKS = {"pieces": ["<think>", "\nlook ", "first\n", "</think>", "\n\n", "Let me ", "look.\n", *CALL, "<|im_end|>"]}
PARALLEL = {"pieces": [CALL, "\n", CALL.replace("ls -la", "pwd"), "<|im_end|>"]}


def results(answer: Any, *texts: str) -> Any:
    uses = [block for block in answer.content if block.type == "tool_use"]
    blocks = [
        {"type": "tool_result", "tool_use_id": use.id, "content": text} for use, text in zip(uses, texts, strict=True)
    ]
    return {"role": "user", "content": blocks[::-1]}  # in the order in which they finished


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_loop_with_thinking_continues_its_own_tokens(make_service: Any, stream: bool) -> None:
    service = await make_service([THINKS, PARALLEL, SPOKEN])
    key = await service.start()
    history: list[Any] = list(HI)
    answers: list[Any] = []
    async with AsyncAnthropic(base_url=service.url, api_key=key) as client:
        for texts in (("a.txt",), ("a.txt", "/tmp"), ()):
            if stream:
                async with client.messages.stream(**ask(messages=history, tools=[SH])) as events:
                    answer = await events.get_final_message()
            else:
                answer = await client.messages.create(**ask(messages=history, tools=[SH]))
            answers.append(answer)
            history += [{"role": "assistant", "content": answer.content}, results(answer, *texts)]
    thinking, text, use = answers[0].content
    assert thinking.thinking.strip() == "look first"
    assert thinking.signature == answers[0].id
    assert (text.text, use.name, use.input) == ("Let me look.", "sh", {"command": "ls -la"})
    assert use.id.isalnum()
    assert [block.input["command"] for block in answers[1].content] == ["ls -la", "pwd"]
    assert [answer.stop_reason for answer in answers] == ["tool_use", "tool_use", "end_turn"]
    one, two, three = await service.recorded(key)
    assert (two.token_parent, three.token_parent) == (one.id, two.id)


async def test_T031_streamed_arguments_are_the_sampled_text(make_service: Any) -> None:
    service = await make_service([PARALLEL])
    async with AsyncAnthropic(base_url=service.url, api_key=await service.start()) as client:
        events = [event async for event in await client.messages.create(**ask(tools=[SH]), stream=True)]
    starts = [event.content_block for event in events if event.type == "content_block_start"]
    assert [block.input for block in starts] == [{}, {}]
    deltas = ["", ""]
    for event in events:
        if event.type == "content_block_delta":
            deltas[event.index] += event.delta.partial_json
    assert deltas == ['{"command":  "ls -la"}', '{"command":  "pwd"}']


async def test_a_call_that_was_cut_off_says_max_tokens_and_breaks_nothing(make_service: Any) -> None:
    service = await make_service([{"pieces": [*CALL]}])
    key = await service.start()
    async with AsyncAnthropic(base_url=service.url, api_key=key) as client:
        whole = await client.messages.create(**ask(tools=[SH], max_tokens=len(CALL) - 20))
        history = [*HI, {"role": "assistant", "content": whole.content}]
        if whole.content and whole.content[-1].type == "tool_use":
            history.append(results(whole, "cut off"))
        await client.messages.create(**ask(messages=[*history, *HI], tools=[SH]))
    assert whole.stop_reason == "max_tokens"
    one, two = await service.recorded(key)
    assert two.credit_parent == one.id


async def test_the_tool_runner_runs(make_service: Any) -> None:
    service = await make_service([PARALLEL, SPOKEN])
    key = await service.start()
    ran: list[str] = []

    @anthropic.beta_async_tool
    async def sh(command: str) -> str:
        """Run a command.

        Args:
            command: what to run
        """
        ran.append(command)
        return "ok"

    async with AsyncAnthropic(base_url=service.url, api_key=key) as client:
        runner = client.beta.messages.tool_runner(model="default", max_tokens=100, messages=HI, tools=[sh])
        final = await runner.until_done()
    assert ran == ["ls -la", "pwd"]
    assert final.content[0].text == "Hello"  # type: ignore[union-attr]
    one, two = await service.recorded(key)
    assert two.token_parent == one.id


async def test_a_thread_that_a_refresh_left_behind_is_sent_whole_again(make_service: Any) -> None:
    service = await make_service([PARALLEL, SPOKEN])
    key = await service.start()
    commands: list[str] = []

    @anthropic.beta_async_tool
    async def sh(command: str) -> str:
        """Run a command.

        Args:
            command: what to run
        """
        commands.append(command)
        if len(commands) == 2:
            await service.start("next", api_key=key)
        return "ok"

    async with AsyncAnthropic(base_url=service.url, api_key=key) as client:
        runner = client.beta.messages.tool_runner(model="default", max_tokens=100, messages=HI, tools=[sh])
        await runner.until_done()
    assert len(commands) == 4  # the new session's script begins again
    one, two = await service.recorded(key)
    assert [message.role for message in one.messages] == ["user", "assistant", "tool", "tool"]
    assert (len(one.tools), two.token_parent) == (1, one.id)
