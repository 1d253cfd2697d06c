"""examples/langchain: the same LangGraph agent in three protocols, over HTTP and inside the service."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.clients.installs import PYTHON_AGENTS, NotInstalled, install
from tests.examples.service import calls, run

pytestmark = pytest.mark.heavy
CONFIG = "langchain/config.yaml"
TASKS = "examples/langchain/tasks.jsonl"
SCRIPT: list[dict[str, Any]] = [
    {"when": "12 . 15", "pieces": [calls("calculate", a=12, operation="*", b=15), "<|im_end|>"]},
    {"when": "12 . 15", "pieces": ["Then 3 more.", calls("calculate", a=180, operation="+", b=3), "<|im_end|>"]},
    {"when": "12 . 15", "pieces": ["It is 183.", "<|im_end|>"]},
    {"pieces": [calls("calculate", a=1, operation="plus", b=1), "<|im_end|>"]},  # never comes to an answer
]


@pytest.fixture(scope="module")
def langchain() -> dict[str, str]:
    """The environment in which it is installed beside areal."""
    try:
        folder = install(PYTHON_AGENTS)
    except NotInstalled as reason:
        pytest.skip(str(reason))
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    return {"PYTHONPATH": os.fspath(packages), "LANGSMITH_TRACING": "false"}


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_the_agent_over_http_in_each_protocol(tmp_path: Path, langchain: dict[str, str], api: str) -> None:
    overrides = ("rollout.agent.mode=online", "train_dataset.path=null", "gconfig.n_samples=2")
    with run(tmp_path, CONFIG, *overrides, script=SCRIPT) as service:
        agent, flags = f"examples.langchain.agent:{api}", ("--samples", "2", "--limit", "2")
        played = service.play(agent, TASKS, *flags, **langchain)
        assert (played.returncode, played.stdout) == (0, "played 2 tasks\n"), played.stderr
        sessions = service.sessions()
        assert Counter((one.session.task_id, one.reward) for one, _ in sessions) == {("183", 1.0): 2, ("46", 0.0): 2}
        prefix = {"chat": "chatcmpl-", "responses": "resp_", "messages": "msg_"}[api]
        for summary, recorded in sessions:
            assert all(one.id.startswith(prefix) for one in recorded)
            assert [one.token_parent for one in recorded] == [None, *(one.id for one in recorded[:-1])]
            assert len(recorded) == (3 if summary.session.task_id == "183" else 5)  # TURNS


def test_the_service_trains_it_inline(tmp_path: Path, langchain: dict[str, str]) -> None:
    overrides = ("actor.path=tiny-qwen3", "total_train_steps=1", "gconfig.max_new_tokens=16")
    with run(tmp_path, CONFIG, *overrides, **langchain) as service:
        assert "[train] step=0 updated=16 loss=" in service.wait()
        trained = [one for one, _ in service.sessions() if one.fate.startswith("trained")]
        assert len(trained) == 16
