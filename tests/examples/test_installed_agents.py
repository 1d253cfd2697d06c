"""The examples' agents as their users install them: Claude Code, LangChain and OpenClaw themselves, over HTTP and inside the service."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clients.installs import CLAUDE_CODE, NODE_24, OPENCLAW, PYTHON_AGENTS
from tests.examples import test_claude_code as claude
from tests.examples import test_openclaw_files as openclaw
from tests.examples.service import calls, run

pytestmark = pytest.mark.heavy
Installed = Callable[[Any], Path]
LANGCHAIN, TASKS = "langchain/config.yaml", "examples/langchain/tasks.jsonl"
SCRIPT: list[dict[str, Any]] = [
    {"when": "12 . 15", "pieces": [calls("calculate", a=12, operation="*", b=15), "<|im_end|>"]},
    {"when": "12 . 15", "pieces": ["Then 3 more.", calls("calculate", a=180, operation="+", b=3), "<|im_end|>"]},
    {"when": "12 . 15", "pieces": ["It is 183.", "<|im_end|>"]},
    {"pieces": [calls("calculate", a=1, operation="plus", b=1), "<|im_end|>"]},  # never comes to an answer
]


@pytest.fixture(scope="module")
def langchain(installed: Installed) -> dict[str, str]:
    """The environment in which it is installed beside areal."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = installed(PYTHON_AGENTS) / "lib" / version / "site-packages"
    return {"PYTHONPATH": os.fspath(packages), "LANGSMITH_TRACING": "false"}


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_langgraph_over_http_in_each_protocol(tmp_path: Path, langchain: dict[str, str], api: str) -> None:
    overrides = ("rollout.agent.mode=online", "train_dataset.path=null", "gconfig.n_samples=2")
    with run(tmp_path, LANGCHAIN, *overrides, script=SCRIPT) as service:
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


def test_langgraph_is_trained_inside_the_service(tmp_path: Path, langchain: dict[str, str]) -> None:
    overrides = ("actor.path=tiny-qwen3", "total_train_steps=1", "gconfig.max_new_tokens=16")
    with run(tmp_path, LANGCHAIN, *overrides, **langchain) as service:
        assert "[train] step=0 updated=16 loss=" in service.wait()
        trained = [one for one, _ in service.sessions() if one.fate.startswith("trained")]
        assert len(trained) == 16


def test_claude_code(tmp_path: Path, installed: Installed) -> None:
    programs = installed(CLAUDE_CODE) / "node_modules" / ".bin"
    overrides = ("gconfig.n_samples=2", "train_dataset.shuffle=false", "rollout.max_concurrent_rollouts=2")
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    with run(tmp_path, claude.CONFIG, *overrides, script=claude.SCRIPT, PATH=path) as service:
        for task in ("mean", "greet"):  # they run side by side
            claude.wait_for(service, task, 2)
        claude.check(service, "mean", reward=1.0, turns=2, tries=2)
        claude.check(service, "greet", reward=0.0, turns=1, tries=2)


def test_openclaw_with_the_file_of_this_repository(tmp_path: Path, installed: Installed) -> None:
    program = installed(OPENCLAW) / "node_modules" / ".bin" / "openclaw"
    node = installed(NODE_24) / "node_modules" / ".bin"
    work, home, config = tmp_path / "work", tmp_path / "home", tmp_path / "openclaw.json"
    work.mkdir()
    home.mkdir()
    script = [{"pieces": ["Hello", " there.", "<|im_end|>"]}]
    with run(tmp_path, "openclaw/config.yaml", openclaw.TOKEN, script=script) as service:
        text = (openclaw.FOLDER / "openclaw.json").read_text()
        config.write_text(text.replace("http://127.0.0.1:8090", service.url))
        command = [os.fspath(program), "agent", "exec", "say hello", "--config", os.fspath(config)]
        done = subprocess.run(
            [*command, "--cwd", os.fspath(work), "--local-model-lean", "--json"],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env={"PATH": f"{node}{os.pathsep}/usr/bin:/bin", "HOME": os.fspath(home), "TERM": "dumb"},
            timeout=480,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        assert "Hello there." in done.stdout
        [(summary, recorded)] = service.sessions()
        assert len(recorded) == 1
        assert summary.session.task_id.startswith("conversation-")


def test_openclaw_as_a_run_starts_it_ends_with_max_turns(tmp_path: Path, installed: Installed) -> None:
    """It would call the tool for ever; the refused call ends it at once, and the task's check rewards what there is."""
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "List the files.", "check": ["true"]}\n')
    overrides = (
        "agent.framework=openclaw",
        f"train_dataset.path={tmp_path / 'tasks.jsonl'}",
        "train_dataset.batch_size=1",
    )
    bounds = ("rollout.agent.max_turns=3", "rollout.native.max_context=32768", "rollout.max_concurrent_rollouts=1")
    programs = [os.fspath(installed(agents) / "node_modules" / ".bin") for agents in (OPENCLAW, NODE_24)]
    path = os.pathsep.join([*programs, os.environ["PATH"]])
    script = [{"pieces": [calls("exec", command="ls"), "<|im_end|>"]}]
    with run(tmp_path, "openclaw/config.yaml", *overrides, *bounds, script=script, PATH=path) as service:
        claude.wait_for(service, "tasks-1", 1)
        claude.check(service, "tasks-1", reward=1.0, turns=3, tries=1)
