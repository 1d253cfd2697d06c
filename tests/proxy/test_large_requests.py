"""Requests out of all measure: refused with a sentence, or worked on beside the event loop, which serves the other sessions meanwhile."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import threading
from typing import Any

import pytest

from areal.proxy.dialects.fields import LONGEST_MODEL_NAME, MOST_ITEMS
from areal.proxy.model_routes import LONG_BODY
from areal.proxy.recorder import LONG_REQUEST
from tests.proxy.asking import DIALECTS, PATHS, SCHEMA, body_of

HI = {"role": "user", "content": "hi"}
MANY = MOST_ITEMS + 1


def too_many(dialect: str) -> dict[str, dict[str, Any]]:
    """Bodies with one list that is too long, by the path that the error names."""
    if dialect == "chat":
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        return {
            "messages": {"messages": [HI] * MANY},
            "messages[0].content": {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * MANY}]},
            "messages[0].tool_calls": {"messages": [{"role": "assistant", "tool_calls": [call] * MANY}]},
            "tools": {"messages": [HI], "tools": [{"type": "function", "function": {"name": "f"}}] * MANY},
            "stop_token_ids": {"messages": [HI], "stop_token_ids": [1] * MANY},
        }
    if dialect == "responses":
        return {
            "input": {"input": [HI] * MANY},
            "input[0].content": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * MANY}]},
            "tools": {"input": "hi", "tools": [{"type": "function", "name": "f"}] * MANY},
        }
    return {
        "messages": {"messages": [HI] * MANY},
        "messages[0].content": {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * MANY}]},
        "system": {"messages": [HI], "system": [{"type": "text", "text": "x"}] * MANY},
        "tools": {"messages": [HI], "tools": [{"name": "f", "input_schema": SCHEMA}] * MANY},
    }


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_lists_without_end_are_refused_with_their_path(make_service: Any, dialect: str) -> None:
    service = await make_service()
    key = await service.start()
    for param, body in too_many(dialect).items():
        status, answer, _ = await service.post(PATHS[dialect], {**body, "max_tokens": 5}, key)
        said = answer["error"]["message"]
        assert (status, f"{param} has {MANY} entries, more than {MOST_ITEMS}" in said) == (400, True), (param, said)
        if dialect != "messages":
            assert answer["error"]["param"] == param
    status, answer, _ = await service.post(PATHS[dialect], body_of(dialect, model="m" * (LONGEST_MODEL_NAME + 1)), key)
    assert (status, str(LONGEST_MODEL_NAME) in answer["error"]["message"]) == (400, True)
    assert await service.recorded(key) == ()


async def test_400_000_messages_are_read_beside_the_loop(make_service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    service = await make_service()
    key, other = await service.start("large"), await service.start("other")
    from areal.proxy.dialects import openai_chat

    where: list[threading.Thread] = []
    go_on, parse = threading.Event(), openai_chat.OpenAIChat.parse

    def noted(self: Any, body: Any, headers: Any) -> Any:
        where.append(threading.current_thread())
        if len(body["messages"]) > 1:
            go_on.wait(30)
        return parse(self, body, headers)

    monkeypatch.setattr(openai_chat.OpenAIChat, "parse", noted)
    large = json.dumps({"messages": [HI] * 400_000}).encode()

    async def ask() -> int:
        url, headers = service.url + PATHS["chat"], {"x-api-key": key}
        async with service.http.post(url, data=io.BytesIO(large), headers=headers) as response:
            assert "400000 entries" in await response.text()
            return int(response.status)

    asking = asyncio.create_task(ask())
    while not where:
        assert not asking.done(), asking.result()
        await asyncio.sleep(0.01)
    answer = await service.chat(other, "hi")  # while the large one is being read
    assert answer["choices"]
    go_on.set()
    assert await asking == 400
    assert where[0] is not threading.main_thread()
    assert where[1] is threading.main_thread()


@pytest.mark.parametrize("what", ["tools", "messages"])
async def test_long_tools_and_many_short_messages_are_rendered_beside_the_loop(
    make_service: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    service = await make_service()
    key = await service.start()
    where: list[threading.Thread] = []
    render = service.renderer.render

    def noted(*words: Any, **more: Any) -> Any:
        where.append(threading.current_thread())
        return render(*words, **more)

    monkeypatch.setattr(service.renderer, "render", noted)
    properties = {f"a{k}": {"type": "string", "description": "d" * 20} for k in range(300)}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    bodies = {
        "tools": {"messages": [HI], "tools": [tool] * 5},
        "messages": {"messages": [HI, {"role": "assistant", "content": "ok"}] * 1000 + [HI]},
    }
    assert LONG_REQUEST < len(json.dumps(bodies[what])) < LONG_BODY
    status, answer, _ = await service.post(PATHS["chat"], bodies[what], key)
    assert status in (200, 400), answer
    assert where[0] is not threading.main_thread()


@pytest.mark.parametrize(
    ("layers", "named", "status"), [(1, "gzip", 200), (2, "gzip, gzip", 200), (3, "gzip, gzip, gzip", 400), (1, ", ".join(["gzip"] * 2000), 400)]
)  # fmt: skip
async def test_content_encodings_are_bounded_in_number(make_service: Any, layers: int, named: str, status: int) -> None:
    service = await make_service()
    body = json.dumps({"messages": [HI]}).encode()
    for _ in range(layers):
        body = gzip.compress(body)
    got, answer, _ = await service.post(PATHS["chat"], body, await service.start(), **{"content-encoding": named})
    assert got == status
    if status == 400:
        assert "compress the body once" in answer["error"]["message"]
