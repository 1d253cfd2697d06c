"""docs/clients.md: which agents were seen working, written by the tests that ran them.

    python -m pytest --heavy -m heavy tests/clients --write-clients-page      # writes what it sees into the page

Without that option every test compares what it saw with its line of the page and fails where they differ. A line holds
only what is the same in every run. Lines of agents that were skipped stay as they are.
"""

from __future__ import annotations

import fcntl
import itertools
from dataclasses import dataclass
from pathlib import Path

from tests.clients.live_run import Record
from tests.clients.tap import Exchange

PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"
A_TITLE = "1 × title, written beside the first turn: masked"
COMMAND = "python -m pytest --heavy -m heavy tests/clients --write-clients-page"
_COLUMNS = "| client | version | dialect | task | works | streamed | turns | rows | merge rate | branches and why |"
_RULE = "|---|---|---|---|---|---|---|---|---|---|"


@dataclass(frozen=True)
class Case:
    """One line of the page. task: what the agent was made to do."""

    client: str
    version: str
    dialect: str
    task: str

    def __str__(self) -> str:
        return f"{self.client} {self.version}, {self.dialect}: {self.task}"

    @property
    def head(self) -> str:
        return f"| {self.client} | {self.version} | {self.dialect} | {self.task} |"


class Page:
    """The committed page, checked or rewritten line by line."""

    HEADER = f"{_COLUMNS}\n{_RULE}"

    def __init__(self, *, writing: bool, path: Path = PAGE) -> None:
        self._writing = writing
        self._path = path

    def saw(self, case: Case, record: Record, calls: list[Exchange], *, why: str = "") -> None:
        """An agent has done its task: compare with the page, or write. why: in place of the reasons of branches, where those
        depend on which of two requests came first."""
        line = f"{case.head} {_facts(record, calls, why)} |"
        if self._writing:
            self._write(case, line)
            return
        known = self.lines().get(case.head)
        assert known is not None, f"docs/clients.md has no line for {case}; write it: {COMMAND}"
        assert line == known, f"docs/clients.md says otherwise of {case}; if that is right, write it anew: {COMMAND}"

    def lines(self) -> dict[str, str]:
        """The table, by the head of each line."""
        lines = self._path.read_text("utf-8").splitlines()
        table = [line for line in lines[lines.index(_RULE) + 1 :] if line.startswith("|")]
        return {_head(line): line for line in table}

    def _write(self, case: Case, line: str) -> None:
        with self._path.open("r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            above, _, below = file.read().partition(_RULE + "\n")
            table = list(itertools.takewhile(lambda one: one.startswith("|"), below.splitlines(keepends=True)))
            lines = {_head(one): one for one in table} | {case.head: line + "\n"}
            written = "".join(lines[head] for head in sorted(lines))
            file.seek(0)
            file.truncate()
            file.write(f"{above}{_RULE}\n{written}{below[len(''.join(table)) :]}")


def _head(line: str) -> str:
    return "|".join(line.split("|")[:5]) + "|"


def _facts(record: Record, calls: list[Exchange], said: str) -> str:
    """The measured cells of a line."""
    rate = record.summary["merge_rate"]
    why = record.summary["branches"]
    cells = [
        "yes",
        "yes" if calls and all(call.streamed for call in calls) else "no",
        str(len(record.interactions)),
        str(len(record.rows)),
        "–" if rate is None else f"{rate:.2f}",
        said or "; ".join(f"{count} × {reason}" for reason, count in sorted(why.items())) or "one",
    ]
    return " | ".join(cells)
