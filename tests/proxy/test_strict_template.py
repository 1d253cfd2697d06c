"""A template that raises on an unusual order of roles: the request is at fault, not the server (T005)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from areal.chat import ChatTemplate, JinjaRenderer
from areal.inference.scripted.script import read_script

STRICT = """{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


async def test_T005_a_template_that_refuses_is_400_with_its_reason_and_the_session_lives_on(
    make_service: Any, tmp_path: Path
) -> None:
    line = {"pieces": ["ok", "<|im_end|>"]}
    script = tmp_path / "vocabulary.jsonl"
    script.write_text(json.dumps(line))
    renderer = JinjaRenderer(read_script(script).vocabulary, ChatTemplate(STRICT, origin="test"))
    service = await make_service([line], parts={"renderer": renderer})
    key = await service.start()
    body = {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]}
    status, answer, headers = await service.post("/v1/chat/completions", body, key)
    assert status == 400
    assert "must alternate" in answer["error"]["message"]
    assert (answer["error"]["param"], headers["x-should-retry"]) == ("messages", "false")
    assert (await service.post("/v1/responses", {"input": body["messages"]}, key))[:2] == (400, answer)
    status, other, _ = await service.post("/v1/messages", {**body, "max_tokens": 9}, key)
    assert (status, other["error"]["type"]) == (400, "invalid_request_error")
    assert other["error"]["message"] == answer["error"]["message"]
    assert await service.recorded(key) == ()
    await service.chat(key, "x")
    await service.chat(key, "x", "ok", "y")
    assert [one.token_parent is None for one in await service.recorded(key)] == [True, False]


FORGETFUL = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1].lstrip() if m.role == 'assistant' else m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


async def test_T051_a_template_that_forgets_reasoning_breaks_the_row_and_not_the_credit(
    make_service: Any, tmp_path: Path
) -> None:
    lines = [
        {"pieces": ["<think>", "\nadd\n", "</think>", "\n\n4", "<|im_end|>"]},
        {"pieces": ["6", "<|im_end|>"]},
    ]
    script = tmp_path / "vocabulary.jsonl"
    script.write_text("\n".join(json.dumps(line) for line in lines))
    renderer = JinjaRenderer(read_script(script).vocabulary, ChatTemplate(FORGETFUL, origin="test"))
    service = await make_service(lines, parts={"renderer": renderer}, agent={"turn_discount": 0.5})
    key = await service.start()
    first = await service.chat(key, "2+2?")
    await service.chat(key, "2+2?", "4", "and 3+3?")
    await service.reward(key, 1.0)
    one, two = await service.recorded(key)
    assert (two.token_parent, two.credit_parent) == (None, first["id"])
    assert two.branch_reason == "reasoning_stripped"
    assert len(one.completion.token_ids) == 5
    _, body, _ = await service.post("/rl/export_trajectories", {"session_id": "task", "style": "concat"})
    assert [row["spans"][0]["reward"] for row in body["trajectories"]] == [0.5, 1.0]
    assert sum(sum(row["loss_mask"]) for row in body["trajectories"]) == body["tokens"]["trained"] == 7
    async with service.http.get(f"{service.url}/rl/session", headers={"x-api-key": key}) as response:
        assert (await response.json())["merge_rate"] == 0.0
