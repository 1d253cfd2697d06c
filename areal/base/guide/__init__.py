"""The error guide: what a user meets, how the message reads, why it comes, what to do. docs/troubleshooting.md is made of it.

    OAUTH.text()                                   # the message, where the guide itself is what is said
    GATEWAY_UNREACHABLE.text(place="localhost:9000", reason="connection refused")
    situation("port-taken").said_in(log)           # whether a text holds this message, whatever its values: for tests

One place for causes and remedies. `says` is the message as the program says it, with {name} or … where a value stands; a test compares each
with the texts in the source, so that guide and program cannot part (tests/base/test_guide.py). The page: tools/troubleshooting.py.
situation.py (the noun) · calls.py (what clients, agents and the gateway hear) · runs.py (what a run says).
"""

from __future__ import annotations

from areal.base.guide.calls import CALLS, GATEWAY_UNREACHABLE, OAUTH
from areal.base.guide.runs import RUNS, TAKES_TURNS
from areal.base.guide.situation import Part, Situation

__all__ = ["GATEWAY_UNREACHABLE", "GUIDE", "OAUTH", "TAKES_TURNS", "Part", "Situation", "situation"]

GUIDE: tuple[Situation, ...] = (*CALLS, *RUNS)
_BY_NAME = {one.name: one for one in GUIDE}


def situation(name: str) -> Situation:
    """Raises KeyError for a name that is not in the guide."""
    return _BY_NAME[name]
