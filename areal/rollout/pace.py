"""How fast a run trains: sessions and sampled tokens per second, over the steps between two [throughput] lines.

    pace = Pace(log_interval)
    pace.step(time.monotonic(), sessions=32, tokens=18420)     # Rate(sessions, tokens) per second

What S2 counts by hand, the samples of so many steps by the seconds that they took, is what the line says: all time counts, that of
evaluations and checkpoints too. Pure: no clock. Used by train.py.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rate:
    """Per second."""

    sessions: float
    tokens: float


class Pace:
    """started: seconds on the clock of `step`, where the first step begins. over: how many of the newest steps a rate is taken over."""

    def __init__(self, over: int, started: float) -> None:
        self._ends: deque[float] = deque([started], maxlen=over + 1)
        self._done: deque[tuple[int, int]] = deque(maxlen=over)

    def step(self, now: float, *, sessions: int, tokens: int) -> Rate:
        """A step has ended that trained so many sessions, in which so many tokens had been sampled."""
        self._ends.append(now)
        self._done.append((sessions, tokens))
        seconds = max(now - self._ends[0], 1e-9)
        return Rate(sum(one for one, _ in self._done) / seconds, sum(one for _, one in self._done) / seconds)
