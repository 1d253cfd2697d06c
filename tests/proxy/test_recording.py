"""What is recorded and how: retries, branches, defaults, seeds, side requests, and backends that say too little."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import pytest

from areal.base.types import GenerateRequest, TokenChunk
from areal.proxy.conversation import Conversation
from areal.proxy.recorder import rng_seed
from tests.proxy.service import until

SHORT = {"pieces": ["ok", "<|im_end|>"]}


def user(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(texts)]


async def test_T040_a_marked_retry_supersedes_and_the_next_turn_continues_the_new_answer(make_service: Any) -> None:
    service = await make_service([{"pieces": [word, "<|im_end|>"]} for word in ("a1", "a2", "b1")])
    key = await service.start()
    await service.chat(key, "A")
    body = {"messages": user("A")}
    status, second, _ = await service.post("/v1/chat/completions", body, key, **{"x-stainless-retry-count": "1"})
    assert status == 200
    await service.chat(key, "A", "a2", "B")
    one, two, three = await service.recorded(key)
    assert (one.tags, two.tags, three.credit_parent) == (("superseded",), (), second["id"])
    assert two.branch_reason == "retried"
    assert (await service.reward(key, 1.0))[1]["interaction_id"] == three.id
    _, exported, _ = await service.post("/rl/export_trajectories", {"session_id": "task", "style": "concat"})
    assert exported["tokens"]["masked"] == {"superseded": 2}


async def test_T040_the_same_call_after_a_delivered_answer_is_a_sibling(make_service: Any) -> None:
    service = await make_service([SHORT])
    key = await service.start()
    await service.chat(key, "A")
    second = await service.chat(key, "A")
    await service.chat(key, "A", "ok", "B")
    done = await service.recorded(key)
    assert [one.tags for one in done] == [(), (), ()]
    assert done[2].credit_parent == second["id"]  # of two equal answers the newer one


async def test_T040_an_answer_that_could_not_be_delivered_is_superseded_by_the_next_same_call(
    make_service: Any, eventually: Any
) -> None:
    service = await make_service([SHORT, SHORT])
    key = await service.start()
    add, hold, adding = service.store.sessions.add, asyncio.Event(), asyncio.Event()

    async def slow_add(interaction: Any) -> None:  # the client leaves between the last token and the answer
        await add(interaction)
        adding.set()
        await hold.wait()

    service.store.sessions.add = slow_add
    async with aiohttp.ClientSession() as http:
        call = asyncio.create_task(
            http.post(f"{service.url}/v1/chat/completions", json={"messages": user("A")}, headers={"x-api-key": key})
        )
        await adding.wait()
        call.cancel()
        await asyncio.wait([call])
    await asyncio.sleep(0.1)
    service.store.sessions.add = add
    hold.set()
    async with service.http.get(f"{service.url}/rl/session", headers={"x-api-key": key}) as response:
        assert (await response.json())["interaction_count"] == 1
    while (await service.recorded(key))[0].tags != ("undelivered",):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    service.proxy.sessions._live.clear()  # it rests, or another worker takes over: what is known is in the store
    await service.chat(key, "A")
    assert [one.tags for one in await service.recorded(key)] == [("undelivered", "superseded"), ()]


async def test_T050_edited_history_is_a_new_branch_with_a_reason(make_service: Any) -> None:
    vocabulary = {"settings": {"vocabulary": {"a": 301, "b": 302, "ab": 303}}}
    service = await make_service([vocabulary, {"pieces": ["a", "b", "<|im_end|>"], "logprobs": [-0.1, -0.2, -0.3]}])
    key = await service.start()
    await service.chat(key, "x")
    await service.chat(key, "x", "ab", "y")
    await service.chat(key, "x", "edited", "y")
    one, two, three = await service.recorded(key)
    assert one.completion.token_ids.tolist()[:2] == [301, 302]
    assert two.prompt_ids[: len(one.prompt_ids) + 3].tolist() == [
        *one.prompt_ids.tolist(),
        *one.completion.token_ids.tolist(),
    ]
    assert (three.token_parent, three.credit_parent, three.branch_reason) == (None, None, "answer_changed")
    _, body, _ = await service.post("/rl/export_trajectories", {"session_id": "task", "style": "concat"})
    assert len(body["trajectories"]) == 2
    for row in body["trajectories"]:
        assert len(row["token_ids"]) == len(row["logprobs"]) == len(row["loss_mask"]) == len(row["versions"])


async def test_T053_T056_every_end_token_ends_and_stays(make_service: Any) -> None:
    settings = {"settings": {"end_tokens": ["<|im_end|>", "</s>"]}}
    lines = [{"pieces": ["A", "</s>"]}, {"pieces": ["B", "<|im_end|>"]}, {"pieces": ["C"], "finish": "length"}]
    service = await make_service([settings, *lines])
    key = await service.start()
    answers = [await service.chat(key, f"q{k}") for k in range(3)]
    assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["stop", "stop", "length"]
    assert [answer["choices"][0]["message"]["content"] for answer in answers] == ["A", "B", "C"]
    _, body, _ = await service.post("/rl/export_trajectories", {"session_id": "task"})
    assert [one["loss_mask"] for one in body["interactions"]] == [[1, 1], [1, 1], [1]]


async def test_T058_an_empty_answer_is_well_formed_and_counted(make_service: Any) -> None:
    service = await make_service([{"pieces": []}])
    key = await service.start()
    answer = await service.chat(key, "hi")
    assert (answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]) == ("", 0)
    _, body, _ = await service.post("/rl/export_trajectories", {"session_id": "task"})
    assert (body["trajectories"], body["tokens"]["empty_interactions"]) == ([], 1)


async def test_T007_limits_come_from_the_client_then_the_policy_then_the_context(make_service: Any) -> None:
    service = await make_service([{"pieces": ["x"] * 40}], defaults={"temperature": 0.7, "max_new_tokens": 20})
    key = await service.start()
    for asked, expected in ((None, 20), (5, 5), (10**9, 40)):
        answer = await service.chat(key, f"count {asked}", max_tokens=asked)
        assert answer["usage"]["completion_tokens"] == expected
        assert answer["choices"][0]["finish_reason"] == ("stop" if expected == 40 else "length")
    assert {one.completion.temperature for one in await service.recorded(key)} == {0.7}


async def test_a_prompt_that_fills_the_context_is_400_with_both_numbers(make_service: Any) -> None:
    service = await make_service([{"settings": {"max_context": 64}}, {"pieces": ["x"] * 90}])
    key = await service.start()
    status, body, _ = await service.post("/v1/chat/completions", {"messages": user("word " * 50)}, key)
    assert status == 400
    assert body["error"]["code"] == "context_length_exceeded"
    assert "prompt is too long" in body["error"]["message"]
    answer = await service.chat(key, "hi")
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 64


async def test_the_policys_sampling_holds_where_the_run_says_so(make_service: Any) -> None:
    service = await make_service([SHORT], agent={"sampling": "policy"})
    key = await service.start()
    await service.chat(key, "hi", temperature=0, top_p=0.5, seed=5, max_tokens=1)
    (one,) = await service.recorded(key)
    assert (one.completion.temperature, one.sampling.top_p, one.sampling.seed, one.tags) == (1.0, 1.0, None, ())
    assert one.sampling.max_tokens == 1


async def test_names_other_than_the_sessions_are_side_requests_and_reward_models_are_404(make_service: Any) -> None:
    service = await make_service([SHORT], parts={"policy_names": ("default", "smollm2-135m")})
    key = await service.start()
    for name in ("gpt-4o", "default", "smollm2-135m", "gpt-4o", "gpt-4o-mini"):
        await service.chat(key, f"as {name}", model=name)
    done = await service.recorded(key)
    assert [one.tags for one in done] == [(), (), (), (), ("side_request",)]
    assert (await service.reward(key, 1.0))[1]["interaction_id"] == done[3].id
    for name in ("reward_model", "reward-model", "judge_modle", "Judge_Model"):
        status, body, _ = await service.post("/v1/chat/completions", {"messages": user("x"), "model": name}, key)
        assert status == 404
        assert "_model" in body["error"]["message"]


async def test_a_session_may_not_ask_the_models_that_may_score_it(make_service: Any) -> None:
    service = await make_service([SHORT], parts={"upstream_names": frozenset({"reward_model", "large-judge"})})
    key = await service.start()
    for name, status in (("reward_model", 403), ("large-judge", 403), ("judge_model", 404), ("larger-judge", 200)):
        answered, body, _ = await service.post("/v1/chat/completions", {"messages": user("x"), "model": name}, key)
        assert answered == status
        assert status != 403 or "rollout.agent.internal_token" in body["error"]["message"]
    assert [one.model for one in await service.recorded(key)] == ["larger-judge"]


TOOLS = [{"type": "function", "function": {"name": "sh", "parameters": {"type": "object"}}}]


async def test_a_helper_that_speaks_before_the_policy_is_the_side_request(make_service: Any) -> None:
    """opencode lets a smaller model write the title first; only the agent itself has tools."""
    service = await make_service([SHORT])
    key = await service.start()
    await service.chat(key, "a title for: hi", model="small")
    await service.chat(key, "hi", model="large", tools=TOOLS)
    await service.chat(key, "hello", model="large")
    await service.chat(key, "hello again", model="small", tools=TOOLS)
    done = await service.recorded(key)
    assert [one.tags for one in done] == [("side_request",), (), (), ("side_request",)]
    assert (await service.reward(key, 1.0))[1]["interaction_id"] == done[2].id
    talk = Conversation(done)  # as another worker takes the session over
    assert talk.policy.is_side_request("small", tools=True, always={"default"})
    assert not talk.policy.is_side_request("large", tools=False, always={"default"})


async def test_a_title_of_claude_code_is_a_side_request_whenever_it_comes(make_service: Any) -> None:
    service = await make_service([SHORT])
    key = await service.start()
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    title = {"max_tokens": 9, "messages": user("a title"), "model": "policy", "output_config": form}
    agent = {"max_tokens": 9, "messages": user("hi"), "model": "policy"}
    for body in (title, agent, title):
        status, _, _ = await service.post("/v1/messages", body, key, **{"user-agent": "claude-cli/2.1.197"})
        assert status == 200
    done = await service.recorded(key)
    assert [one.tags for one in done if "side_request" in one.tags] == [done[0].tags, done[2].tags]
    assert "side_request" not in done[1].tags
    assert (await service.reward(key, 1.0))[1]["interaction_id"] == done[1].id


async def test_a_helper_whose_answer_still_comes_when_the_policy_speaks_is_one_too(make_service: Any) -> None:
    service = await make_service([{"when": "title", "pieces": ["T", "<|im_end|>"], "delay_ms": 150}, SHORT])
    key = await service.start()
    title = asyncio.create_task(service.chat(key, "a title for: hi", model="small"))
    await until(lambda: service.calls()["calls"])
    await service.chat(key, "hi", model="large", tools=TOOLS)
    await title
    tags = {one.model: one.tags for one in await service.recorded(key)}
    assert tags == {"small": ("side_request",), "large": ()}


async def test_a_configured_name_stays_the_policy_without_tools(make_service: Any) -> None:
    service = await make_service([SHORT])
    key = await service.start()
    await service.chat(key, "hi")
    await service.chat(key, "hi there", model="other", tools=TOOLS)
    assert [one.tags for one in await service.recorded(key)] == [(), ("side_request",)]
    talk = Conversation(await service.recorded(key))
    assert talk.policy.is_side_request("other", tools=True, always={"default"})


async def test_the_first_name_stays_the_policy_after_a_configured_one_with_tools(make_service: Any) -> None:
    service = await make_service([SHORT])
    key = await service.start()
    await service.chat(key, "hi", model="large")
    await service.chat(key, "hello", tools=TOOLS)
    await service.chat(key, "hello again", model="large")
    done = await service.recorded(key)
    assert [one.tags for one in done] == [(), (), ()]
    assert not Conversation(done).policy.is_side_request("large", tools=False, always={"default"})


async def test_T005_a_template_that_refuses_is_400_and_the_session_lives_on(make_service: Any) -> None:
    service = await make_service([SHORT])
    key = await service.start()
    many = [{"role": "system", "content": "A"}, {"role": "system", "content": "B"}, *user("x"), *user("y")]
    status, _, _ = await service.post("/v1/chat/completions", {"messages": many}, key)
    assert status == 200
    (one,) = await service.recorded(key)
    assert [message.content for message in one.messages] == ["A", "B", "x", "y"]


class FixedBackend:
    """An engine that says what a test wants it to say."""

    def __init__(self, *chunks: TokenChunk) -> None:
        self.chunks = chunks
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        self.requests.append(request)
        for chunk in self.chunks:
            yield chunk


def chunk(ids: list[int], logprobs: list[float], finish: Any = "stop", **more: Any) -> TokenChunk:
    count = len(ids)
    return TokenChunk(
        token_ids=tuple(ids),
        logprobs=tuple(logprobs),
        versions=(3,) * count,
        kept_mass=(1.0,) * count,
        finish_reason=finish,
        **more,
    )


@pytest.mark.parametrize(
    "logprobs", [[], [-0.1, -0.2], [-0.1, float("nan"), -0.2], [-0.1, float("-inf"), -0.3], [-0.1, -1e300, -0.2]]
)
async def test_T054_missing_or_broken_logprobs_make_the_interaction_untrainable_and_the_client_is_answered(
    make_service: Any, caplog: pytest.LogCaptureFixture, logprobs: list[float]
) -> None:
    service = await make_service(parts={"backend": FixedBackend(chunk([72, 105, 33], logprobs))})
    key = await service.start()
    answer = await service.chat(key, "hi", logprobs=True)
    assert answer["choices"][0]["message"]["content"]
    assert len(answer["choices"][0]["logprobs"]["content"]) == 3
    (one,) = await service.recorded(key)
    assert one.tags == ("untrainable",)
    assert len(one.completion.token_ids) == len(one.completion.logprobs) == 3
    assert "not trainable" in caplog.text
    _, body, _ = await service.post("/rl/export_trajectories", {"session_id": "task"})
    assert (body["trajectories"], body["tokens"]["masked"]) == ([], {"untrainable": 3})


async def test_T009_excluded_candidates_have_the_floor(make_service: Any) -> None:
    line = {"pieces": ["a"], "logprobs": [0.0], "top": [[["a", 0.0], ["b", None]]]}
    service = await make_service([line])
    key = await service.start()
    answer = await service.chat(key, "hi", logprobs=True, top_logprobs=2)
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    assert [one["logprob"] for one in entry["top_logprobs"]] == [0.0, -9999.0]
    (one,) = await service.recorded(key)
    assert one.tags == ()


async def test_tokens_that_came_in_one_chunk_behind_a_stop_text_are_not_recorded(make_service: Any) -> None:
    backend = FixedBackend(chunk(list(b"ab.STOPxyz"), [-1.0] * 10, None))
    service = await make_service(parts={"backend": backend})
    key = await service.start()
    answer = await service.chat(key, "hi", stop="STOP", logprobs=True)
    assert answer["choices"][0]["message"]["content"] == "ab."
    assert answer["choices"][0]["finish_reason"] == "stop"
    (one,) = await service.recorded(key)
    assert bytes(one.completion.token_ids.tolist()) == b"ab.STOP"
    assert len(answer["choices"][0]["logprobs"]["content"]) == 7


async def test_seeds_depend_on_place_and_not_on_luck(make_service: Any) -> None:
    backend = FixedBackend(chunk([72], [-1.0]))
    service = await make_service(parts={"backend": backend, "seed": 7})
    key = await service.start("t")
    await service.chat(key, "hi")
    await service.chat(key, "hi again", n=2)
    await service.chat(key, "seeded", seed=5)
    await service.chat(key, "seeded too", seed=5)
    seeds = [request.rng_seed for request in backend.requests]
    assert seeds[:3] == [rng_seed(7, "t", 0, 0, 0), rng_seed(7, "t", 0, 1, 0), rng_seed(7, "t", 0, 1, 1)]
    assert seeds[3] == seeds[4]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**64 for seed in seeds)


async def test_a_backend_that_stops_a_request_by_itself_is_a_failure_and_not_an_answer(make_service: Any) -> None:
    service = await make_service(parts={"backend": FixedBackend(chunk([72], [-1.0], "abort"))})
    key = await service.start()
    status, body, _ = await service.post("/v1/chat/completions", {"messages": user("x")}, key)
    assert (status, body["error"]["code"]) == (502, "backend_error")
    assert [one.tags for one in await service.recorded(key)] == [("aborted",)]


async def test_T012_bad_requests_are_json_400_and_record_nothing(make_service: Any) -> None:
    service = await make_service([SHORT])
    key = await service.start()
    bodies = [
        '{"messages": []}',
        "not json",
        "",
        "[1]",
        '{"messages":[{"role":"user","content":"x"}],"temperature":"hot"}',
    ]
    for body in (*bodies, '{"messages":[{"role":"user","content":"x"}],"temperature":NaN}'):
        status, answer, headers = await service.post("/v1/chat/completions", body, key)
        assert (status, headers["content-type"]) == (400, "application/json")
        assert answer["error"]["type"] == "invalid_request_error"
        assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert await service.recorded(key) == ()
    status, answer, _ = await service.post("/v1/nonsense", {}, key)
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
