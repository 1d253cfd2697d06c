"""Which model names mean the upstream channel, and which only nearly do.

    nearly_upstream("reward-modle")     # "reward_model"; None for a name that is far from both

A misspelt judge must not be answered by the policy that it is meant to judge (settled 16), so a near-miss is 404 wherever a name is
read: in the gateway and in the worker (proxy/recorder.py). Pure.
"""

from __future__ import annotations

import difflib

UPSTREAM_NAMES = ("reward_model", "judge_model")
_LIKE = 0.8  # of the letters


def nearly_upstream(name: str) -> str | None:
    """The upstream name that this one is, or is a misspelling of."""
    plain = name.strip().lower().replace("-", "_").replace(" ", "_")
    return next(iter(difflib.get_close_matches(plain, UPSTREAM_NAMES, 1, _LIKE)), None)


def no_such_model(name: str, meant: str) -> str:
    """What a caller of a near-miss, or of a route that is not configured, hears."""
    return (
        f"there is no model {name[:80]!r} here; {meant} is served by the gateway if model_routing.{meant} is configured"
    )
