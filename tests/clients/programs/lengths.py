"""A reward function as a user writes it: longer is better, so that tries of one task differ."""

from __future__ import annotations

from typing import Any


def length(task: dict[str, Any], messages: list[dict[str, Any]], answers: list[dict[str, Any]]) -> float:
    assert task["prompt"] == "Say hello."
    return sum(len(answer["content"] or "") for answer in answers) / 100
