"""A run's config.yaml as it was written down, read without judging it: it may be of another release, and its secrets are masked.

    recorded = Recorded.of(run / "config.yaml")
    recorded.text("actor.path"), recorded.number("rollout.agent.turn_discount")     # None where there is none

For commands that look at a run folder (status, dashboard); a run that starts uses load.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.base.errors import ConfigError
from areal.config.yaml_text import load_yaml, number

_NULL = ("", "null", "~")


@dataclass(frozen=True, slots=True)
class Recorded:
    """tree: as the file has it; empty where there is no readable file."""

    tree: Any

    @classmethod
    def of(cls, path: Path) -> Recorded:
        try:
            return cls(load_yaml(path.read_text(), str(path)))
        except (OSError, ConfigError):
            return cls({})

    def text(self, dotted: str) -> str | None:
        """The value of a key, None where it is missing or null."""
        value = self.tree
        for name in dotted.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return None if value is None or isinstance(value, dict | list) or str(value) in _NULL else str(value)

    def number(self, dotted: str) -> float | None:
        return number(self.text(dotted) or "")
