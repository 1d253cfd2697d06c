"""Task files and the agents the service runs itself: order, ids, and bad input as sentences."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import time
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from areal.base.errors import BadRequest, ConfigError
from areal.base.types import Limits
from areal.config.load import resolve
from areal.proxy.sessions import SessionPolicy, Sessions
from areal.rollout.agent_choice import PooledAgent
from areal.rollout.agent_runs import AgentRuns, RunRequest
from areal.rollout.agents import load_agent, rewards_of
from areal.rollout.datasets import Task, comes_from, endless
from areal.rollout.frameworks.langchain import LangChain
from areal.rollout.programs import ProgramAgent
from areal.rollout.task_files import read_tasks
from areal.store.base import Given
from areal.store.sql.store import SqlStore
from areal.store.sqlite import SqliteEngine
from areal.web.auth import SessionKeys
from tests.rollout.conftest import interaction


def write(tmp_path, text: str) -> str:
    path = tmp_path / "tasks.jsonl"
    path.write_text(text)
    return str(path)


def test_tasks_keep_their_own_id_or_get_their_line_number(tmp_path) -> None:
    tasks = read_tasks(write(tmp_path, '{"task_id": "a", "x": 1}\n\n{"x": 2}\n'))
    assert [(task.id, task.data["x"]) for task in tasks] == [("a", 1), ("tasks-3", 2)]


@pytest.mark.parametrize(
    ("text", "says"), [("[1]\n", ":1 is not a JSON object"), ("{\n", ":1 is not"), ("", "holds no task")]
)
def test_a_bad_task_file_is_named_with_its_line(tmp_path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_tasks(write(tmp_path, text))


def test_a_missing_task_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl does not exist"):
        read_tasks("nowhere.jsonl")


@pytest.mark.parametrize("stopped", [2, 3, 4])
def test_T080_a_resume_at_or_around_the_end_of_an_epoch_goes_on_with_the_rest(stopped: int) -> None:
    """6 tasks, 2 per step, 2 epochs: stopped after so many steps (3 = exactly at the end of the first) and taken up again."""
    tasks, batch, steps = [Task(f"task-{n}", {}) for n in range(6)], 2, 6
    before = list(islice(endless(tasks, seed=1, shuffle=True), stopped * batch))
    after = list(islice(endless(tasks, seed=1, shuffle=True, given=given(before)), (steps - stopped) * batch))
    taken = Counter(task.id.partition("@")[0] for task in before + after)
    assert taken == {task.id: 2 for task in tasks}
    assert before + after == list(islice(endless(tasks, seed=1, shuffle=True), steps * batch))


def given(before: list[Task]) -> dict[str, Given]:
    """What the store says of tasks that were given out and are done with."""
    return {task_id: Given(number) for task_id, number in Counter(task.id for task in before).items()}


def test_what_was_interrupted_comes_first_with_what_it_lacks_and_nothing_comes_twice() -> None:
    """Also where what was given out is no beginning of the order: a group was dropped and another taken, or the file has grown."""
    tasks = [Task(f"t{n}", {}) for n in range(4)]
    left = {"t0": Given(1), "t2": Given(1, missing=3), "t1@1": Given(1, missing=1), "t9": Given(1, missing=2)}
    found = [(task.id, task.samples) for task in islice(endless(tasks, seed=1, shuffle=False, given=left), 8)]
    assert found == [
        ("t1", None), ("t2", 3), ("t3", None), ("t0@1", None), ("t1@1", 1), ("t2@1", None), ("t3@1", None), ("t0@2", None),
    ]  # fmt: skip
    twice = [Task("a", {"x": 1}), Task("a", {"x": 2}), Task("b", {})]
    once = islice(endless(twice, seed=1, shuffle=False, given={"a": Given(1)}), 2)
    assert [(task.id, task.data) for task in once] == [("a", {"x": 2}), ("b", {})]
    comes = comes_from(tasks)
    assert [comes(task_id) for task_id in ("t0", "t1@17", "t9", "t9@1", "t1@1@2")] == [True, True, False, False, False]


def test_epochs_hold_every_task_once_in_an_order_of_their_own_that_repeats(tmp_path) -> None:
    tasks = read_tasks(write(tmp_path, "".join(f'{{"task_id": "t{n}"}}\n' for n in range(20))))
    first, again = (list(islice(endless(tasks, seed=3, shuffle=True), 60)) for _ in range(2))
    assert [task.id for task in first] == [task.id for task in again]
    epochs = [[task.id.split("@")[0] for task in first[start : start + 20]] for start in (0, 20, 40)]
    assert all(sorted(epoch) == sorted(task.id for task in tasks) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert len({task.id for task in first}) == 60
    for skip in (7, 20, 53):
        resumed = islice(endless(tasks, seed=3, shuffle=True, given=given(first[:skip])), 60 - skip)
        assert [task.id for task in resumed] == [task.id for task in first[skip:]]
    straight = [task.id for task in islice(endless(tasks, seed=3, shuffle=False), 20)]
    assert straight == [task.id for task in tasks]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("json", "write it as module:attribute"),
        ("no_such_module:A", "cannot import"),
        ("json:nothing", "has no nothing"),
        ("json:dumps", "has no `async run"),
        ("tests.rollout.plain_agent:PlainAgent", "run of .* is a plain function, .* set rollout.agent.mode=subproc"),
    ],
)
def test_an_agent_path_that_leads_nowhere_says_which_half_is_wrong(path: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_agent(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "class A:\n    def __init__(self, model): ...\n",
            "TypeError: A.__init__() missing 1 required positional argument: 'model'; ",
        ),
        (
            "class A:\n    def __init__(self):\n        self.table = {}['x']\n",
            "KeyError: 'x' (torn_agent.py, line 3); correct it",
        ),
        (
            "import json\njson.loads('')\n",
            "(char 0) (torn_agent.py, line 2); correct it",
        ),
        ("class A(\n", "SyntaxError: '(' was never closed (torn_agent.py, line 1); correct it there"),
    ],
)
def test_an_agent_whose_module_or_class_raises_is_a_sentence_with_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    (tmp_path / "torn_agent.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torn_agent", raising=False)
    with pytest.raises(ConfigError) as refused:
        load_agent("torn_agent:A")
    assert str(refused.value).startswith("rollout.agent.path=torn_agent:A cannot be loaded: ")
    assert says in str(refused.value)


def test_an_agent_class_is_made_and_an_object_is_taken_as_it_is(tmp_path, monkeypatch) -> None:
    (tmp_path / "some_agent.py").write_text(
        "class A:\n    async def run(self, task, *, base_url, api_key): ...\nmade = A()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = load_agent("some_agent:made")
    assert type(load_agent("some_agent:A")) is type(made)


class OneAgent:
    async def run(self, task, *, base_url, api_key) -> float: ...


class OtherAgent(OneAgent): ...


COMMAND = ["rollout.agent.mode=online", "train_dataset.path=t.jsonl", "rollout.agent.command=sh"]


@pytest.mark.parametrize(
    ("overrides", "purposes"),
    [
        (["rollout.agent.mode=inline"], {"train": OneAgent}),
        (["rollout.agent.mode=inline", "evaluator.path=t.jsonl"], {"train": OneAgent, "eval": OneAgent}),
        (["rollout.agent.mode=online", "evaluator.path=t.jsonl"], {"eval": OneAgent}),
        (
            ["rollout.agent.mode=online", "evaluator.path=t.jsonl", f"evaluator.agent={__name__}:OtherAgent"],
            {"eval": OtherAgent},
        ),
        (["rollout.agent.mode=online"], {}),
        (["rollout.agent.mode=online", "train_dataset.path=t.jsonl"], {"train": OneAgent}),
        (["rollout.agent.mode=subproc", "evaluator.path=t.jsonl"], {"train": PooledAgent, "eval": PooledAgent}),
        (
            [*COMMAND, "rollout.agent.path=null", "evaluator.path=t.jsonl"],
            {"train": ProgramAgent, "eval": ProgramAgent},
        ),
        ([*COMMAND, "evaluator.path=t.jsonl"], {"train": ProgramAgent, "eval": OneAgent}),
        (
            ["train_dataset.path=t.jsonl", "agent.framework=claude_code", "rollout.agent.path=null"],
            {"train": ProgramAgent},
        ),
        (["train_dataset.path=t.jsonl", "agent.framework=langchain"], {"train": OneAgent}),
        (
            ["train_dataset.path=t.jsonl", "agent.framework=langchain", "rollout.agent.path=json:dumps"],
            {"train": LangChain},
        ),
    ],
)
def test_which_agents_a_worker_runs(overrides: list[str], purposes: dict[str, type]) -> None:
    config = resolve(None, [f"rollout.agent.path={__name__}:OneAgent", *overrides]).config
    runs = AgentRuns(config, sessions=None, base_url="http://x", run_token="t")
    assert {purpose: type(agent).__name__ for purpose, agent in runs._agents.items()} == {
        purpose: kind.__name__ for purpose, kind in purposes.items()
    }


def test_rewards_are_numbers_for_the_last_answer_or_by_id() -> None:
    assert rewards_of(None) == {}
    assert rewards_of(1) == {None: 1.0}
    assert rewards_of({"chatcmpl-1": 0.5}) == {"chatcmpl-1": 0.5}
    for bad in (True, "1.0", float("nan"), float("inf"), {"a": None}, [1.0]):
        with pytest.raises(BadRequest, match="return a number"):
            rewards_of(bad)


class StandsStill(OneAgent):
    cancelled = False

    async def run(self, task, *, base_url, api_key) -> float:
        try:
            await asyncio.Event().wait()
        finally:
            StandsStill.cancelled = True


async def test_an_agent_that_stands_still_is_cancelled_when_its_session_expires(store, monkeypatch) -> None:
    """Its slot is free again in the store by then; while it lived, the dispatcher would count it as running."""
    monkeypatch.setattr("areal.rollout.agent_runs.LOOK_S", 0.01)
    await store.training.set_limits(Limits(max_concurrent=1, max_lag=0, batch_groups=1))
    config = resolve(None, ["rollout.agent.mode=inline", f"rollout.agent.path={__name__}:StandsStill"]).config
    sessions = Sessions(store, SessionKeys(bytes(range(32))), worker="w0", policy=SessionPolicy())
    runs = AgentRuns(config, sessions, base_url="http://x", run_token="t")
    running = asyncio.create_task(runs.run(RunRequest("a", {})))
    async with asyncio.timeout(60):
        while not await store.sessions.expire(time.time() + 60, []):
            assert not running.done()
            await asyncio.sleep(0.01)
        outcome = await running
    assert StandsStill.cancelled
    assert outcome["error"].startswith("TimeoutError: session a expired before the agent came to its end")
    assert outcome["reward"] is None
    assert (await store.sessions.get("a")).ending == "expired"


async def test_an_agent_in_the_workers_loop_that_takes_too_long_is_cancelled_and_has_failed(store) -> None:
    await store.training.set_limits(Limits(max_concurrent=1, max_lag=0, batch_groups=1))
    agent = [f"rollout.agent.path={__name__}:StandsStill", "rollout.agent.process.timeout_seconds=0.05"]
    config = resolve(None, ["rollout.agent.mode=inline", *agent]).config
    sessions = Sessions(store, SessionKeys(bytes(range(32))), worker="w0", policy=SessionPolicy())
    StandsStill.cancelled = False
    async with asyncio.timeout(60):
        outcome = await AgentRuns(config, sessions, base_url="http://x", run_token="t").run(RunRequest("a", {}))
    assert StandsStill.cancelled
    assert outcome["error"].endswith("the agent took longer than rollout.agent.process.timeout_seconds=0.05")
    assert (outcome["reward"], (await store.sessions.get("a")).ending) == (None, "reward_failed")


class Rewards(OneAgent):
    """Rewards its session once the store is locked."""

    began, locked = asyncio.Event(), asyncio.Event()

    async def run(self, task, *, base_url, api_key) -> float:
        Rewards.began.set()
        await Rewards.locked.wait()
        return 1.0


async def test_no_agent_has_failed_where_the_store_cannot_write_for_a_while(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr("areal.rollout.agent_runs.AGAIN_S", 0.02)
    monkeypatch.setattr("areal.rollout.agent_runs.SAY_S", 0.0)
    path = tmp_path / "store.sqlite"
    engine = SqliteEngine(path, busy_timeout_s=0.02, reserve_bytes=2**62)  # more than any disk has
    config = resolve(None, ["rollout.agent.mode=inline", f"rollout.agent.path={__name__}:Rewards"]).config
    async with asyncio.timeout(60), SqlStore(engine, time.time) as store:
        await store.training.set_limits(Limits(max_concurrent=1, max_lag=0, batch_groups=1))
        sessions = Sessions(store, SessionKeys(bytes(range(32))), worker="w0", policy=SessionPolicy())
        runs = AgentRuns(config, sessions, base_url="http://x", run_token="t")
        running = asyncio.create_task(runs.run(RunRequest("a", {})))
        await until_said(caplog, "agents wait for the store: the disk of the store")
        engine._reserve_bytes = 0
        await Rewards.began.wait()
        await store.sessions.add(interaction("a"))
        caplog.clear()
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        Rewards.locked.set()
        await until_said(caplog, "agents wait for the store")
        assert not running.done()
        other.execute("ROLLBACK")
        other.close()
        assert await running == {"session_id": "a", "reward": 1.0, "error": ""}
        [group] = await store.training.ready()
        assert [session.ending for session in group.sessions] == ["ended"]


async def until_said(caplog, text: str) -> None:
    while text not in caplog.text:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
