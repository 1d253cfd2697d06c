"""Agents in Python as their users write them, with a tool loop, whole and streamed, against a running service.

Every one of them is append-only: its session is one row, in which every answer stands as it was sampled, whether the answers
were streamed or not. One process of a framework plays all of its tasks; what each left is looked at in a test of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.installs import PYTHON_AGENTS
from tests.clients.live_run import Record, Run, agent_home, run_agent
from tests.clients.page import Case, Page
from tests.clients.plays import LOOP
from tests.clients.rows import check_tokens
from tests.clients.tap import Exchange, Tap

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]
PROGRAMS = Path(__file__).parent / "programs"
AGENTS = {  # program -> its dialects, each with the distribution that speaks it
    "sdk_agent": {"chat": "openai", "responses": "openai", "messages": "anthropic"},
    "langchain_agent": dict.fromkeys(("chat", "responses", "messages"), "langchain"),
    "openai_agents_agent": dict.fromkeys(("responses", "chat"), "openai-agents"),
    "pydantic_ai_agent": dict.fromkeys(("chat", "responses", "messages"), "pydantic-ai-slim"),
}
PARTS = [(program, dialect) for program, dialects in AGENTS.items() for dialect in dialects]


def case_of(program: str, dialect: str) -> Case:
    name = AGENTS[program][dialect]
    return Case(name, PYTHON_AGENTS.packages[name], dialect, "tool loop")


CASES = [case_of(program, dialect) for program, dialect in PARTS]


@dataclass(frozen=True)
class Played:
    """One task: what the program printed, what it sent, what was recorded."""

    said: dict[str, Any]
    calls: list[Exchange]
    record: Record


@pytest.fixture(scope="module")
def played(scripted_run: Run, installed: Callable[..., Path]) -> Callable[[str], dict[tuple[str, bool], Played]]:
    """played(program): its tasks by dialect and stream; the program runs at the first call."""
    done: dict[str, dict[tuple[str, bool], Played]] = {}

    def play(program: str) -> dict[tuple[str, bool], Played]:
        if program not in done:
            done[program] = play_all(scripted_run, installed(PYTHON_AGENTS) / "bin" / "python", program)
        return done[program]

    return play


def play_all(run: Run, python: Path, program: str) -> dict[tuple[str, bool], Played]:
    tasks = [(dialect, stream) for dialect in AGENTS[program] for stream in (False, True)]
    with ExitStack() as stack:
        home = stack.enter_context(agent_home())
        taps = [stack.enter_context(Tap(run.url)) for _ in tasks]
        sessions = [run.start(f"{program} {dialect} {stream}") for dialect, stream in tasks]
        lines = [
            {"dialect": dialect, "stream": stream, "base_url": tap.url, "api_key": session.key}
            for (dialect, stream), tap, session in zip(tasks, taps, sessions, strict=True)
        ]
        asked = "".join(json.dumps({**line, "prompt": f"{LOOP.word}: look, then answer."}) + "\n" for line in lines)
        done = run_agent([python, PROGRAMS / f"{program}.py"], home=home, stdin=asked)
        assert done.code == 0, done.explain()
        assert not done.lingering
        said = [json.loads(line) for line in done.stdout.splitlines()]
        records = [session.end() for session in sessions]
    return {
        task: Played(*parts)
        for task, *parts in zip(tasks, said, (tap.model_calls for tap in taps), records, strict=True)
    }


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("program", "dialect"), PARTS)
def test_a_tool_loop_is_one_row(played: Any, page: Page, script: Any, program: str, dialect: str, stream: bool) -> None:
    task = played(program)[dialect, stream]
    assert task.said["final"] == LOOP.answers[-1]
    assert sorted(task.said["results"]) == ["ran  pwd", "ran ls -la", "ran ls -la"]
    assert [call.status for call in task.calls] == [200, 200, 200]
    assert all(call.streamed for call in task.calls) == stream
    assert (task.said["chunks"] > 10) == stream

    sampled = LOOP.sampled(script.vocabulary)
    check_tokens(task.record, sampled)
    assert [one["output_ids"] for one in task.record.interactions] == sampled
    assert len(task.record.rows) == 1
    assert task.record.summary["merge_rate"] == 1.0
    assert all(all(one["loss_mask"]) for one in task.record.interactions)
    if stream:
        page.saw(case_of(program, dialect), task.record, task.calls)
