"""Agents that know a base URL and the internal token: SDKs -> gateway -> proxies -> scripted server, over sockets."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import anthropic
import msgspec
import openai
import pytest

from areal.base.errors import ConfigError
from areal.base.types import Limits, Session, WorkerInfo
from areal.chat import scripted_renderer
from areal.config import supported
from areal.config.rollout import AgentConfig, GenerationConfig
from areal.gateway.attachment import Attachment
from areal.gateway.implicit import first_user_text, hint_in
from areal.inference.app import WireApp
from areal.inference.client import HttpBackend
from areal.inference.router import Router
from areal.inference.scripted.engine import ScriptedEngine
from areal.inference.scripted.script import read_script
from areal.proxy.app import ProxyParts, build_proxy
from areal.web.address import bind
from areal.web.auth import DEFAULT_INTERNAL_TOKEN, SessionKeys
from areal.web.serve import serve
from areal.web.topic import TOPIC_HEADER, Topic
from tests.proxy.service import until as eventually

TOKEN = "tok-of-one-agent-0815"
SCRIPT = [
    {"when": "slowly", "pieces": [f"w{n} " for n in range(20)] + ["<|im_end|>"], "delay_ms": 20},
    {"pieces": ["First", ".", "<|im_end|>"]},
    {"pieces": ["Second", ".", "<|im_end|>"]},
    {"pieces": ["Third", ".", "<|im_end|>"]},
]


@asynccontextmanager
async def serving(app) -> AsyncIterator[str]:
    stop, url = asyncio.Event(), asyncio.get_running_loop().create_future()
    listener = bind("127.0.0.1", 0)
    task = asyncio.create_task(serve(app, listener, ready=url.set_result, stop=stop, grace_s=1.0))
    try:
        yield await url
    finally:
        stop.set()
        await task


class Service:
    """Workers and a scripted server; `url` is the gateway that the clients know."""

    def __init__(self, place, stack: AsyncExitStack) -> None:
        self.place, self.stack, self.url = place, stack, ""
        self.gateway = AsyncExitStack()
        self.worker_urls: dict[str, str] = {}
        self.beating: dict[str, asyncio.Task[None]] = {}

    async def start(self, agent: AgentConfig, workers: tuple[str, ...], hold_s: float) -> None:
        script = self.place.folder / "script.jsonl"
        script.write_text("".join(json.dumps(line) + "\n" for line in SCRIPT))
        engine = ScriptedEngine(read_script(script), version=1)
        server = await self.stack.enter_async_context(serving(WireApp(engine, "run-token")))
        for name in workers:
            backend = HttpBackend("scripted", server, "run-token")
            self.stack.push_async_callback(backend.close)
            parts = ProxyParts(
                store=self.place.store,
                renderer=scripted_renderer(script),
                backend=Router([backend]),
                keys=self.place.keys,
                worker=name,
                agent=agent,
                defaults=GenerationConfig(),
                max_context=2048,
                closing_bound_s=2.0,
                hold_s=hold_s,
                ping_s=hold_s,
            )
            url = await self.stack.enter_async_context(serving(build_proxy(parts).app))
            self.worker_urls[name] = url
            self.beating[name] = asyncio.create_task(self._beat(name, url))
            self.stack.callback(self.beating[name].cancel)
            await self._heartbeat(name, url)

    async def _heartbeat(self, name: str, url: str) -> None:
        await self.place.store.registry.heartbeat(WorkerInfo(name, url, os.getpid(), "host", time.time()))

    async def _beat(self, name: str, url: str) -> None:
        while True:
            await asyncio.sleep(2)
            await self._heartbeat(name, url)

    async def restart_gateway(self) -> None:
        await self.gateway.aclose()
        self.gateway = AsyncExitStack()
        self.url = await self.gateway.enter_async_context(self.place.gateway())

    async def sessions(self) -> list[Session]:
        """All of them, oldest first."""
        found = await self.place.store.reading.recent()
        return [one.session for one in reversed(found)]

    async def post(self, path: str, body: object, key: str = TOKEN, **headers: str) -> tuple[int, dict]:
        async with (
            aiohttp.ClientSession() as http,
            http.post(self.url + path, json=body, headers={"authorization": f"Bearer {key}", **headers}) as response,
        ):
            self.headers = response.headers
            return response.status, await response.json()

    async def started(self) -> str:
        admin = self.place.facts.admin_api_key
        status, body = await self.post("/rl/start_session", {"task_id": "t"}, admin)
        assert status == 200, body
        return body["api_key"]


@pytest.fixture
async def make_service(run, tmp_path):
    async with AsyncExitStack() as stack:
        services = []

        async def make(*, workers=("w0",), hold_s: float = 15.0, limits: Limits | None = None, **agent) -> Service:
            run.facts = msgspec.structs.replace(run.facts, internal_token=TOKEN)
            if limits is not None:
                await run.store.training.set_limits(limits)
            service = Service(run, stack)
            config = AgentConfig(admin_api_key=run.facts.admin_api_key, internal_token=TOKEN, **agent)
            await service.start(config, workers, hold_s)
            await service.restart_gateway()
            services.append(service)
            return service

        yield make
        for service in services:
            await service.gateway.aclose()


class Talk:
    """A conversation as an agent keeps it, by the OpenAI SDK with nothing but base URL and token."""

    def __init__(self, service: Service, first: str, **more) -> None:
        self.service, self.more = service, more
        self.messages = [{"role": "user", "content": first}]

    async def turn(self, then: str | None = None) -> str:
        if then is not None:
            self.messages.append({"role": "user", "content": then})
        async with openai.AsyncOpenAI(base_url=f"{self.service.url}/gateway/v1", api_key=TOKEN, max_retries=0) as sdk:
            answer = await sdk.chat.completions.create(model="default", messages=self.messages, **self.more)
        self.messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        return answer.id


async def recorded(service: Service) -> bool:
    return bool(sessions := await service.sessions()) and sessions[0].interaction_count == 1


async def ended(service: Service) -> bool:
    return (await service.sessions())[0].ending is not None


def hinted(hint: str) -> dict[str, dict[str, str]]:
    return {"extra_headers": {"x-session-id": hint}}


async def test_two_conversations_at_once_are_two_sessions_and_stay_so(make_service):
    service = await make_service(workers=("w0", "w1"))
    talks = [Talk(service, "2+2?"), Talk(service, "3+3?")]
    await asyncio.gather(*(talk.turn() for talk in talks))
    await service.restart_gateway()
    await asyncio.gather(*(talk.turn("sure?") for talk in talks))
    sessions = await service.sessions()
    assert [one.interaction_count for one in sessions] == [2, 2]
    assert all(one.task_id.startswith("conversation-") and one.ending is None for one in sessions)
    assert sessions[0].tags["agent"] == "AsyncOpenAI"
    assert sessions[0].tags["user_agent"].startswith("AsyncOpenAI/Python")
    for one in sessions:
        rows = await service.place.store.sessions.interactions(one.id)
        assert rows[1].token_parent == rows[0].id


async def test_the_same_task_tried_twice_at_once_is_two_sessions_of_one_task(make_service):
    service = await make_service(workers=("w0", "w1"))
    talks = [Talk(service, "do it slowly") for _ in range(3)]
    await asyncio.gather(*(talk.turn() for talk in talks))
    for talk in talks:
        await talk.turn("go on")
    sessions = await service.sessions()
    assert [one.interaction_count for one in sessions] == [2, 2, 2]
    assert len({one.task_id for one in sessions}) == 1


async def test_a_client_that_moves_its_context_stays_in_its_session(make_service):
    """As OpenClaw does: what it says about its surroundings moves to the end of the history every turn."""
    service = await make_service()
    talk, context = Talk(service, "2+2?"), {"role": "user", "content": "(internal context: Monday)"}
    talk.messages.append(context)
    await talk.turn()
    talk.messages.remove(context)
    await talk.turn("and 3+3?")
    other = Talk(service, "2+2?")  # the same task, but an answer that this service never gave
    other.messages += [{"role": "assistant", "content": "made up"}, {"role": "user", "content": "go on"}]
    await other.turn()
    assert [one.interaction_count for one in await service.sessions()] == [2, 1]


async def test_an_answer_that_was_not_delivered_is_asked_for_again_in_its_own_session(make_service):
    service = await make_service()
    body = {"messages": [{"role": "user", "content": "do it slowly"}], "stream": True}
    async with (
        aiohttp.ClientSession() as http,
        http.post(
            f"{service.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {TOKEN}"}
        ) as response,
    ):
        assert b"data:" in await response.content.readline()
    await eventually(lambda: recorded(service))
    await Talk(service, "do it slowly").turn()
    [session] = await service.sessions()
    assert session.interaction_count == 2


async def test_a_session_whose_first_call_failed_is_the_next_ones(make_service):
    service = await make_service()
    talk = Talk(service, "2+2?")
    with pytest.raises(openai.BadRequestError):
        await Talk(service, "2+2?").turn("too much for the context " * 500)
    assert [one.interaction_count for one in await service.sessions()] == [0]
    await talk.turn()
    await talk.turn("and?")
    assert [one.interaction_count for one in await service.sessions()] == [2]


async def test_a_session_goes_on_with_another_worker_while_its_own_is_gone(make_service):
    service = await make_service(workers=("w0", "w1"))
    talks = [Talk(service, f"{n}+{n}?", **hinted(f"h{n}")) for n in range(4)] + [
        Talk(service, f"task {n}") for n in range(4)
    ]
    await asyncio.gather(*(talk.turn() for talk in talks))
    assert {one.worker for one in await service.sessions()} == {"w0", "w1"}
    service.beating["w0"].cancel()
    await service.place.store.registry.leave("w0")
    await service.restart_gateway()
    await asyncio.gather(*(talk.turn("and?") for talk in talks))
    assert [one.interaction_count for one in await service.sessions()] == [2] * 8


async def test_hints_separate_sessions_and_sub_agents_share_one(make_service):
    service = await make_service(workers=("w0", "w1"))
    await Talk(service, "same words", **hinted("a")).turn()
    await Talk(service, "same words", **hinted("b")).turn()
    sub_agent = Talk(service, "look into it", **hinted("a"))
    sub_agent.messages.insert(0, {"role": "system", "content": "You are a sub-agent."})
    slow = Talk(service, "think slowly", **hinted("a"))
    await asyncio.gather(slow.turn(), sub_agent.turn())
    sessions = await service.sessions()
    assert [(one.task_id, one.interaction_count) for one in sessions] == [("hint-a", 3), ("hint-b", 1)]


async def test_anthropic_sdk_with_the_hint_in_its_metadata_shares_the_session_of_other_protocols(make_service):
    service = await make_service()
    user = json.dumps({"device_id": "d", "account_uuid": "", "session_id": "s-1"})
    async with anthropic.AsyncAnthropic(base_url=f"{service.url}/gateway", api_key=TOKEN, max_retries=0) as sdk:
        messages = [{"role": "user", "content": "2+2?"}]
        counted = await sdk.messages.count_tokens(model="default", messages=messages)
        assert await service.sessions() == []  # counting opens nothing
        said = await sdk.messages.create(model="default", max_tokens=20, messages=messages, metadata={"user_id": user})
        assert said.usage.input_tokens == counted.input_tokens
        assert [model.id async for model in sdk.models.list()] == ["default"]
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key=TOKEN, max_retries=0) as sdk:
        await sdk.responses.create(model="default", input="and 3+3?", prompt_cache_key="s-1")
        first = await sdk.responses.create(model="default", input="4+4?", extra_headers={"session-id": "s-1"})
        await sdk.responses.create(
            model="default",
            input="why?",
            previous_response_id=first.id,
            extra_headers={"X-Claude-Code-Session-Id": "s-1"},
        )
        with pytest.raises(openai.BadRequestError, match="x-session-id"):
            await sdk.responses.create(model="default", input="why?", previous_response_id=first.id)
    [session] = await service.sessions()
    assert (session.task_id, session.interaction_count) == ("hint-s-1", 4)


async def test_the_last_turn_ends_the_session_and_the_next_call_opens_another(make_service):
    service = await make_service(max_turns=2)
    talk = Talk(service, "2+2?", **hinted("a"))
    await talk.turn()
    await talk.turn("and?")
    [ended] = await service.sessions()
    assert (ended.ending, ended.interaction_count) == ("ended", 2)
    await talk.turn("and now?")
    assert [one.ending for one in await service.sessions()] == ["ended", None]
    assert (await service.place.store.training.ready())[0].sessions[0].id == ended.id
    unhinted = Talk(service, "3+3?")
    for then in (None, "b", "c"):
        await unhinted.turn(then)
    assert [one.ending for one in await service.sessions()] == ["ended", None, "ended", None]


async def test_calls_beyond_the_last_turn_in_flight_go_to_another_session(make_service):
    service = await make_service(max_turns=2)
    await asyncio.gather(*(Talk(service, f"{n} slowly", **hinted("a")).turn() for n in range(5)))
    sessions = await service.sessions()
    assert sorted((one.interaction_count, one.ending) for one in sessions if one.ending) == [(2, "ended")] * 2
    assert sum(one.interaction_count for one in sessions) == 5


async def test_an_outside_reward_reaches_the_session_by_its_hint(make_service):
    service = await make_service(max_turns=2, reward_grace_seconds=30.0)
    talk = Talk(service, "2+2?", **hinted("a"))
    first = await talk.turn()
    assert (
        await service.post("/rl/set_reward", {"reward": 0.25, "interaction_id": first}, **hinted("a")["extra_headers"])
    )[0] == 200
    last = await talk.turn("and?")  # its last turn: open for rewards only
    other = Talk(service, "3+3?", **hinted("a"))
    await other.turn()
    hint = {"x-session-id": "a"}
    status, body = await service.post("/rl/set_reward", {"reward": 1.0, "interaction_id": last}, **hint)
    assert (status, body["interaction_id"]) == (200, last)
    status, body = await service.post("/rl/session", {}, **hint)
    assert status == 200
    assert body["session_id"] == (await service.sessions())[1].id
    status, body = await service.post("/rl/end_session", {}, **hint)
    assert (status, body["interaction_count"]) == (200, 1)
    status, body = await service.post("/rl/set_reward", {"reward": 1.0})
    assert status == 400
    assert "x-session-id" in body["error"]["message"]
    assert (await service.post("/rl/set_reward", {"reward": 1.0}, **{"x-session-id": "unknown"}))[0] == 404
    [first_session, _] = await service.sessions()
    rows = await service.place.store.sessions.interactions(first_session.id)
    assert [row.reward for row in rows] == [0.25, 1.0]


async def test_a_session_without_a_hint_is_rewarded_and_ended_by_the_id_of_an_answer(make_service):
    service = await make_service(workers=("w0", "w1"))
    talks = [Talk(service, "2+2?"), Talk(service, "2+2?")]  # one task, two sessions
    first, other = [await talk.turn() for talk in talks]
    last = await talks[0].turn("and?")
    for answer, reward in ((first, 0.25), (last, 1.0), (other, 0.5)):
        status, body = await service.post("/rl/set_reward", {"reward": reward, "interaction_id": answer})
        assert (status, body["interaction_id"]) == (200, answer), body
    status, body = await service.post("/rl/session", {"interaction_id": other})
    assert (status, body["interaction_count"]) == (200, 1), body
    for _ in range(2):  # a repeated end says the same
        status, body = await service.post("/rl/end_session", {"interaction_id": first})
        assert (status, body["interaction_count"]) == (200, 2)
    assert [one.ending for one in await service.sessions()] == ["ended", None]
    rewards = [
        [row.reward for row in await service.place.store.sessions.interactions(one.id)]
        for one in await service.sessions()
    ]
    assert rewards == [[0.25, 1.0], [0.5]]


async def test_a_reward_that_names_an_answer_never_lands_elsewhere(make_service):
    service = await make_service(max_turns=1)
    admin = service.place.facts.admin_api_key  # starts a session whose task looks like one of the token's
    _, started = await service.post("/rl/start_session", {"task_id": "hint-a"}, admin)
    body = {"messages": [{"role": "user", "content": "2+2?"}]}
    _, explicit = await service.post("/v1/chat/completions", body, started["api_key"])
    gone = await Talk(service, "2+2?").turn()  # its last turn: the session has ended
    await Talk(service, "3+3?", **hinted("a")).turn()
    reward = {"reward": 1.0}
    for said, headers in (
        ({"interaction_id": explicit["id"]}, {}),
        ({"interaction_id": "chatcmpl-nope"}, {}),
        ({"interaction_id": "chatcmpl-nope"}, {"x-session-id": "a"}),
        ({"interaction_id": gone}, {"x-session-id": "a"}),
    ):
        for path in ("/rl/set_reward", "/rl/end_session"):
            status, answer = await service.post(path, reward | said, **headers)
            assert (status, answer["error"]["type"]) == (404, "not_found_error"), answer
    status, answer = await service.post("/rl/set_reward", reward | {"interaction_id": gone})
    assert status == 401
    assert "rollout.agent.reward_grace_seconds" in answer["error"]["message"]
    await Talk(service, "2+2?").turn()  # another session in its place
    status, answer = await service.post("/rl/end_session", {"interaction_id": gone})
    assert status == 401, answer
    rows = [await service.place.store.sessions.interactions(one.id) for one in await service.sessions()]
    assert {row.reward for each in rows for row in each} == {None}
    status, answer = await service.post("/rl/set_reward", reward | {"interaction_id": explicit["id"]}, admin)
    assert (status, answer["interaction_id"]) == (200, explicit["id"])  # the admin key may name any answer
    status, answer = await service.post("/rl/set_reward", reward | {"interaction_id": "nope"}, admin)
    assert status == 404, answer


async def test_the_token_may_not_reward_where_session_keys_may_not(make_service):
    service = await make_service(reward_key="admin")
    await Talk(service, "2+2?", **hinted("a")).turn()
    status, _ = await service.post("/rl/set_reward", {"reward": 1.0}, **{"x-session-id": "a"})
    assert status == 403


async def test_an_idle_session_expires_and_without_a_reward_it_is_dropped(make_service):
    service = await make_service(session_timeout_seconds=0.4)
    await Talk(service, "2+2?").turn()
    await eventually(lambda: ended(service))
    assert (await service.sessions())[0].ending == "expired"
    assert await service.place.store.reading.dropped_sessions() == {"expired": 1}
    await Talk(service, "2+2?").turn()
    assert len(await service.sessions()) == 2


NARROW = Limits(max_concurrent=1, max_lag=9, batch_groups=9)


async def test_without_a_free_slot_a_call_waits_and_then_is_429(make_service):
    service = await make_service(refresh_timeout_seconds=0.5, limits=NARROW, hold_s=0.1)
    await Talk(service, "2+2?", **hinted("a")).turn()
    body = {"messages": [{"role": "user", "content": "3+3?"}]}
    status, said = await service.post("/v1/chat/completions", body, **{"x-session-id": "b"})
    assert (status, said["error"]["code"]) == (429, "no_capacity")
    assert 1 <= int(service.headers["retry-after"]) <= 30


async def test_a_call_that_waits_for_a_slot_goes_on_when_one_is_free(make_service):
    service = await make_service(refresh_timeout_seconds=60.0, limits=NARROW, hold_s=0.1)
    await Talk(service, "2+2?", **hinted("a")).turn()
    body = {"messages": [{"role": "user", "content": "3+3?"}]}
    async with (
        aiohttp.ClientSession() as http,
        http.post(
            f"{service.url}/v1/chat/completions",
            json={**body, "stream": True},
            headers={"authorization": f"Bearer {TOKEN}", "x-session-id": "b"},
        ) as response,
    ):
        assert await response.content.readline() == b": ping\n"
        assert await service.post("/rl/end_session", {}, **{"x-session-id": "a"})
        assert b"data: [DONE]" in await response.content.read()
    assert [one.task_id for one in await service.sessions()] == ["hint-a", "hint-b"]


async def test_what_a_client_writes_into_the_gateways_header_changes_nothing(make_service):
    service = await make_service()
    await Talk(service, "2+2?", **hinted("victim")).turn()
    forged = SessionKeys(b"x" * 32).seal(Topic.hint("victim").text)
    real = service.place.keys.seal(Topic.hint("victim").text)
    body = {"messages": [{"role": "user", "content": "3+3?"}]}
    key = await service.started()
    for value in (forged, real, "nonsense"):
        assert (await service.post("/v1/chat/completions", body, key, **{TOPIC_HEADER: value}))[0] == 200
        assert (await service.post("/v1/chat/completions", body, **{TOPIC_HEADER: value, "x-session-id": "me"}))[
            0
        ] == 200
    assert [(one.task_id, one.interaction_count) for one in await service.sessions()] == [
        ("hint-victim", 1),
        ("t", 3),
        ("hint-me", 3),
    ]
    service.url = service.worker_urls["w0"]  # past the gateway
    for headers in ({}, {TOPIC_HEADER: forged}, {TOPIC_HEADER: "nonsense"}):
        assert (await service.post("/v1/chat/completions", body, **headers))[0] == 401


async def test_who_is_refused_and_in_whose_shape(make_service):
    service = await make_service()
    body = {"messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 5}
    status, said = await service.post("/v1/chat/completions", body, TOKEN + "x")
    assert status == 401
    assert said["error"]["message"].startswith("Invalid API key")
    status, said = await service.post("/v1/messages", body, TOKEN[:-1])
    assert status == 401
    assert said["error"]["type"] == "authentication_error"
    for path in ("/rl/start_session", "/export_trajectories"):
        status, said = await service.post(path, {"task_id": "t"})
        assert status == 403
        assert "internal token" in said["error"]["message"]
    assert await service.sessions() == []
    assert (await service.post("/v1/chat/completions", b"[".decode()))[0] == 400  # not a conversation at all


async def test_the_printed_token_works_on_loopback_only(run):
    assert supported._PRINTED_TOKEN == DEFAULT_INTERNAL_TOKEN
    facts = msgspec.structs.replace(run.facts, internal_token=DEFAULT_INTERNAL_TOKEN)
    async with Attachment(port=1, loopback=False) as attachment:
        with pytest.raises(ConfigError, match="loopback only"):
            await attachment.attach(facts)
    async with Attachment(port=1, loopback=True) as attachment:
        await attachment.attach(facts)
        assert DEFAULT_INTERNAL_TOKEN not in repr(facts) + repr(attachment.run())


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        ({}, ""),
        ({"metadata": {"user_id": "user_1_account__session_2"}}, "user_1_account__session_2"),
        ({"metadata": {"user_id": '{"session_id": "s"}'}}, "s"),
        ({"metadata": {"user_id": '{"device_id": "d"}'}}, '{"device_id": "d"}'),
        ({"metadata": {"user_id": "17"}}, "17"),
        ({"metadata": {"user_id": 17}, "prompt_cache_key": " k "}, "k"),
        ({"metadata": "x", "prompt_cache_key": 3}, ""),
    ],
)
def test_hints_in_bodies(body, hint):
    assert hint_in(body) == hint


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"input": "hi"}, "hi"),
        ({"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}]}, "hi"),
        (
            {
                "messages": [
                    {"role": "system", "content": "s"},
                    {"role": "user", "content": [{"text": "a"}, {"text": "b"}]},
                ]
            },
            "a\nb",
        ),
        ({"messages": [None, 3, {"role": "user"}]}, ""),
        ({"messages": {"role": "user"}}, ""),
    ],
)
def test_first_user_messages(body, text):
    assert first_user_text(body) == text


@pytest.mark.parametrize("hint", ["x" * 201, "a\nb", "\ud800", "日本"])
def test_hints_are_data_and_become_bounded_names(hint):
    topic, keys = Topic.hint(hint), SessionKeys(b"k" * 32)
    assert len(topic.task_id) <= 210
    assert topic.task_id.isprintable()
    assert Topic.parse(keys.unseal(keys.seal(topic.text))) == topic
