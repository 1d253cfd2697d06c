"""The official OpenAI SDK, sync and async, against a worker's proxy: nothing but a base URL and a key."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

HI: list[Any] = [{"role": "user", "content": "hi"}]
SPOKEN = {"pieces": ["Hel", "lo", "<|im_end|>"], "logprobs": [-0.5, -0.25, -0.125]}
PREFIXES = ["", "/v1", "/gateway", "/gateway/v1", "/gateway/v1/v1"]


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_every_base_url_that_clients_are_given_works(make_service: Any, prefix: str) -> None:
    service = await make_service([SPOKEN])
    async with AsyncOpenAI(base_url=service.url + prefix, api_key=await service.start()) as client:
        answer = await client.chat.completions.create(model="default", messages=HI)
        assert answer.choices[0].message.content == "Hello"
        models = await client.models.list()
        assert models.data[0].id == "default"
        assert (await client.models.retrieve("default")).id == "default"


async def test_the_sync_client_streams_and_folds(make_service: Any) -> None:
    service = await make_service([SPOKEN])
    key = await service.start()

    def talk() -> tuple[str, list[Any]]:
        with OpenAI(base_url=f"{service.url}/v1", api_key=key) as client:
            stream = client.chat.completions.create(
                model="default", messages=HI, stream=True, stream_options={"include_usage": True}, logprobs=True
            )
            chunks = list(stream)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), chunks

    text, chunks = await asyncio.to_thread(talk)
    assert text == "Hello"
    logprobs = [
        entry.logprob for chunk in chunks if chunk.choices and chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]  # fmt: skip
    (one,) = await service.recorded(key)
    assert logprobs == one.completion.logprobs.tolist() == [-0.5, -0.25, -0.125]
    assert chunks[-1].usage.total_tokens == len(one.prompt_ids) + 3
    assert {chunk.id for chunk in chunks} == {one.id}


async def test_the_stream_helper_folds_to_the_same_answer(make_service: Any) -> None:
    service = await make_service([SPOKEN])
    async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key=await service.start()) as client:
        async with client.chat.completions.stream(model="default", messages=HI) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
    assert (final.choices[0].message.content, final.choices[0].finish_reason) == ("Hello", "stop")


async def test_T008_logprobs_without_top_logprobs(make_service: Any) -> None:
    service = await make_service([SPOKEN])
    async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key=await service.start()) as client:
        answer = await client.chat.completions.create(model="m", messages=HI, logprobs=True, top_logprobs=None)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert [(entry.token, entry.logprob, entry.top_logprobs) for entry in content[:2]] == [
        ("Hel", -0.5, []),
        ("lo", -0.25, []),
    ]


async def test_errors_arrive_as_the_sdks_own_types_and_are_not_retried(make_service: Any) -> None:
    service = await make_service([SPOKEN])
    key = await service.start()
    async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key="sk-sess-w0.wrong.mac") as stranger:
        with pytest.raises(openai.AuthenticationError, match="Invalid API key"):
            await stranger.chat.completions.create(model="m", messages=HI)
    async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key=key) as client:
        with pytest.raises(openai.BadRequestError, match="own distribution") as caught:
            await client.chat.completions.create(model="m", messages=HI, presence_penalty=1)
        assert caught.value.param == "presence_penalty"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="reward-model", messages=HI)
    assert service.calls()["calls"] == []


async def test_T019_a_failure_in_mid_stream_is_an_api_error(make_service: Any) -> None:
    service = await make_service([{"pieces": ["a", "b"], "fail": {"at": 1, "message": "out of memory"}}])
    async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key=await service.start()) as client:
        stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="out of memory"):
            async for _ in stream:
                pass


async def test_T040_the_sdks_own_retry_after_its_time_out_leaves_one_trained_answer(
    make_service: Any, eventually: Any
) -> None:
    slow = {"pieces": ["x"] * 500, "delay_ms": 50}
    service = await make_service([slow, SPOKEN])
    key = await service.start()
    async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key=key, timeout=1.5, max_retries=1) as client:
        answer = await client.chat.completions.create(model="m", messages=HI)
    assert answer.choices[0].message.content == "Hello"
    await eventually(lambda: service.calls()["running"] == 0)
    done = await service.recorded(key)
    assert [one.tags for one in done] == [("aborted",), ()]
    assert done[1].id == answer.id


async def test_T018_closing_a_stream_aborts_it(make_service: Any, eventually: Any) -> None:
    service = await make_service([{"pieces": ["x"] * 500, "delay_ms": 20}])
    key = await service.start()
    async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key=key) as client:
        stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
    await eventually(lambda: service.calls()["aborted"] == 1)


async def test_many_sessions_at_once_each_with_two_turns(make_service: Any) -> None:
    service = await make_service([{"pieces": ["one", "<|im_end|>"]}, {"pieces": ["two", "<|im_end|>"]}])

    async def episode(number: int) -> str:
        key: str = await service.start(f"task-{number}")
        async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key=key) as client:
            first = await client.chat.completions.create(
                model="default", messages=[{"role": "user", "content": str(number)}]
            )
            history: list[Any] = [
                {"role": "user", "content": str(number)},
                {"role": "assistant", "content": first.choices[0].message.content},
                {"role": "user", "content": "again"},
            ]
            stream = await client.chat.completions.create(model="default", messages=history, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert (first.choices[0].message.content, text) == ("one", "two")
        assert (await service.reward(key, float(number)))[0] == 200
        assert (await service.end(key))["interaction_count"] == 2
        return f"task-{number}"

    for task in await asyncio.gather(*(episode(number) for number in range(30))):
        _, body, _ = await service.post("/rl/export_trajectories", {"session_id": task, "style": "concat"})
        (row,) = body["trajectories"]
        assert sum(row["loss_mask"]) == 4 == body["tokens"]["trained"]
        assert [span["reward"] for span in row["spans"]] == [float(task.removeprefix("task-"))] * 2
        assert body["interactions"][0]["messages"][0]["content"] == task.removeprefix("task-")
