"""A conversation that changes its protocol at every turn is one conversation: its recorded tokens are kept, whoever asks.

Clients echo as the measured ones do: reasoning kept or dropped, arguments printed anew, call ids stripped, results out of order,
strings or parts, cache_control on what is newest.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

CALL = '<tool_call>\n{"name": "f", "arguments": {"b":2,"a":"é"}}\n</tool_call>'
BARE = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
LINES: list[Any] = [
    {"pieces": ["I will ", " look ✓", ". \n", "<|im_end|>"]},
    {"pieces": [*CALL, "<|im_end|>"]},
    {"pieces": ["<think>", "\nadd\n", "</think>", "\n\n", "four", "<|im_end|>"]},
    {"pieces": ["Two at once.\n", CALL, "\n", BARE, "<|im_end|>"]},
    {"pieces": ["<think>", "\nhm\n", "</think>", "\n\n", CALL, "<|im_end|>"]},
]
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

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def parts(self, text: str, kind: str = "text") -> Any:
        if self.random.random() < 0.5:
            return text
        extra = {"cache_control": {"type": "ephemeral"}} if kind == "text" and self.random.random() < 0.5 else {}
        return [{"type": kind, "text": text, **extra}]

    def arguments(self, text: str) -> str:
        return self.random.choice([text, json.dumps(json.loads(text), sort_keys=True), json.dumps(json.loads(text))])

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
                {"type": "tool_use", "id": name, "name": what, "input": json.loads(text)}
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
            turn.text += part["text"] if "text" in part else part["content"][0]["text"]
        elif part["type"] in ("thinking", "reasoning"):
            turn.reasoning += part["thinking"] if "thinking" in part else part["content"][0]["text"]
        elif part["type"] == "tool_use":
            turn.calls.append((part["id"], part["name"], json.dumps(part["input"])))
        else:
            turn.calls.append((part["call_id"], part["name"], part["arguments"]))
    return turn


@pytest.mark.parametrize("seed", range(6))
async def test_a_conversation_through_changing_protocols_keeps_its_recorded_tokens(
    make_service: Any, seed: int
) -> None:
    client = Client(seed)
    lines = list(LINES)
    client.random.shuffle(lines)
    service = await make_service(lines)
    key = await service.start()
    history = [Turn("system", "Be terse."), Turn("user", "hi")][client.random.randint(0, 1) :]
    ids: list[str] = []
    instructed = False
    for number in range(8):
        path, body = client.random.choice([client.chat, client.responses, client.messages])(history)
        if path == "/responses" and ids and client.random.random() < 0.3:
            count = next(k for k, turn in enumerate(reversed(history)) if turn.role == "assistant")
            chained = client.responses(history[len(history) - count :])[1]
            again = {"instructions": history[0].text} if instructed else {}  # an answer's own are not inherited
            body = {**chained, **again, "previous_response_id": ids[-1]}
        status, answer, _ = await service.post(path, body, key)
        assert status == 200, answer
        ids.append(answer["id"])
        instructed = "instructions" in body
        said = read(answer)
        history.append(said)
        history += [Turn("tool", f"result {k}", call_id=call[0]) for k, call in enumerate(said.calls)]
        if not said.calls or client.random.random() < 0.3:
            history.append(Turn("user", f"more {number}"))
    done = await service.recorded(key)
    reasons = [one.branch_reason for one in done]
    assert [one.token_parent for one in done] == [None, *ids[:-1]], reasons
    assert (await service.end(key))["interaction_count"] == 8
    _, exported, _ = await service.post("/rl/export_trajectories", {"session_id": "task", "style": "concat"})
    (row,) = exported["trajectories"]
    assert sum(row["loss_mask"]) == exported["tokens"]["trained"] == sum(len(one.completion.token_ids) for one in done)
