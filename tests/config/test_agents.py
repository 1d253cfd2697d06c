"""Agents that a run starts itself: which configurations give out tasks, and each contradiction as a sentence before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from areal.base.errors import ConfigError
from areal.config.commands import PLACEHOLDERS, fill, split_command
from areal.config.frameworks import NEEDS
from areal.config.load import resolve
from areal.config.own_agents import runs_agents
from areal.config.rollout import Framework
from areal.config.startable import why_not
from areal.config.task_source import task_source

ONLINE, PATH = "rollout.agent.mode=online", "rollout.agent.path=m:A"
ACTOR = "actor.path=smollm2-135m"
PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text("utf-8")


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "Hi"}\n')
    return "train_dataset.path=tasks.jsonl"


@pytest.mark.parametrize(
    ("overrides", "runs"),
    [
        ([PATH], True),
        (["rollout.agent.mode=subproc", PATH], True),
        ([ONLINE, PATH], True),
        ([ONLINE, "rollout.agent.command=python agent.py {prompt}"], True),
        ([ONLINE, "rollout.agent.command=[sh, -c, 'true && true']", "rollout.agent.process.timeout_seconds=9"], True),
        (["agent.framework=langchain", "rollout.agent.command=sh -c true"], True),
    ],
)
def test_a_run_that_gives_out_tasks(tasks: str, overrides: list[str], runs: bool) -> None:
    config = resolve(None, [ACTOR, tasks, *overrides]).config
    assert runs_agents(config) is runs
    assert why_not(config) == []


LATE = "rollout.agent.process.timeout_seconds=9"


@pytest.mark.parametrize("agent", [["agent.framework=langchain"], [PATH]])
def test_agents_in_the_workers_loop_have_the_time_out_alone(tasks: str, agent: list[str]) -> None:
    config = resolve(None, [ACTOR, tasks, *agent, LATE]).config
    assert not [line for line in why_not(config) if "rollout.agent.process" in line]


def test_without_tasks_an_online_run_waits_for_agents() -> None:
    for overrides in ([ONLINE], ["agent.framework=claude_code"], ["agent.framework=openclaw"]):
        config = resolve(None, [ACTOR, *overrides]).config
        assert not runs_agents(config)
        assert why_not(config) == []


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([PATH, "train_dataset.path=null"], "mode is inline but there is no agent or no tasks"),
        (["rollout.agent.mode=subproc"], "mode is subproc but there is no agent or no tasks"),
        ([PATH, "rollout.agent.command=python"], "command=python: rollout.agent.mode=inline runs rollout.agent.path"),
        ([PATH, "agent.framework=openclaw", "rollout.agent.mode=subproc"], "mode=subproc runs rollout.agent.path"),
        ([ONLINE], "train_dataset.path=tasks.jsonl: agents that come over HTTP bring their own tasks"),
        ([ONLINE, "rollout.agent.command=sh", "train_dataset.path=null"], "command has no tasks"),
        ([ONLINE, "rollout.agent.command=sh", PATH], "are two agents"),
        ([ONLINE, "rollout.agent.command=no-such-program"], "there is no program no-such-program on PATH"),
        ([ONLINE, "rollout.agent.command=sh -c true | cat"], "| is a shell's, and none runs here"),
        ([ONLINE, "rollout.agent.command=sh {promt}"], "{promt} is no placeholder; known are {task}, {prompt}"),
        ([ONLINE, "rollout.agent.command='sh \"'"], "cannot be split into words"),
        ([ONLINE, "train_dataset.path=null", LATE], "process.timeout_seconds: no agent runs in a process of its own"),
        ([PATH, "rollout.agent.process.max_running=3"], "no agent runs in a process of its own"),
        (["agent.framework=langchain", "rollout.agent.process.memory_mb=512"], "process.memory_mb: no agent runs in a"),
        ([PATH, "train_dataset.path=no.jsonl"], "train_dataset.path=no.jsonl is no file"),
        ([PATH, "evaluator.path=no.parquet"], "evaluator.path=no.parquet is no file"),
        ([PATH, "train_dataset.path=reasoning-gym:"], "write it as reasoning-gym:NAME"),
        ([PATH, "evaluator.agent=m:B"], "evaluator.agent=m:B: there are no tasks for it"),
        ([ONLINE, "train_dataset.path=null", "saver.freq_epochs=1"], "without train_dataset.path there are no epochs"),
        (["agent.framework=claude_code", PATH], "claude_code is a program of its own; take one of them out"),
    ],
)
def test_what_does_not_go_together_is_a_sentence(tasks: str, overrides: list[str], says: str) -> None:
    found = why_not(resolve(None, [ACTOR, tasks, *overrides]).config)
    assert [line for line in found if says in line], found


@pytest.mark.parametrize("framework", get_args(Framework))
def test_a_framework_that_is_not_installed_is_one_sentence_with_the_install_line(
    tasks: str, monkeypatch: pytest.MonkeyPatch, framework: Framework
) -> None:
    monkeypatch.setattr("shutil.which", lambda program: None)
    monkeypatch.setattr("areal.config.frameworks.importlib.util.find_spec", lambda name: None)
    waits, starts = [ACTOR, f"agent.framework={framework}"], [ACTOR, f"agent.framework={framework}", tasks]
    assert why_not(resolve(None, waits).config) == [], "an agent that comes over HTTP may be anywhere"
    [sentence] = why_not(resolve(None, starts).config)
    assert sentence.startswith(f"rollout.agent.framework={framework} needs ")
    assert sentence.endswith(NEEDS[framework].install)
    assert NEEDS[framework].install.split(" with ")[0] in PAGE


def test_the_agent_file_may_name_a_command_and_tasks(tasks: str, tmp_path: Path) -> None:
    path = tmp_path / "agent_config.py"
    own = '"model_name": "mine", "api_key": "k-0123456789", "max_turns": 4, "command": ["sh", "-c", "true", "{prompt}"]'
    path.write_text(f'AGENT_CONFIG = {{{own}, "tasks": "tasks.jsonl"}}\n')
    config = resolve(None, [ACTOR, "gconfig.n_samples=4"], agent_config=path).config
    assert (config.rollout.agent.command, config.rollout.agent.model_name) == (["sh", "-c", "true", "{prompt}"], "mine")
    assert config.train_dataset.path == "tasks.jsonl"
    assert why_not(config) == [], "tries of a task are sessions that the run starts, whatever else the token opens"
    path.write_text(f'AGENT_CONFIG = {{{own}, "tasks": ["a text", {{"prompt": "b"}}]}}\n')
    assert resolve(None, [ACTOR], agent_config=path).config.train_dataset.path == str(path)
    path.write_text('AGENT_CONFIG = {"command": "sh"}\n')
    assert "command has no tasks" in why_not(resolve(None, [ACTOR], agent_config=path).config)[0]


def test_words_are_filled_in_and_never_split_again() -> None:
    words = split_command("agent --say={prompt} '{task.deep}' {{prompt}} {\"a\":1}")
    values = dict.fromkeys(PLACEHOLDERS, "?") | {"prompt": "two words; $(rm) {api_key}", "task_id": "t-7"}
    filled = fill(words, values, {"deep": '{"x": 1}'})
    assert filled == ["agent", "--say=two words; $(rm) {api_key}", '{"x": 1}', "{prompt}", "{a:1}"]
    with pytest.raises(ConfigError, match="task t-7 has no field 'deep'"):
        fill(words, values, {})
    assert all(f"`{{{name}}}`" in PAGE for name in PLACEHOLDERS)


def test_where_tasks_come_from_is_read_off_their_name() -> None:
    kinds = {"a.jsonl": "jsonl", "a.txt": "jsonl", "a.Parquet": "parquet", "a.py": "agent_file"}
    assert {path: task_source(path).kind for path in kinds} == kinds
    gym = task_source("reasoning-gym:chain_sum?size=20&seed=3&flag=true&name=x")
    assert (gym.kind, gym.name) == ("reasoning_gym", "chain_sum")
    assert gym.options == {"size": 20, "seed": 3, "flag": True, "name": "x"}
