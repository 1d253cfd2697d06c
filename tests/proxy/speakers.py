"""A client that speaks all three protocols, with a seeded temper: what it sends for a conversation, what it reads of an answer.

    client = Client(random.Random(7))
    path, body = client.chat(history)                 # or client.responses, client.messages
    history.append(read(answer))                      # of whole answers
    history.append(read(fold(path, events)))          # and of streamed ones

It echoes as the measured clients do: reasoning kept or dropped, arguments printed anew, results out of order, strings or parts,
cache_control on what is newest.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

SCHEMA = {"type": "object", "properties": {}}


@dataclass
class Turn:
    """One message, in no protocol's shape. calls: (id, name, argument text)."""

    role: str
    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    call_id: str = ""


class Client:
    """Speaks all three protocols, with a seeded temper."""

    def __init__(self, temper: random.Random) -> None:
        self.random = temper

    def parts(self, text: str, kind: str = "text") -> Any:
        if self.random.random() < 0.5:
            return text
        extra = {"cache_control": {"type": "ephemeral"}} if kind == "text" and self.random.random() < 0.5 else {}
        return [{"type": kind, "text": text, **extra}]

    def arguments(self, text: str) -> str:
        try:
            value = json.loads(text)
        except ValueError:  # a model may write anything; clients hand it on
            return text
        return self.random.choice([text, json.dumps(value, sort_keys=True), json.dumps(value)])

    def shuffled(self, history: list[Turn]) -> list[Turn]:
        """Parallel tool results in any order."""
        found: list[Turn] = []
        run: list[Turn] = []
        for turn in [*history, Turn("end")]:
            if turn.role == "tool":
                run.append(turn)
                continue
            self.random.shuffle(run)
            found += [*run, turn]
            run = []
        return found[:-1]

    def chat(self, history: list[Turn]) -> tuple[str, dict[str, Any]]:
        sent: list[dict[str, Any]] = []
        for turn in self.shuffled(history):
            one: dict[str, Any] = {"role": turn.role, "content": self.parts(turn.text)}
            if turn.role == "system":
                one["role"] = self.random.choice(["system", "developer"])
            if turn.call_id:
                one["tool_call_id"] = turn.call_id
            if turn.calls:
                one["tool_calls"] = [
                    {"id": name, "type": "function", "function": {"name": what, "arguments": self.arguments(text)}}
                    for name, what, text in turn.calls
                ]
                one["content"] = turn.text or self.random.choice([None, "", []])
            if turn.reasoning and self.random.random() < 0.5:
                one["reasoning_content"] = turn.reasoning.strip()
            sent.append(one)
        tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")]
        return "/v1/chat/completions", {"messages": sent, "tools": tools}

    def responses(self, history: list[Turn]) -> tuple[str, dict[str, Any]]:
        items: list[dict[str, Any]] = []
        for turn in self.shuffled(history):
            if turn.role == "tool":
                output = self.parts(turn.text, "input_text")
                items.append({"type": "function_call_output", "call_id": turn.call_id, "output": output})
                continue
            if turn.reasoning and self.random.random() < 0.5:
                part = {"type": "reasoning_text", "text": turn.reasoning}
                items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": [part]})
            if turn.text or not turn.calls:
                kind = "output_text" if turn.role == "assistant" else "input_text"
                items.append({"role": turn.role, "content": self.parts(turn.text, kind)})
            for name, what, text in turn.calls:
                items.append(
                    {"type": "function_call", "call_id": name, "name": what, "arguments": self.arguments(text)}
                )
        body: dict[str, Any] = {"input": items}
        if self.random.random() < 0.5 and items[0].get("role") == "system":
            body = {"input": items[1:], "instructions": history[0].text}
        return "/responses", {
            **body,
            "tools": [{"type": "function", "name": name, "parameters": SCHEMA} for name in "fg"],
        }

    def messages(self, history: list[Turn]) -> tuple[str, dict[str, Any]]:
        sent: list[dict[str, Any]] = []
        system: Any = None
        results: list[dict[str, Any]] = []
        for turn in self.shuffled(history):
            if turn.role == "tool":
                block = {"type": "tool_result", "tool_use_id": turn.call_id, "content": self.parts(turn.text)}
                results.append(block)
                continue
            if results:
                sent.append({"role": "user", "content": results})
                results = []
            if turn.role == "system":
                system = self.parts(turn.text)
                continue
            blocks: list[dict[str, Any]] = []
            if turn.reasoning and self.random.random() < 0.5:
                blocks.append({"type": "thinking", "thinking": turn.reasoning, "signature": ""})
            blocks += [{"type": "text", "text": turn.text}] if turn.text else []
            blocks += [
                {"type": "tool_use", "id": name, "name": what, "input": object_or_wrapped(text)}
                for name, what, text in turn.calls
            ]
            sent.append({"role": turn.role, "content": blocks if turn.role == "assistant" else self.parts(turn.text)})
        if results:
            sent.append({"role": "user", "content": results})
        tools = [{"name": name, "input_schema": SCHEMA} for name in ("f", "g")]
        return "/v1/messages", {"messages": sent, "system": system, "tools": tools, "max_tokens": 500}


