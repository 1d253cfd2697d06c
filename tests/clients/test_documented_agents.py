"""The programs of docs/agents.md, as they are printed: an agent object, an agent file, and a LangChain agent where that is installed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal.config.load import resolve
from areal.config.own_agents import runs_agents
from areal.rollout.agents import load_agent
from tests.clients.installs import PYTHON_AGENTS, Agents
from tests.docs.blocks import blocks

OBJECT, FILE, BUILD = (block.text for block in blocks() if (block.page, block.language) == ("docs/agents.md", "python"))


async def test_the_agent_object_asks_and_rewards(tmp_path: Path, monkeypatch: Any, make_service: Any) -> None:
    (tmp_path / "documented_object.py").write_text(OBJECT)
    monkeypatch.chdir(tmp_path)
    agent = load_agent("documented_object:MyAgent")
    service = await make_service([{"pieces": ["It", " is", " 183", "<|im_end|>"]}] * 2)
    for answer, reward in (("183", 1.0), ("184", 0.0)):
        key = await service.start()
        task = {"question": "12 * 15 + 3?", "answer": answer}
        assert await agent.run(task, base_url=f"{service.url}/v1", api_key=key) == reward


def test_the_agent_file_makes_a_run_that_gives_out_tasks(tmp_path: Path) -> None:
    (tmp_path / "agent_config.py").write_text(FILE)
    config = resolve(None, [], agent_config=tmp_path / "agent_config.py").config
    assert runs_agents(config)
    assert config.rollout.agent.command == ["python", "agent.py", "--question", "{prompt}"]


@pytest.mark.heavy
def test_the_langchain_agent_is_built(tmp_path: Path, installed: Callable[[Agents], Path]) -> None:
    program = tmp_path / "documented.py"
    model = 'from langchain_openai import ChatOpenAI\nmodel = ChatOpenAI(model="m", base_url="http://127.0.0.1:1", api_key="k")\n'
    program.write_text(f"{BUILD}\n{model}assert callable(build(model).ainvoke)\n")
    python = installed(PYTHON_AGENTS) / "bin" / "python"
    done = subprocess.run([python, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
