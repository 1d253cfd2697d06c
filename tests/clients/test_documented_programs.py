"""The Python programs of README.md, docs/quickstart.md, docs/tutorial_online.md and docs/http.md run as they are printed."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.proxy.service import ADMIN

ROOT = Path(__file__).parents[2]
LINES = [{"pieces": ["It", " is", " 183", "<|im_end|>"]}]


def run(page: str, url: str, key: str) -> subprocess.CompletedProcess[str]:
    [program] = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
    assert "http://127.0.0.1:8090" in program
    program = program.replace("http://127.0.0.1:8090", url).replace("areal-admin-key", ADMIN)
    environment = {**os.environ, "OPENAI_API_KEY": key}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment)


@pytest.mark.parametrize("page", ["README.md", "docs/http.md"])
async def test_a_program_that_plays_a_session(make_service: Any, page: str) -> None:
    service = await make_service(LINES)
    done = await asyncio.to_thread(run, page, service.url, "none")
    assert done.returncode == 0, done.stderr
    session = await service.store.sessions.get("sum-1")
    assert (session.ending, session.interaction_count) == ("ended", 1)
    [one] = await service.store.sessions.interactions("sum-1")
    assert one.reward == 1.0


async def test_a_program_that_asks_under_a_key_that_it_is_given(make_service: Any) -> None:
    service = await make_service(LINES)
    key = await service.start()
    done = await asyncio.to_thread(run, "docs/tutorial_online.md", service.url, key)
    assert (done.returncode, done.stdout) == (0, "It is 183\n"), done.stderr
    assert len(await service.recorded(key)) == 1


def test_the_reward_function() -> None:
    [program] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/rewards.md").read_text("utf-8"), re.DOTALL)
    found: dict[str, Any] = {}
    exec(program, found)
    assert found["exact"]({"answer": "4"}, [], [{"id": "a", "content": "5"}, {"id": "b", "content": " 4 "}]) is True
    assert found["exact"]({"answer": "4"}, [], [{"id": "a", "content": "5"}]) is False


async def test_a_program_that_speaks_three_protocols(make_service: Any) -> None:
    service = await make_service(LINES)
    key = await service.start()
    done = await asyncio.to_thread(run, "docs/quickstart.md", service.url, key)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["It", "is", "183It", "is", "183"]
    recorded = await service.recorded(key)
    assert [one.id.partition("-")[0].partition("_")[0] for one in recorded] == ["chatcmpl", "resp", "resp", "msg"]
