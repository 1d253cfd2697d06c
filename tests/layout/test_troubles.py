"""Reported troubles are tests: each case that this release takes up has at least one named after it (`test_T040_...`)."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
# Gateway, streaming, sessions, tokens, export (T001-T058); configuration, plots, the upstream channel, install and security.
CASES = {*range(1, 59), *range(89, 112)}
NAME = re.compile(r"def test_((?:T\d{3}_)+)")


def test_every_case_is_a_test_by_its_name() -> None:
    named = {
        int(number)
        for path in TESTS.rglob("test_*.py")
        for found in NAME.finditer(path.read_text("utf-8"))
        for number in re.findall(r"\d{3}", found[1])
    }
    assert [f"T{case:03}" for case in sorted(CASES - named)] == []