def read(answer: dict[str, Any]) -> Turn:
    """The answer of any protocol."""
    turn = Turn("assistant")
    if "choices" in answer:
        said = answer["choices"][0]["message"]
        turn.text, turn.reasoning = said["content"] or "", said.get("reasoning_content") or ""
        for call in said.get("tool_calls") or ():
            turn.calls.append((call["id"], call["function"]["name"], call["function"]["arguments"]))
        return turn
    for part in answer.get("output") or answer["content"]:
        if part["type"] in ("text", "message"):
            turn.text += part["text"] if "text" in part else "".join(one["text"] for one in part["content"])
        elif part["type"] in ("thinking", "reasoning"):
            said = [one["text"] for one in part.get("content", ())]
            turn.reasoning += part["thinking"] if "thinking" in part else "".join(said)
        elif part["type"] == "tool_use":
            turn.calls.append((part["id"], part["name"], json.dumps(part["input"])))
        else:
            turn.calls.append((part["call_id"], part["name"], part["arguments"]))
    return turn


def fold(path: str, events: Iterable[Any]) -> dict[str, Any]:
    """The whole answer (of chat: choice 0) that a stream's events add up to. events: decoded data, without [DONE]."""
    answer: dict[str, Any] = {}
    if path.endswith("/responses"):
        for event in events:
            if event["type"] in ("response.completed", "response.incomplete"):
                answer = event["response"]
        return answer
    return _fold_messages(events) if path.endswith("/messages") else _fold_chat(events)


def _fold_chat(events: Iterable[Any]) -> dict[str, Any]:
    said: dict[str, Any] = {"content": "", "reasoning_content": ""}
    calls: dict[int, dict[str, Any]] = {}
    answer: dict[str, Any] = {"choices": [{"message": said}]}
    for event in events:
        answer["id"] = event["id"]
        for choice in event["choices"]:
            if choice["index"]:
                continue
            delta = choice["delta"]
            for key in ("content", "reasoning_content"):
                said[key] += delta.get(key) or ""
            for call in delta.get("tool_calls", ()):
                empty = {"id": call.get("id"), "function": {"name": "", "arguments": ""}}
                for key, text in call["function"].items():
                    calls.setdefault(call["index"], empty)["function"][key] += text
    said["tool_calls"] = [calls[index] for index in sorted(calls)]
    return answer


def _fold_messages(events: Iterable[Any]) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    answer: dict[str, Any] = {"content": blocks}
    for event in events:
        if event["type"] == "message_start":
            answer["id"] = event["message"]["id"]
        elif event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            for kind in ("text", "thinking"):
                if kind in delta:
                    blocks[-1][kind] += delta[kind]
            blocks[-1]["json"] += delta.get("partial_json", "")
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = object_or_wrapped(block["json"])
    return answer


def object_or_wrapped(text: str) -> dict[str, Any]:
    """As whole answers say what is no object."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}
