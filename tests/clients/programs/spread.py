"""A reward function as a user writes it. What it rewards makes no sense; tries of one task get different rewards by it."""

from __future__ import annotations

from typing import Any


def spread(task: dict[str, Any], messages: list[dict[str, Any]], answers: list[dict[str, Any]]) -> float:
    assert task["prompt"] == "Say hello."
    said = "".join(answer["content"] or "" for answer in answers)
    return sum(map(ord, said)) % 101 / 100
