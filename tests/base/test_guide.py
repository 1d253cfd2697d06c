"""The error guide says what the programs say, and docs/troubleshooting.md says what the guide says."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import get_args

import pytest

from areal.base.guide import GUIDE, Part, Situation, situation
from areal.tools.troubleshooting import page
from tests.spoken import ROOT, spoken


@pytest.mark.parametrize("one", GUIDE, ids=lambda one: one.name)
def test_a_program_says_it(one: Situation) -> None:
    """All fixed words of the message stand, in order, in one text of the source; or the source takes the message from the guide."""
    constants = [name for name, value in vars(guide_module()).items() if value is one]
    sources = "\n".join(
        path.read_text("utf-8") for path in (ROOT / "areal").rglob("*.py") if path.parent.name != "guide"
    )
    if any(f"{name}.text(" in sources for name in constants):
        return
    assert any(_in_order(one.pieces, text) for text in spoken()), f"nothing says {one.says!r}"


def guide_module() -> object:
    import areal.base.guide

    return areal.base.guide


def _in_order(pieces: tuple[str, ...], text: str) -> bool:
    at = 0
    for piece in pieces:
        found = text.find(piece, at)
        if found < 0:
            return False
        at = found + len(piece)
    return True


def test_names_are_unique_and_parts_are_in_one_piece_each() -> None:
    assert len({one.name for one in GUIDE}) == len(GUIDE)
    parts = [part for part, _ in groupby(GUIDE, key=lambda one: one.part)]
    assert parts == [part for part in get_args(Part) if part in parts]


def test_every_entry_says_why_and_what_to_do() -> None:
    assert [one.name for one in GUIDE if not (one.cause.endswith(".") and one.remedy.endswith("."))] == []


def test_the_page_is_the_guide() -> None:
    file = Path(ROOT / "docs" / "troubleshooting.md")
    assert file.read_text("utf-8") == page(), "run: python -m areal.tools.troubleshooting > docs/troubleshooting.md"


def test_a_message_is_known_with_its_values() -> None:
    taken = situation("port-taken")
    said = "error: port 9000 is taken by process nc (pid 7): cannot listen on 127.0.0.1:9000; stop that process or choose another port"
    assert taken.said_in(f"{said} (--port; 0 takes a free one)")
    assert not taken.said_in(said)
    assert situation("gateway-unreachable").said_in(
        situation("gateway-unreachable").text(place="localhost:1", reason="refused", port=1)
    )
