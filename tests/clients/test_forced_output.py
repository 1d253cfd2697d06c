"""Forced calls and JSON formats through the whole path, with the real SDKs, over a net that would say anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import anthropic
import jsonschema
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict, Field

from tests.clients.native_service import native_service
from tests.inference.spelling_nets import TEMPLATE, write_net
from tests.inference.test_native_constrained import BOOK, FAMILIES
from tests.proxy.service import Service

HI: Any = [{"role": "user", "content": "hi"}]
CHAT_TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in ((BOOK.name, BOOK.parameters), ("now", {"type": "object", "properties": {}}))
]
FLAT_TOOLS: Any = [{"type": "function", **one["function"]} for one in CHAT_TOOLS]
MESSAGES_TOOLS: Any = [
    {"name": one["name"], "input_schema": {"type": "object", **one["parameters"]}} for one in FLAT_TOOLS
]
SCHEMAS = {one["name"]: one["parameters"] for one in FLAT_TOOLS}
PARSERS = ("hermes", "qwen3_coder", "glm", "kimi", "deepseek", "mistral", "llama3_json", "json")
Call = tuple[str, Any]


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["yes", "no"]
    score: int = Field(ge=0, le=99)
    marks: list[bool] = Field(max_length=3)


async def by_chat(service: Service, key: str, stream: bool, choice: Any) -> list[Call]:
    async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key=key) as client:
        asked: Any = {"model": "default", "messages": HI, "tools": CHAT_TOOLS, "tool_choice": choice}
        asked |= {"parallel_tool_calls": False, "max_tokens": 400}
        if stream:
            async with client.chat.completions.stream(**asked) as events:
                async for _ in events:
                    pass
                [said] = (await events.get_final_completion()).choices
        else:
            [said] = (await client.chat.completions.create(**asked)).choices
    assert said.finish_reason == "tool_calls"
    assert not said.message.content
    return [(one.function.name, json.loads(one.function.arguments)) for one in said.message.tool_calls or ()]


async def by_responses(service: Service, key: str, stream: bool, choice: Any) -> list[Call]:
    named = {"type": "function", "name": choice["function"]["name"]} if isinstance(choice, dict) else choice
    async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key=key) as client:
        asked: Any = {"model": "default", "input": "hi", "tools": FLAT_TOOLS, "tool_choice": named}
        asked |= {"parallel_tool_calls": False, "max_output_tokens": 400}
        if stream:
            async with client.responses.stream(**asked) as events:
                async for _ in events:
                    pass
                said = await events.get_final_response()
        else:
            said = await client.responses.create(**asked)
    assert said.status == "completed"
    assert {item.type for item in said.output} == {"function_call"}
    return [(item.name, json.loads(item.arguments)) for item in said.output if item.type == "function_call"]


async def by_messages(service: Service, key: str, stream: bool, choice: Any) -> list[Call]:
    named = {"type": "tool", "name": choice["function"]["name"]} if isinstance(choice, dict) else {"type": "any"}
    async with AsyncAnthropic(base_url=service.url, api_key=key) as client:
        asked: Any = {"model": "default", "messages": HI, "tools": MESSAGES_TOOLS, "max_tokens": 400}
        asked |= {"tool_choice": {**named, "disable_parallel_tool_use": True}}
        if stream:
            async with client.messages.stream(**asked) as events:
                said = await events.get_final_message()
        else:
            said = await client.messages.create(**asked)
    assert said.stop_reason == "tool_use"
    return [(block.name, block.input) for block in said.content if block.type == "tool_use"]


CLIENTS = {"chat": by_chat, "responses": by_responses, "messages": by_messages}
NAMED = {"type": "function", "function": {"name": "book"}}


@pytest.mark.parametrize("name", PARSERS)
async def test_every_protocol_gets_its_forced_call_in_every_format(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    template = TEMPLATE + "{# " + family.shown + " #}"
    net = write_net(tmp_path / "net", template, special=family.special, added=family.added)
    async with native_service(tmp_path, net, tool_call_parser=family.parser) as service:
        key = await service.start()
        for ask in CLIENTS.values():
            for stream, choice in ((False, "required"), (True, NAMED), (True, "required")):
                [(called, arguments)] = await ask(service, key, stream, choice)
                jsonschema.validate(arguments, SCHEMAS[called])
                assert choice == "required" or called == "book"
        recorded = await service.recorded(key)
        assert len(recorded) == 9
        for one in recorded:
            assert one.tags == ("constrained",)
            assert one.sampling.constraint is not None
            assert one.completion.constrained is not None
            assert len(one.completion.constrained) == len(one.completion.token_ids)
        forced = sum(
            int(one.completion.constrained.sum()) for one in recorded if one.completion.constrained is not None
        )
        async with service.http.get(f"{service.url}/rl/session", headers={"x-api-key": key}) as response:
            tokens = (await response.json())["tokens"]
        assert tokens["masked"] == {"constrained": forced}
        assert tokens["recorded"] == tokens["trained"] + forced
        assert forced > 0


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_net(tmp_path_factory.mktemp("forced") / "net")


async def test_the_sdks_own_typed_answers_are_parsed(net: Path, tmp_path: Path) -> None:
    async with native_service(tmp_path, net) as service:
        key = await service.start()
        async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key=key) as client:
            for _ in range(3):
                chat = await client.chat.completions.parse(model="default", messages=HI, response_format=Answer)
                assert isinstance(chat.choices[0].message.parsed, Answer)
                async with client.chat.completions.stream(
                    model="default", messages=HI, response_format=Answer
                ) as events:
                    async for _ in events:
                        pass
                    streamed = await events.get_final_completion()
                assert isinstance(streamed.choices[0].message.parsed, Answer)
                response = await client.responses.parse(model="default", input="hi", text_format=Answer)
                assert isinstance(response.output_parsed, Answer)
            loose = await client.chat.completions.create(
                model="default", messages=HI, response_format={"type": "json_object"}, max_tokens=300
            )
            if loose.choices[0].finish_reason == "stop":
                assert isinstance(json.loads(loose.choices[0].message.content or ""), dict)
        schema = {"type": "json_schema", "schema": Answer.model_json_schema()}
        async with AsyncAnthropic(base_url=service.url, api_key=key) as speaker:
            config: Any = {"format": schema}
            message = await speaker.messages.create(model="default", messages=HI, max_tokens=300, output_config=config)
            [block] = message.content
            assert block.type == "text"
            assert Answer.model_validate_json(block.text)
            async with speaker.messages.stream(
                model="default", messages=HI, max_tokens=300, output_config=config
            ) as events:
                assert Answer.model_validate_json(await events.get_final_text())
            typed = await speaker.messages.parse(model="default", messages=HI, max_tokens=300, output_format=Answer)
            assert isinstance(typed.parsed_output, Answer)


async def test_where_there_are_tools_a_json_answer_leaves_the_model_the_choice(net: Path, tmp_path: Path) -> None:
    schema = {"name": "s", "schema": {"enum": ["plain"]}, "strict": True}
    texts, calls = 0, 0
    async with native_service(tmp_path, net) as service:
        async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key=await service.start()) as client:
            for _ in range(24):
                [said] = (
                    await client.chat.completions.create(
                        model="default",
                        messages=HI,
                        tools=CHAT_TOOLS,
                        parallel_tool_calls=False,
                        response_format={"type": "json_schema", "json_schema": schema},
                    )
                ).choices
                if said.message.tool_calls:
                    calls += 1
                    assert (said.finish_reason, said.message.content) == ("tool_calls", None)
                else:
                    texts += 1
                    assert (said.finish_reason, said.message.content) == ("stop", '"plain"')
    assert texts
    assert calls


async def test_a_schema_that_cannot_be_kept_is_the_callers_own_400(net: Path, tmp_path: Path) -> None:
    bad: Any = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    async with native_service(tmp_path, net) as service:
        key = await service.start()
        async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key=key) as client:
            for stream in (False, True):
                with pytest.raises(openai.BadRequestError, match="uniqueItems"):
                    await client.chat.completions.create(
                        model="default",
                        messages=HI,
                        stream=stream,
                        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": bad}},
                    )
                with pytest.raises(openai.BadRequestError, match="uniqueItems"):
                    await client.responses.create(
                        model="default",
                        input="hi",
                        stream=stream,
                        text={"format": {"type": "json_schema", "name": "s", "schema": bad}},
                    )
        async with AsyncAnthropic(base_url=service.url, api_key=key) as speaker:
            with pytest.raises(anthropic.BadRequestError, match="uniqueItems"):
                await speaker.messages.create(
                    model="default",
                    messages=HI,
                    max_tokens=9,
                    output_config={"format": {"type": "json_schema", "schema": bad}},
                )
        assert len(await service.recorded(key)) == 0
