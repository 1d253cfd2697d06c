"""Agents that branch, edit, retry, hang up and ask for several choices at random: the record always adds up."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import aiohttp
import pytest

from areal.proxy import export

LINES = [
    {"pieces": ["a", "b", "<|im_end|>"], "logprobs": [-0.1, -0.2, -0.3]},
    {"pieces": ["ab", "<|im_end|>"], "logprobs": [-0.4, -0.5]},
    {"pieces": ["x ", " y"], "finish": "length", "logprobs": [-0.6, -0.7], "delay_ms": 5},
    {"pieces": ["c", "d", "e"], "logprobs": [-1, -2, -3], "delay_ms": 5, "fail": {"at": 2, "message": "broken"}},
    {"pieces": []},
]


class Agent:
    """A client with a seeded temper."""

    def __init__(self, service: Any, key: str, seed: int) -> None:
        self.service, self.key, self.random = service, key, random.Random(seed)
        self.histories: list[list[dict[str, str]]] = [[{"role": "user", "content": "start"}]]

    async def turn(self) -> None:
        history = [dict(one) for one in self.random.choice(self.histories)]
        if len(history) > 2 and self.random.random() < 0.15:
            history[1]["content"] += " edited"
        body = {"messages": history, "stream": self.random.random() < 0.5, "n": self.random.choice([1, 1, 1, 2])}
        if self.random.random() < 0.2:
            body["stop"] = ["b"]
        if self.random.random() < 0.1:
            body["temperature"] = 0
        headers = {"x-api-key": self.key}
        if self.random.random() < 0.15:
            headers["x-stainless-retry-count"] = "1"
        limit = 0.01 if self.random.random() < 0.15 else None
        try:
            async with asyncio.timeout(limit), aiohttp.ClientSession() as http:
                async with http.post(f"{self.service.url}/v1/chat/completions", json=body, headers=headers) as answer:
                    assert answer.status in (200, 502), await answer.text()
                    if answer.status != 200 or body["stream"]:
                        await answer.read()
                        return
                    said = (await answer.json())["choices"][0]["message"]["content"]
        except TimeoutError:
            return
        news = self.random.choice(["more", "start", "ab"])
        self.histories.append([*history, {"role": "assistant", "content": said}, {"role": "user", "content": news}])


@pytest.mark.parametrize("seed", range(3))
async def test_every_recorded_token_is_trained_once_or_masked_for_a_reason(
    make_service: Any, eventually: Any, seed: int
) -> None:
    service = await make_service(LINES)
    key = await service.start()
    agents = [Agent(service, key, seed * 10 + k) for k in range(3)]
    for _ in range(12):
        await asyncio.gather(*(agent.turn() for agent in agents))
    await eventually(lambda: service.calls()["running"] == 0)
    await service.end(key)
    session = await service.store.sessions.get("task")
    done = await service.recorded(key)
    assert session.interaction_count == len(done) > 10
    by_id = {one.id: one for one in done}
    for one in done:
        completion = one.completion
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions)
        if one.token_parent is not None:
            parent = by_id[one.token_parent]
            joined = [*parent.prompt_ids.tolist(), *parent.completion.token_ids.tolist()]
            assert one.prompt_ids[: len(joined)].tolist() == joined
            assert one.credit_parent == one.token_parent
        if one.credit_parent is not None:
            assert by_id[one.credit_parent].index < one.index
        assert completion.finish_reason in ("stop", "length") or "aborted" in one.tags
    account = export.account(done)
    assert account.recorded == sum(len(one.completion.token_ids) for one in done)
    for style in ("individual", "concat"):
        rows = export.rows(session, done, style, 0.5)
        assert sum(int(row.trained.sum()) for row in rows) == account.trained
    assert account.recorded == account.trained + sum(account.masked.values())
