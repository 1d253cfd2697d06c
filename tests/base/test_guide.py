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


HAPPENS = {
    "invalid-key": "gateway/test_security.py",
    "session-expired": "faults/test_sessions_live_on.py",
    "forbidden": "gateway/test_routing.py",
    "variable-unset": "e2e/test_second_text.py",
    "variable-broken": "config/test_load.py",
    "public-key": "config/test_names.py",
    "port-taken": "e2e/test_second_text.py",
    "gateway-unreachable": "gateway/test_watch.py",
    "gateway-died": "e2e/test_second_text.py",
    "port-of-a-stranger": "gateway/test_attach.py",
    "agents-other-port": "config/test_names.py",
    "gateway-serves-another": "gateway/test_attach.py",
    "no-run-attached": "gateway/test_attach.py",
    "worker-away": "gateway/test_routing.py",
    "channel-key": "e2e/test_second_text.py",
    "channel-model": "inference/test_upstream_client.py",
    "no-choices": "e2e/test_second_text.py",
    "channel-unreachable": "inference/test_upstream_client.py",
    "channel-slow": "inference/test_upstream_client.py",
    "channel-rate": "inference/test_upstream_client.py",
    "channel-broken": "inference/test_upstream_rules.py",
    "oauth": "e2e/test_second_text.py",
    "prompt-too-long": "proxy/test_recording.py",
    "no-slot": "e2e/test_first_text.py",
    "nobody-rewarded": "test_train.py",
    "rewards-away": "e2e/test_judge.py",
    "rewards-failed": "rollout/rewards/test_scorer.py",
    "async-off": "e2e/test_second_text.py",
    "async-lag-0": "e2e/test_second_text.py",
    "async-no-workers": "e2e/test_second_text.py",
    "async-not-worth-it": "rollout/test_speed.py",
    "lag-is-the-limit": "rollout/test_speed.py",
    "stale": "rollout/test_patience.py",
    "queue-full": "rollout/test_report.py",
    "queue-never-full": "rollout/test_report.py",
    "unknown-key": "config/test_load.py",
    "placeholder": "e2e/test_second_text.py",
    "older-torch": "models/test_torch_install.py",
    "run-in-use": "cluster/test_local.py",
    "not-finite": "engine/test_engine.py",
    "disagree": "test_train.py",
    "disk-nearly-full": "proxy/test_full_disk.py",
    "start-too-slow": "cluster/test_local.py",
}


def test_every_situation_has_a_test_in_which_it_happens() -> None:
    assert list(HAPPENS) == [one.name for one in GUIDE]


@pytest.mark.parametrize("one", GUIDE, ids=lambda one: one.name)
def test_that_test_sees_the_message(one: Situation) -> None:
    """By the guide's own words, or by three words in a row of the message."""
    text = " ".join((ROOT / "tests" / HAPPENS[one.name]).read_text("utf-8").split())
    words = [[word.strip(":;,") for word in piece.split()] for piece in one.pieces]
    in_a_row = [" ".join(each[at : at + 3]) for each in words for at in range(max(1, len(each) - 2))]
    assert f'"{one.name}"' in text or any(three in text for three in in_a_row)
