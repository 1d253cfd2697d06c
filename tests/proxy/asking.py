"""One question in any protocol, whole or streamed, and what was said in no protocol's words.

answer = await ask(service, key, "messages", stream=True, text="hi", tools=True)
answer.text, answer.reasoning, answer.calls, answer.finish, answer.usage, answer.events
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from areal.web.sse import SseDecoder
from tests.proxy.speakers import fold, read

PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
DIALECTS = tuple(PATHS)
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
TOOL_NAMES = ("f", "add", "get_weather", "write_file", "sh")
FINISH = {
    "end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls",
    "stop": "stop", "length": "length", "tool_calls": "tool_calls", "completed": "stop", "incomplete": "length",
}  # fmt: skip


@dataclass
class Said:
    """calls: (name, argument text). usage: (input, output) tokens. events: (name, decoded data) of a stream."""

    text: str
    reasoning: str
    calls: list[tuple[str, str]]
    finish: str
    usage: tuple[int, int] | None
    body: Any
    events: list[tuple[str, Any]] = field(default_factory=list)

    def texts(self) -> list[str]:
        """The text of each event, in order, the empty ones left out."""
        found = []
        for name, data in self.events:
            if "choices" in data:
                found += [choice["delta"].get("content") for choice in data["choices"] if choice["index"] == 0]
            elif name == "response.output_text.delta":
                found.append(data["delta"])
            elif name == "content_block_delta":
                found.append(data["delta"].get("text"))
        return [text for text in found if text]


def tools_of(dialect: str) -> list[Any]:
    if dialect == "chat":
        return [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in TOOL_NAMES]
    if dialect == "responses":
        return [{"type": "function", "name": name, "parameters": SCHEMA} for name in TOOL_NAMES]
    return [{"name": name, "input_schema": SCHEMA} for name in TOOL_NAMES]


def body_of(
    dialect: str, text: str = "hi", *, tools: bool = False, limit: int | None = None, stop: Any = None, **more: Any
) -> dict[str, Any]:
    said: Any = {"input": text} if dialect == "responses" else {"messages": [{"role": "user", "content": text}]}
    if tools:
        said["tools"] = tools_of(dialect)
    if limit is not None:
        said["max_output_tokens" if dialect == "responses" else "max_tokens"] = limit
    if stop is not None:
        said["stop_sequences" if dialect == "messages" else "stop"] = stop
    return {**said, **more}


async def ask(service: Any, key: str, dialect: str, *, stream: bool, **more: Any) -> Said:
    """See the module."""
    path, body = PATHS[dialect], body_of(dialect, **more)
    if not stream:
        status, answer, _ = await service.post(path, body, key)
        assert status == 200, answer
        return _said(dialect, answer, [])
    decoder, events = SseDecoder(), []
    async with service.http.post(
        service.url + path, json={**body, "stream": True}, headers={"x-api-key": key}
    ) as response:
        assert response.status == 200, await response.text()
        async for chunk in response.content.iter_any():
            events += [(one.name, one.data) for one in decoder.feed(chunk)]
    if dialect == "chat":
        assert events.pop()[1] == b"[DONE]"
    found = [(name, json.loads(data)) for name, data in events]
    answer = fold(path, [data for _, data in found])
    if dialect == "chat":
        ends = [one["choices"][0] for _, one in found if one["choices"] and one["choices"][0]["finish_reason"]]
        answer["choices"][0]["finish_reason"] = ends[-1]["finish_reason"]
        answer["usage"] = found[-1][1].get("usage")
    elif dialect == "messages":
        answer |= found[-2][1]["delta"]
        answer["usage"] = {**found[0][1]["message"]["usage"], **found[-2][1]["usage"]}
    return _said(dialect, answer, found)


def _said(dialect: str, answer: Any, events: list[tuple[str, Any]]) -> Said:
    turn = read(answer)
    if dialect == "chat":
        finish = answer["choices"][0]["finish_reason"]
    else:
        finish = answer["status"] if dialect == "responses" else answer["stop_reason"]
    calls = [(name, arguments) for _, name, arguments in turn.calls]
    finish = "tool_calls" if finish == "completed" and calls else FINISH[finish]
    names = ("prompt_tokens", "completion_tokens") if dialect == "chat" else ("input_tokens", "output_tokens")
    usage = answer.get("usage")
    return Said(turn.text, turn.reasoning, calls, finish, usage and (usage[names[0]], usage[names[1]]), answer, events)
