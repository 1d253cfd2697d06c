"""[throughput] is a hand count: what was trained by the time it took."""

from __future__ import annotations

import random

import pytest

from areal.rollout.pace import Pace


def test_the_lines_of_a_hundred_steps_add_up_to_their_hand_count() -> None:
    draw, pace = random.Random(3), Pace(10, started=50.0)
    now, lines, counted = 50.0, [], []
    for step in range(100):
        took, sessions, tokens = draw.uniform(0.1, 9.0), draw.randrange(1, 64), draw.randrange(9000)
        now += took
        counted.append((took, sessions, tokens))
        rate = pace.step(now, sessions=sessions, tokens=tokens)
        if step % 10 == 9:
            lines.append((sum(seconds for seconds, *_ in counted[-10:]), rate))
    assert sum(rate.sessions * seconds for seconds, rate in lines) == pytest.approx(sum(own for _, own, _ in counted))
    assert sum(rate.tokens * seconds for seconds, rate in lines) == pytest.approx(sum(own for *_, own in counted))


def test_before_the_first_line_is_due_it_counts_from_the_start() -> None:
    pace = Pace(10, started=2.0)
    assert pace.step(4.0, sessions=6, tokens=8).sessions == 3
    assert pace.step(5.0, sessions=6, tokens=1).tokens == 3
