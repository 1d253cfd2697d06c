"""Ten kills of any process of a real run, under agents that go on: nothing is lost, nothing is doubled. `make kills` does many more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.campaign import Campaign
from tests.faults.target import KINDS

SEED = 4  # its ten kills are of every kind and at most moments; another one is as good: make kills KILLS=10 SEED=…


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_ten_kills_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    report = Campaign(tmp_path, SEED, kills=10).run()
    assert not report.violations, report.text() + "\n" + "\n".join(report.violations)
    assert report.kills >= 10
    assert report.kinds.keys() == set(KINDS)
    assert 0 < report.by_itself < report.lives - 1, "some lives begin by themselves, others by the command"
    assert report.done["steps"] > 0
    assert report.done["answers read"] > 0
