"""Claude Code, both versions that its users have, headless: an answer, a shell call, parallel calls, a broken call, a cut
answer, a sub-agent, a compaction.

Its parallel results come back in the order in which they finished, `cache_control` wanders, message content changes between
text and list: none of that is a branch, nor is the "resume directly" after an answer that ran into its limit. A sub-agent is one, in
the same session, and so is what goes on from a summary."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clients import command_lines
from tests.clients.installs import CLAUDE_CODE, CLAUDE_CODE_197, NodeAgent
from tests.clients.live_run import Record, Run, agent_home
from tests.clients.page import A_TITLE, Case, Page
from tests.clients.plays import (
    CLAUDE_AGENT,
    CLAUDE_AGENT_197,
    CLAUDE_AGENT_CHILD,
    CLAUDE_BASH,
    CLAUDE_BROKEN,
    CLAUDE_COMPACTED,
    CLAUDE_CUT,
    CLAUDE_PARALLEL,
    CLAUDE_PLAIN,
    CLAUDE_SUMMARY,
    CLAUDE_TITLE,
    CLAUDE_TITLED,
    Play,
)
from tests.clients.rows import check_tokens
from tests.clients.tap import Exchange, Tap

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]
TASKS = {
    "one answer": CLAUDE_PLAIN,
    "a Bash call": CLAUDE_BASH,
    "parallel Bash calls": CLAUDE_PARALLEL,
    "a call that was cut off": CLAUDE_BROKEN,
    "an answer that ran into its limit": CLAUDE_CUT,
}
VERSIONS = {agents.packages["@anthropic-ai/claude-code"]: agents for agents in (CLAUDE_CODE_197, CLAUDE_CODE)}
BOTH = pytest.mark.parametrize("version", VERSIONS)


def case_of(version: str, task: str) -> Case:
    return Case("Claude Code", version, "messages", task)


TITLED = case_of(CLAUDE_CODE_197.packages["@anthropic-ai/claude-code"], "a Bash call, with a title")
COMPACTED = case_of(CLAUDE_CODE.packages["@anthropic-ai/claude-code"], "`--bare`, a compaction")
TASK_NAMES = [*(f"`--bare`, {one}" for one in TASKS), "a sub-agent"]
CASES = [TITLED, COMPACTED, *(case_of(version, task) for version in VERSIONS for task in TASK_NAMES)]


def run_claude(run: Run, folder: Path, prompt: str, *more: str, **env: str) -> tuple[str, Record, list[Exchange]]:
    """One task: its answer, what was recorded, what was sent."""
    session = run.start(f"claude {prompt[:40]}")
    with Tap(run.url) as tap, agent_home() as home:
        done = command_lines.claude_code(folder, prompt, tap.url, session.key, *more, **env).run(home)
    assert done.code == 0, done.explain()
    assert not done.lingering
    assert {call.status for call in tap.model_calls} == {200}
    last = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")][-1]
    return last["result"].strip(), session.end(), tap.model_calls


@BOTH
@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_one_row(
    scripted_run: Run, installed: Callable[[NodeAgent], Path], page: Page, script: Any, version: str, task: str
) -> None:
    play: Play = TASKS[task]
    prompt = f"{play.word}: do it"
    answer, record, calls = run_claude(scripted_run, installed(VERSIONS[version]), prompt, "--bare")
    assert answer == play.answers[-1].strip()
    sampled = play.sampled(script.vocabulary)
    check_tokens(record, sampled)
    assert [one["output_ids"] for one in record.interactions] == sampled
    assert len(record.rows) == 1
    assert record.summary["branches"] == {}
    assert record.summary["merge_rate"] == (1.0 if len(sampled) > 1 else None)
    page.saw(case_of(version, f"`--bare`, {task}"), record, calls)


@BOTH
def test_a_sub_agent_is_a_branch_of_its_own(
    scripted_run: Run, installed: Callable[[NodeAgent], Path], page: Page, script: Any, version: str
) -> None:
    play = CLAUDE_AGENT_197 if VERSIONS[version] is CLAUDE_CODE_197 else CLAUDE_AGENT
    answer, record, calls = run_claude(scripted_run, installed(VERSIONS[version]), f"{play.word}: do it")
    assert answer == play.answers[-1].strip()
    sampled = [*play.sampled(script.vocabulary), *CLAUDE_AGENT_CHILD.sampled(script.vocabulary)]
    check_tokens(record, sampled)
    assert sorted(one["output_ids"] for one in record.interactions) == sorted(sampled)
    assert len(record.rows) == 2
    assert record.summary["branches"] == {"sub_agent": 1}
    assert record.summary["merge_rate"] == 1.0
    of_rows = [[span["interaction_id"] for span in row["spans"]] for row in record.rows]
    assert sorted(map(len, of_rows)) == sorted([len(play.answers), len(CLAUDE_AGENT_CHILD.answers)])
    page.saw(case_of(version, "a sub-agent"), record, calls)


def test_a_title_that_it_has_written_is_masked(
    scripted_run: Run, installed: Callable[[NodeAgent], Path], page: Page, script: Any
) -> None:
    """2.1.197 asks for a title beside its first turn, under the same model name, unless it may make no traffic but the agent's."""
    prompt, loud = f"{CLAUDE_TITLED.word}: do it", {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": ""}
    answer, record, calls = run_claude(scripted_run, installed(CLAUDE_CODE_197), prompt, **loud)
    assert answer == CLAUDE_TITLED.answers[-1].strip()
    sampled = CLAUDE_TITLED.sampled(script.vocabulary)
    check_tokens(record, [*sampled, *CLAUDE_TITLE.sampled(script.vocabulary)])
    assert [one["output_ids"] for one in record.interactions if any(one["loss_mask"])] == sampled
    assert sum("side_request" in one["tags"] for one in record.interactions) == 1
    assert len(record.rows) == 1
    assert record.summary["merge_rate"] == 1.0
    page.saw(TITLED, record, calls, why=A_TITLE)


def test_after_a_compaction_its_summary_begins_a_branch(
    scripted_run: Run, installed: Callable[[NodeAgent], Path], page: Page, script: Any
) -> None:
    """Told of a small context it asks for a summary (its last answer left out, its result not), and goes on from that alone: every
    answer is in a row, with the context it was sampled in."""
    small = {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": "16000", "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "1024"}
    prompt = f"{CLAUDE_COMPACTED.word}: do it"
    answer, record, calls = run_claude(scripted_run, installed(CLAUDE_CODE), prompt, "--bare", **small)
    assert answer == CLAUDE_COMPACTED.answers[-1].strip()
    first, second, last = CLAUDE_COMPACTED.sampled(script.vocabulary)
    [summary] = CLAUDE_SUMMARY.sampled(script.vocabulary)
    check_tokens(record, [first, second, summary, last])
    assert [one["output_ids"] for one in record.interactions] == [first, second, summary, last]
    assert record.summary["branches"] == {"turns_dropped": 1, "compacted": 1}
    assert [len(row["spans"]) for row in record.rows] == [2, 1, 1]
    page.saw(COMPACTED, record, calls)
