"""Programs as agents: what they are told, how they are rewarded, and every way in which they fail, with real processes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from areal.base.errors import BadRequest, CallFailed
from areal.config.frameworks import NEEDS
from areal.config.load import resolve
from areal.config.rollout import Framework
from areal.proxy.sessions import SessionPolicy, Sessions
from areal.rollout.agent_output import LINES, open_agent_log, speaking
from areal.rollout.agent_runs import AgentRuns, RunRequest
from areal.rollout.frameworks import FRAMEWORKS
from areal.rollout.frameworks.claude_code import ClaudeCode
from areal.rollout.frameworks.openclaw import OpenClaw
from areal.rollout.programs import LONGEST_VARIABLE, ProgramAgent, ProgramSettings
from areal.web.auth import SessionKeys
from tests.rollout.conftest import interaction

URL, KEY = "http://127.0.0.1:1/v1", "sk-sess-w0.secret.mac"
SETTINGS = ProgramSettings.of(
    resolve(
        None, ["rollout.agent.max_turns=3", "rollout.native.max_context=4096", "rollout.agent.model_name=mine"]
    ).config
)
PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text("utf-8")


def python(code: str, *words: str) -> list[str]:
    return [sys.executable, "-c", code, *words]


async def tried(words: list[str], task: dict[str, Any], driver: Any = None, **settings: Any) -> Any:
    agent = ProgramAgent(replace(SETTINGS, **settings), words, driver)
    return await agent.run(task, base_url=URL, api_key=KEY)


async def test_a_program_is_told_everything_and_finds_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAOTOKEN_API_KEY", "hush-hush")
    monkeypatch.setenv("MINE", "too")
    code = """
import json, os, sys
told = {"words": sys.argv[1:], "here": os.getcwd(), "environment": dict(os.environ)}
told["file"] = open(os.environ["AREAL_TASK_FOLDER"] + "/a/b.txt").read()
open(sys.argv[1], "w").write(json.dumps(told))
print("x"); print(json.dumps({"reward": 0.25})); print(); print("last on stderr", file=sys.stderr)
"""
    task = {"task_id": "t-7", "prompt": "Hi; $(rm)", "files": {"a/b.txt": "text"}, "n": 2}
    out = tmp_path / "told.json"
    words = python(code, str(out), "{prompt}", "{task.n} {base_url} {model} {max_turns} {folder}")
    assert await tried(words, task, environment=("MINE",)) == 0.25
    told = json.loads(out.read_text())
    folder = told["environment"]["AREAL_TASK_FOLDER"]
    assert told["words"] == [str(out), "Hi; $(rm)", f"2 {URL} mine 3 {folder}"]
    assert (told["file"], told["here"]) == ("text", os.getcwd())
    assert not Path(folder).exists()
    environment = told["environment"]
    assert json.loads(environment["AREAL_TASK"]) == task
    assert (environment["OPENAI_BASE_URL"], environment["OPENAI_API_KEY"]) == (URL, KEY)
    assert (environment["ANTHROPIC_BASE_URL"], environment["ANTHROPIC_API_KEY"]) == (URL.removesuffix("/v1"), KEY)
    assert environment["MINE"] == "too"
    assert "hush-hush" not in environment.values()
    assert all(
        f"`{name}`" in PAGE
        for name in environment
        if name.startswith(("OPENAI_", "ANTHROPIC_", "AREAL_")) and name != "AREAL_PROCESS"
    )


@pytest.mark.parametrize(
    ("code", "task", "reward"),
    [
        ("pass", {}, None),
        ("print('{\"reward\": 1}')", {}, 1),
        ('print(\'{"rewards": {"chatcmpl-1": 0.5}}\'); raise SystemExit(3)', {}, {"chatcmpl-1": 0.5}),
        ("print('{\"reward\": 1}'); print('not the last line')", {}, None),
        ("print('{\"result\": 1}')", {}, None),
        ("open(__import__('os').environ['AREAL_TASK_FOLDER'] + '/done', 'w')", {"check": ["test", "-e", "done"]}, 1.0),
        ("raise SystemExit(1)", {"check": ["test", "-e", "done"]}, 0.0),
        ("print('{\"reward\": 0.5}')", {"check": ["test", "-e", "done"]}, 0.0),
    ],
)
async def test_the_reward_is_what_the_check_says_else_what_it_prints_last(
    code: str, task: dict[str, Any], reward: object
) -> None:
    assert await tried(python(code), task) == reward


async def test_each_way_to_fail_is_said(tmp_path: Path) -> None:
    for code, settings, says in (
        ("import sys; print('why', file=sys.stderr); sys.exit(3)", {}, r"exited with code 3; it said last: why"),
        ("import time; time.sleep(600)", {"timeout_s": 0.5}, r"longer than rollout.agent.process.timeout_seconds=0.5"),
        ("bytearray(900 * 2**20)", {"memory_mb": 300}, r"exited with code 1; it said last: MemoryError"),
        ("import os; os.kill(os.getpid(), 9)", {}, r"was killed by signal 9"),
    ):
        with pytest.raises(CallFailed, match=says):
            await tried(python(code), {}, **settings)
    with pytest.raises(BadRequest, match=r"print a number"):
        await tried(python('print(\'{"reward": "much"}\')'), {})
    with pytest.raises(BadRequest, match=r"lies outside of its folder"):
        await tried(python("pass"), {"files": {"../../x": ""}})
    assert await tried(python("raise SystemExit(1)"), {}, ClaudeCode()) is None, "a framework's code tells of the model"


async def test_a_task_that_is_too_long_for_a_variable_is_read_from_its_file(tmp_path: Path) -> None:
    code = """
