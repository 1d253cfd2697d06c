"""The official OpenAI SDK's Responses, sync and async, against a worker's proxy: nothing but a base URL and a key."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

SPOKEN = {"pieces": ["Hel", "lo", "<|im_end|>"], "logprobs": [-0.5, -0.25, -0.125]}


def client_of(service: Any, key: str, **more: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{service.url}/v1", api_key=key, **more)


@pytest.mark.parametrize("prefix", ["", "/v1", "/gateway", "/gateway/v1"])
async def test_every_base_url_that_clients_are_given_works(make_service: Any, prefix: str) -> None:
    service = await make_service([SPOKEN])
    async with AsyncOpenAI(base_url=service.url + prefix, api_key=await service.start()) as client:
        answer = await client.responses.create(model="default", input="hi")
        assert (answer.output_text, answer.status, answer._request_id is not None) == ("Hello", "completed", True)


async def test_the_sync_client_answers_streams_and_counts(make_service: Any) -> None:
    service = await make_service([SPOKEN])
    key = await service.start()

    def talk() -> tuple[Any, Any, list[Any], int]:
        with OpenAI(base_url=f"{service.url}/v1", api_key=key) as client:
            counted = client.responses.input_tokens.count(model="default", input="hi", instructions="Be terse.")
            whole = client.responses.create(model="default", input="hi", instructions="Be terse.")
            with client.responses.stream(model="default", input="hi", instructions="Be terse.") as stream:
                events = list(stream)
                final = stream.get_final_response()
        return whole, final, events, counted.input_tokens

    whole, final, events, counted = await asyncio.to_thread(talk)
    assert [event.delta for event in events if event.type == "response.output_text.delta"] == ["Hel", "lo"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.output_text == whole.output_text == "Hello"
    one, two = await service.recorded(key)
    assert [one.id, two.id] == [whole.id, final.id]
    assert counted == whole.usage.input_tokens == final.usage.input_tokens == len(one.prompt_ids)
    assert final.usage.total_tokens == len(one.prompt_ids) + 3


async def test_a_chain_and_an_echo_of_all_items_continue_the_same_tokens(make_service: Any) -> None:
    service = await make_service([SPOKEN])
    key = await service.start()
    async with client_of(service, key) as client:
        first = await client.responses.create(model="default", input="hi", instructions="Be terse.")
        await client.responses.create(
            model="default", input="more", instructions="Be terse.", previous_response_id=first.id
        )
        items: list[Any] = [
            {"role": "user", "content": "hi"},
            *(item.model_dump() for item in first.output),
            {"role": "user", "content": "more"},
        ]
        await client.responses.create(model="default", input=items, instructions="Be terse.")
    one, two, three = await service.recorded(key)
    assert two.token_parent == three.token_parent == one.id == first.id
    assert two.prompt_ids.tolist() == three.prompt_ids.tolist()


async def test_logprobs_are_the_recorded_ones(make_service: Any) -> None:
    service = await make_service([SPOKEN])
    async with client_of(service, await service.start()) as client:
        answer = await client.responses.create(
            model="default", input="hi", include=["message.output_text.logprobs"], top_logprobs=1
        )
    shown = answer.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert [(entry.token, entry.logprob) for entry in shown[:2]] == [("Hel", -0.5), ("lo", -0.25)]  # type: ignore[index]


async def test_what_was_cut_off_is_incomplete(make_service: Any) -> None:
    service = await make_service([SPOKEN])
    async with client_of(service, await service.start()) as client:
        whole = await client.responses.create(model="default", input="hi", max_output_tokens=1)
        stream = await client.responses.create(model="default", input="hi", max_output_tokens=1, stream=True)
        last = [event async for event in stream][-1]
    assert (whole.status, whole.output_text) == ("incomplete", "Hel")
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert last.type == "response.incomplete"


async def test_errors_arrive_as_the_sdks_own_types_and_are_not_retried(make_service: Any) -> None:
    service = await make_service([SPOKEN])
    async with client_of(service, "sk-sess-w0.wrong.mac") as stranger:
        with pytest.raises(openai.AuthenticationError, match="Invalid API key"):
            await stranger.responses.create(model="default", input="hi")
    async with client_of(service, await service.start()) as client:
        with pytest.raises(openai.NotFoundError, match="none of this session") as caught:
            await client.responses.create(model="default", input="hi", previous_response_id="resp_nope")
        assert caught.value.code == "previous_response_not_found"
        with pytest.raises(openai.BadRequestError, match="at least one item"):
            await client.responses.create(model="default", input=[])
    assert service.calls()["calls"] == []


async def test_T019_a_failure_in_mid_stream_is_response_failed(make_service: Any) -> None:
    service = await make_service([{"pieces": ["a", "b"], "fail": {"at": 1, "message": "out of memory"}}])
    async with client_of(service, await service.start()) as client:
        last: Any = [event async for event in await client.responses.create(model="m", input="hi", stream=True)][-1]
    assert last.type == "response.failed"
    assert "out of memory" in last.response.error.message


async def test_a_reward_is_set_by_the_responses_id(make_service: Any) -> None:
    service = await make_service([SPOKEN])
    key = await service.start()
    async with client_of(service, key) as client:
        first = await client.responses.create(model="default", input="hi")
        await client.responses.create(model="default", input="more", previous_response_id=first.id)
    assert (await service.reward(key, 0.5, first.id))[0] == 200
    assert (await service.reward(key, 1.0))[0] == 200
    assert [one.reward for one in await service.recorded(key)] == [0.5, 1.0]


CALL = '<tool_call>\n{"name": "sh", "arguments": {"command":  "ls -la"}}\n</tool_call>'
THINKS = {"pieces": ["<think>", "\nlook ", "first\n", "</think>", "\n\n", "Let me ", "look.\n", *CALL, "<|im_end|>"]}
PARALLEL = {"pieces": [CALL, "\n", CALL.replace("ls -la", "pwd"), "<|im_end|>"]}
SH: Any = {"type": "function", "name": "sh", "parameters": {"type": "object", "properties": {}}, "strict": False}


def outputs(answer: Any) -> list[Any]:
    calls = [item for item in answer.output if item.type == "function_call"]
    return [{"type": "function_call_output", "call_id": call.call_id, "output": "ok"} for call in calls]


async def answered(client: AsyncOpenAI, stream: bool, **more: Any) -> Any:
    sent = {"model": "default", "tools": [SH], **more}
    if not stream:
        return await client.responses.create(**sent)
    async with client.responses.stream(**sent) as events:
        async for _ in events:
            pass
        return await events.get_final_response()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chained", [False, True])
async def test_a_tool_loop_with_reasoning_continues_its_own_tokens(
    make_service: Any, stream: bool, chained: bool
) -> None:
    service = await make_service([THINKS, PARALLEL, SPOKEN])
    key = await service.start()
    history: list[Any] = [{"role": "user", "content": "hi"}]
    answers: list[Any] = []
    async with client_of(service, key) as client:
        for _ in range(3):
            sent = {"input": history}
            if chained and answers:
                sent = {"input": outputs(answers[-1]), "previous_response_id": answers[-1].id}
            answers.append(await answered(client, stream, **sent))
            history += [*(item.model_dump(exclude_none=True) for item in answers[-1].output), *outputs(answers[-1])]
    reasoning, message, call = answers[0].output
    assert reasoning.content[0].text.strip() == "look first"
    assert (message.content[0].text, call.name, call.arguments) == ("Let me look.", "sh", '{"command":  "ls -la"}')
    assert call.call_id.isalnum()
    assert [item.arguments for item in answers[1].output] == ['{"command":  "ls -la"}', '{"command":  "pwd"}']
    assert answers[2].output_text == "Hello"
    one, two, three = await service.recorded(key)
    assert (two.token_parent, three.token_parent) == (one.id, two.id)
