"""docs/clients.md has a line for each agent that a test runs, in the version it installs, and no other."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.clients import test_agent_frameworks, test_claude_code, test_command_lines
from tests.clients.live_run import Record
from tests.clients.page import Case, Page
from tests.clients.tap import Exchange

MODULES = (test_agent_frameworks, test_claude_code, test_command_lines)
CASE = Case("an agent", "1.0", "chat", "a task")
CALL = Exchange("POST", "/v1/chat/completions", {}, {"stream": True}, 200, events=5, reads=3)


def record(merge_rate: float | None, *reasons: str) -> Record:
    rows = [{} for _ in ("", *reasons)]
    return Record(
        {"interactions": rows, "trajectories": rows}, {"merge_rate": merge_rate, "branches": Counter(reasons)}
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    page = tmp_path / "clients.md"
    page.write_text(f"# Agents\n\n{Page.HEADER}\n\nBelow.\n")
    return page


def test_every_agent_that_a_test_runs_has_its_line_and_nobody_else() -> None:
    cases = [case for module in MODULES for case in module.CASES]
    assert len({case.head for case in cases}) == len(cases)
    assert sorted(Page(writing=False).lines()) == sorted(case.head for case in cases)


def test_a_line_is_written_once_and_then_compared(path: Path) -> None:
    Page(writing=True, path=path).saw(CASE, record(0.5, "the tools changed", "resampled", "resampled"), [CALL])
    Page(writing=True, path=path).saw(CASE, record(1.0), [CALL])
    other = Case("a better agent", "2.0", "chat", "a task")
    Page(writing=True, path=path).saw(other, record(None), [])
    page = Page(writing=False, path=path)
    assert [line.split(" | ")[4:] for line in page.lines().values()] == [
        ["yes", "no", "1", "1", "–", "one |"],
        ["yes", "yes", "1", "1", "1.00", "one |"],
    ]
    assert path.read_text().endswith("one |\n\nBelow.\n")
    page.saw(CASE, record(1.0), [CALL])
    with pytest.raises(AssertionError, match=r"says otherwise of an agent 1\.0, chat: a task"):
        page.saw(CASE, record(0.9), [CALL])
    with pytest.raises(AssertionError, match="has no line for"):
        page.saw(Case("an agent", "1.1", "chat", "a task"), record(1.0), [CALL])