import json, os, sys
given = json.load(open(os.environ["AREAL_TASK_FILE"]))
assert sys.argv[1] == os.environ["AREAL_TASK_FILE"]
print(json.dumps({"rewards": {"length": len(given["prompt"]), "variable": len(os.environ.get("AREAL_TASK", ""))}}))
"""
    for length, variable in ((LONGEST_VARIABLE // 2 - 100, True), (200_000, False)):
        task = {"prompt": "é" * length, "files": {}}
        told = await tried(python(code, "{task_file}"), task)
        assert told["length"] == length
        assert bool(told["variable"]) is variable
    for settings in ({}, {"memory_mb": 2048}):
        with pytest.raises(BadRequest, match=r"400000 bytes is too long .* \$AREAL_TASK_FILE or \{task_file\}"):
            await tried(python("pass", "{prompt}"), task, **settings)


async def test_its_output_stands_in_the_runs_logs_bounded_and_without_keys(tmp_path: Path) -> None:
    log = tmp_path / "agents-w0.log"
    with open_agent_log(log):
        speaking.set("task-1")
        await tried(python(f"print('key {KEY}'); [print('line', n) for n in range({LINES} * 2)]"), {})
    lines = log.read_text().splitlines()
    assert lines[0].endswith("task-1 | key sk-….mac")
    assert len(lines) == LINES
    assert lines[-1].endswith("(what else it prints is left out)")
    assert log.stat().st_mode & 0o077 == 0


def test_every_framework_has_a_driver_and_its_needs() -> None:
    assert set(FRAMEWORKS) == set(NEEDS) == set(get_args(Framework))


async def test_what_a_driver_prepares_lies_in_a_home_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "told.json"
    code = f"""
import json, os
told = {{name: os.environ.get(name) for name in ("HOME", "TMPDIR", "CLAUDE_CODE_MAX_CONTEXT_TOKENS", "OPENCLAW_CONFIG_PATH")}}
told |= {{"here": os.getcwd(), "files": os.listdir(os.environ["HOME"])}}
told["config"] = json.load(open(told["OPENCLAW_CONFIG_PATH"])) if told["OPENCLAW_CONFIG_PATH"] else None
open({str(out)!r}, "w").write(json.dumps(told))
"""
    assert await tried(python(code), {"files": {"x": ""}}, ClaudeCode()) is None
    told = json.loads(out.read_text())
    assert told["HOME"] == told["TMPDIR"] != os.environ["HOME"]
    assert (told["files"], told["CLAUDE_CODE_MAX_CONTEXT_TOKENS"]) == ([], "4096")
    assert Path(told["here"]).name == "work"
    await tried(python(code), {}, OpenClaw())
    provider = json.loads(out.read_text())["config"]["models"]["providers"]["areal"]
    assert (provider["baseUrl"], provider["apiKey"]) == (URL, KEY)
    assert (provider["models"][0]["id"], provider["models"][0]["contextWindow"]) == ("mine", 4096)


@pytest.mark.parametrize(("reward_key", "prefix"), [("session", "sk-sess-"), ("admin", "sk-model-")])
async def test_a_program_without_an_answer_has_failed_and_may_reward_itself_only_where_it_should(
    store: Any, tmp_path: Path, wide: Callable[..., Any], reward_key: str, prefix: str
) -> None:
    (tmp_path / "tasks.jsonl").write_text("{}\n")
    code = f"import os; open({str(tmp_path / 'key')!r}, 'w').write(os.environ['OPENAI_API_KEY']); print('{{\"reward\": 2}}')"
    overrides = [
        "rollout.agent.mode=online",
        f"train_dataset.path={tmp_path / 'tasks.jsonl'}",
        f"rollout.agent.reward_key={reward_key}",
    ]
    config = resolve(None, overrides).config
    agent = config.rollout.agent.model_copy(update={"command": python(code)})
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"agent": agent})})
    await wide()
    sessions = Sessions(store, SessionKeys(bytes(range(32))), worker="w0", policy=SessionPolicy())
    async with AgentRuns(config, sessions, reading=store.reading, base_url="http://x", run_token="t") as runs:
        outcome = await runs.run(RunRequest("a", {}))
        assert outcome["error"].startswith("BadRequest: ")
        assert (tmp_path / "key").read_text().startswith(prefix)
        runs._agents["train"] = ProgramAgent(SETTINGS, python("pass"))
        outcome = await runs.run(RunRequest("b", {}))
        assert "without one answer of the model" in outcome["error"]
        assert (await store.sessions.get("b")).ending == "reward_failed"


@pytest.mark.parametrize(("driver", "answered"), [(OpenClaw(), 3), (ClaudeCode(), 5), (None, 5)])
async def test_a_framework_that_cannot_be_told_max_turns_is_held_to_them(
    make_service: Any, driver: Any, answered: int
) -> None:
    code = """
