"""The books against the counters that the run steers by: each that differs is a fault, also where the sums themselves hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from areal.base.types import Counts, Share
from areal.store.balance import Line, balance

TRAINED = Line(
    session_id="a",
    group_id="g1",
    running=False,
    accepted=True,
    consumed_step=1,
    version=1,
    drop_reason="",
    group_drop_reason="",
    recorded=Share(5, 2),
    rewarded=True,
    account={"": Share(3, 1), "stale": Share(2, 1)},
)
WAITING = replace(TRAINED, session_id="b", group_id="g2", consumed_step=None, version=None, account={})
DROPPED = replace(WAITING, session_id="c", group_id="g3", group_drop_reason="stale", drop_reason="stale")
RUNNING = replace(WAITING, session_id="d", group_id="g4", running=True, accepted=False)
LINES = (TRAINED, WAITING, DROPPED, RUNNING)
COUNTS = Counts(
    running=1,
    accepted=1,
    consumed=1,
    dropped={"stale": 1},
    running_sessions=1,
    free_slots=0,
    recorded_tokens=20,
    trained_tokens=3,
    masked_tokens=2,
    dropped_tokens=5,
)


def test_a_store_whose_counters_say_the_same_has_no_fault() -> None:
    assert balance(LINES, COUNTS).faults == ()


@pytest.mark.parametrize(
    ("counter", "value", "says"),
    [
        ("running", 2, "2 open groups"),
        ("accepted", 0, "0 waiting groups"),
        ("consumed", 2, "2 trained groups"),
        ("dropped", {"stale": 1, "excluded": 1}, "2 dropped groups"),
        ("running_sessions", 0, "0 running sessions"),
        ("awaiting_reward", 1, "1 sessions that wait for their reward"),
        ("recorded_tokens", 21, "21 recorded tokens"),
        ("trained_tokens", 4, "4 trained tokens"),
        ("masked_tokens", 0, "0 masked tokens"),
        ("dropped_tokens", 6, "6 dropped tokens"),
    ],
)
def test_a_counter_that_differs_is_a_fault(counter: str, value: Any, says: str) -> None:
    [fault] = balance(LINES, replace(COUNTS, **{counter: value})).faults
    assert fault.startswith(f"the store counts {says}, its sessions and groups make ")
