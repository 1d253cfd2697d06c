"""The code blocks of README, docs and examples, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README*.md", "docs/*.md", "docs/*/*.md", "examples/*/README.md")
SHELLS = ("bash", "console", "sh")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """language: what stands behind the fence. line: of the fence."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> tuple[str, ...]:
        """Of a shell block: one text per command, continued lines joined, comments left out. console: lines that begin with `$ `."""
        if self.language not in SHELLS:
            return ()
        lines = self.text.splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        found, open_command = [], ""
        for line in lines:
            whole = f"{open_command}{line}"
            if whole.rstrip().endswith("\\"):
                open_command = whole.rstrip()[:-1]
                continue
            try:
                shlex.split(whole, comments=True)
            except ValueError:  # a quotation goes on in the next line
                open_command = f"{whole}\n"
                continue
            open_command = ""
            found.append(_without_comment(whole))
        assert not open_command, f"{self}: the last command never ends"
        return tuple(command for command in found if command)


@cache
def blocks() -> tuple[Block, ...]:
    """All of them, in the order of the pages."""
    return tuple(block for pattern in PAGES for page in sorted(ROOT.glob(pattern)) for block in _of(page))


def _of(page: Path) -> Iterator[Block]:
    text = page.read_text("utf-8")
    for found in _FENCE.finditer(text):
        yield Block(str(page.relative_to(ROOT)), text.count("\n", 0, found.start()) + 1, found[1], found[2])


def _without_comment(command: str) -> str:
    return re.sub(r"(^|\s+)#(?=\s).*$", "", command, flags=re.MULTILINE).strip()
