"""A conversation that changes its protocol at every turn is one conversation: its recorded tokens are kept, whoever asks."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.proxy.speakers import Client, Turn, read

CALL = '<tool_call>\n{"name": "f", "arguments": {"b":2,"a":"é"}}\n</tool_call>'
BARE = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
LINES: list[Any] = [
    {"pieces": ["I will ", " look ✓", ". \n", "<|im_end|>"]},
    {"pieces": [*CALL, "<|im_end|>"]},
    {"pieces": ["<think>", "\nadd\n", "</think>", "\n\n", "four", "<|im_end|>"]},
    {"pieces": ["Two at once.\n", CALL, "\n", BARE, "<|im_end|>"]},
    {"pieces": ["<think>", "\nhm\n", "</think>", "\n\n", CALL, "<|im_end|>"]},
]


@pytest.mark.parametrize("seed", range(6))
async def test_a_conversation_through_changing_protocols_keeps_its_recorded_tokens(
    make_service: Any, seed: int
) -> None:
    client = Client(random.Random(seed))
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
