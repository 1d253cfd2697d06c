"""Other agents of the command line, each with a tool call, in every protocol that it speaks.

codex is always tried; OpenClaw, opencode and qwen-code where they can be installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients import command_lines
from tests.clients.command_lines import CommandLine
from tests.clients.installs import CODEX as CODEX_CLI
from tests.clients.installs import NODE_24, NodeAgent
from tests.clients.installs import OPENCLAW as OPENCLAW_CLI
from tests.clients.installs import OPENCODE as OPENCODE_CLI
from tests.clients.installs import QWEN_CODE as QWEN_CODE_CLI
from tests.clients.live_run import Record, Run, agent_home
from tests.clients.page import A_TITLE, Case, Page
from tests.clients.plays import CODEX, OPENCLAW, OPENCODE, OPENCODE_TITLE, QWEN_CODE, Play
from tests.clients.rows import check_tokens
from tests.clients.tap import Exchange, Tap

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]
Installed = Callable[[NodeAgent], Path]


@dataclass(frozen=True)
class Agent:
    """One agent in one protocol. line(installed, prompt, url, key, home): how it is run."""

    name: str
    cli: NodeAgent
    dialect: str
    play: Play
    line: Callable[[Installed, str, str, str, Path], CommandLine]

    @property
    def case(self) -> Case:
        [version] = self.cli.packages.values()
        return Case(self.name, version, self.dialect, "a tool call")


def codex() -> Agent:
    return Agent(
        "codex",
        CODEX_CLI,
        "responses",
        CODEX,
        lambda installed, *rest: command_lines.codex(installed(CODEX_CLI), *rest),
    )


def opencode(dialect: str) -> Agent:
    return Agent(
        "opencode",
        OPENCODE_CLI,
        dialect,
        OPENCODE,
        lambda installed, *rest: command_lines.opencode(installed(OPENCODE_CLI), dialect, *rest),
    )


def openclaw(dialect: str) -> Agent:
    return Agent(
        "OpenClaw",
        OPENCLAW_CLI,
        dialect,
        OPENCLAW,
        lambda installed, *rest: command_lines.openclaw(installed(OPENCLAW_CLI), installed(NODE_24), dialect, *rest),
    )


def qwen_code() -> Agent:
    return Agent(
        "qwen-code",
        QWEN_CODE_CLI,
        "chat",
        QWEN_CODE,
        lambda installed, *rest: command_lines.qwen_code(installed(QWEN_CODE_CLI), installed(NODE_24), *rest),
    )


APPENDING = [codex(), qwen_code(), openclaw("responses")]
TITLED = [opencode("chat"), opencode("messages")]
MOVING = [openclaw("chat"), openclaw("messages")]
CASES = [agent.case for agent in (*APPENDING, *TITLED, *MOVING)]


def run_one(run: Run, installed: Installed, agent: Agent) -> tuple[Record, list[Exchange]]:
    """Do the task; what was recorded and what was sent."""
    session = run.start(str(agent.case))
    with Tap(run.url) as tap, agent_home() as home:
        line = agent.line(installed, f"{agent.play.word}: do it", tap.url, session.key, home)
        done = line.run(home)
    assert done.code == 0, done.explain()
    assert agent.play.answers[-1].strip() in done.stdout, done.explain()
    assert {call.status for call in tap.model_calls} == {200}
    return session.end(), tap.model_calls


@pytest.mark.parametrize("agent", APPENDING, ids=lambda one: f"{one.name}-{one.dialect}")
def test_an_agent_that_only_appends_is_one_row(
    scripted_run: Run, installed: Installed, page: Page, script: Any, agent: Agent
) -> None:
    record, calls = run_one(scripted_run, installed, agent)
    sampled = agent.play.sampled(script.vocabulary)
    check_tokens(record, sampled)
    assert [one["output_ids"] for one in record.interactions] == sampled
    assert len(record.rows) == 1
    assert record.summary["merge_rate"] == 1.0
    page.saw(agent.case, record, calls)


@pytest.mark.parametrize("agent", TITLED, ids=lambda one: f"{one.name}-{one.dialect}")
def test_an_agent_whose_title_is_written_by_a_helper_is_one_trained_row(
    scripted_run: Run, installed: Installed, page: Page, script: Any, agent: Agent
) -> None:
    record, calls = run_one(scripted_run, installed, agent)
    sampled = agent.play.sampled(script.vocabulary)
    check_tokens(record, [*sampled, *OPENCODE_TITLE.sampled(script.vocabulary)])
    trained = [one["output_ids"] for one in record.interactions if any(one["loss_mask"])]
    assert trained == sampled
    assert [one["model"] for one in record.interactions if "side_request" in one["tags"]] == ["policy-small"]
    assert len(record.rows) == 1
    assert record.summary["merge_rate"] == 1.0
    page.saw(agent.case, record, calls, why=A_TITLE)


@pytest.mark.parametrize("agent", MOVING, ids=lambda one: f"{one.name}-{one.dialect}")
def test_an_agent_that_moves_its_context_is_a_branch_a_turn(
    scripted_run: Run, installed: Installed, page: Page, script: Any, agent: Agent
) -> None:
    record, calls = run_one(scripted_run, installed, agent)
    sampled = agent.play.sampled(script.vocabulary)
    check_tokens(record, sampled)
    assert [one["output_ids"] for one in record.interactions] == sampled
    assert record.summary["branches"] == {"context_moved": len(sampled) - 1}
    assert len(record.rows) == len(sampled)
    page.saw(agent.case, record, calls)