import json, os, urllib.error, urllib.request
def status():
    body = json.dumps({"messages": [{"role": "user", "content": "hm"}]}).encode()
    url, key = os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"]
    try:
        return urllib.request.urlopen(urllib.request.Request(url, body, {"Authorization": "Bearer " + key})).status
    except urllib.error.HTTPError as error:
        print(error.read().decode())
        return error.code
statuses = [status() for _ in range(5)]
assert set(statuses) <= {200, 403}
print(json.dumps({"reward": statuses.count(200)}))
"""
    service = await make_service()
    config = resolve(None, ["rollout.agent.mode=online", "rollout.agent.reward_key=admin"]).config
    sessions = service.proxy.sessions
    async with AgentRuns(config, sessions, base_url=service.url, run_token="t") as runs:
        runs._agents["train"] = ProgramAgent(SETTINGS, python(code), driver)
        for name in ("a", "b"):
            assert await runs.run(RunRequest(name, {})) == {"session_id": name, "reward": answered, "error": ""}
            assert len(await service.store.sessions.interactions(name)) == answered
    assert not sessions._max_calls, "nothing stays behind"


class SetsItsOwnReward:
    """Through the store, as set_reward does it."""

    def __init__(self, store: Any) -> None:
        self.store = store

    async def run(self, task: dict[str, Any], *, base_url: str, api_key: str) -> None:
        await self.store.sessions.add(interaction(task["session"]))
        await self.store.sessions.reward(task["session"], 0.75, None)


async def test_a_reward_that_an_agent_set_itself_counts_in_an_evaluation(store: Any, wide: Callable[..., Any]) -> None:
    await wide()
    sessions = Sessions(store, SessionKeys(bytes(range(32))), worker="w0", policy=SessionPolicy())
    config = resolve(None, ["rollout.agent.mode=online"]).config
    async with AgentRuns(config, sessions, reading=store.reading, base_url="http://x", run_token="t") as runs:
        runs._agents["eval"] = SetsItsOwnReward(store)
        outcome = await runs.run(RunRequest("e", {"session": "e"}, purpose="eval"))
    assert (outcome["reward"], outcome["error"]) == (0.75, "")


class ReturnsAReward(SetsItsOwnReward):
    async def run(self, task: dict[str, Any], *, base_url: str, api_key: str) -> float:
        await self.store.sessions.add(interaction(task["session"]))
        return 0.75


async def test_what_agents_return_is_left_aside_where_a_source_rewards_and_that_is_said_once(
    store: Any, wide: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    await wide()
    sessions = Sessions(store, SessionKeys(bytes(range(32))), worker="w0", policy=SessionPolicy())
    overrides = ["rollout.agent.mode=online", "rollout.agent.reward_source=function", "rollout.reward.path=m:f"]
    config = resolve(None, overrides).config
    async with AgentRuns(config, sessions, reading=store.reading, base_url="http://x", run_token="t") as runs:
        runs._agents["train"] = ReturnsAReward(store)
        for name in ("a", "b"):
            outcome = await runs.run(RunRequest(name, {"session": name}))
            assert (outcome["reward"], outcome["error"]) == (None, "")
            assert [one.reward for one in await store.sessions.interactions(name)] == [None]
    assert caplog.text.count("what agents return as their reward is left aside") == 1
