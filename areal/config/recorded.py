"""A run's config.yaml as it was written down, read without judging it: it may be of another release, and its secrets are masked.

    recorded = Recorded.of(run / "config.yaml")
    recorded.text("actor.path"), recorded.number("rollout.agent.turn_discount")     # None where there is none
    recorded.changes(config)                                                        # ["actor.optimizer.lr=0.001, was 0.0001"]
    recorded.differences(other)                                                     # {"actor.optimizer.lr": ("0.001", "0.0001")}

For commands that look at run folders (status, dashboard, compare), and for a run that goes on in one, to say what is another than before; what a
run starts with is load.py's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.base.errors import ConfigError
from areal.config.section import Section
from areal.config.show import masked_yaml
from areal.config.yaml_text import is_null, load_yaml, number

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

    def changes(self, config: Section) -> list[str]:
        """A phrase for each setting that `config` has otherwise, in its order; secrets by their hints. A key that only one of the two
        knows is another release's and left out."""
        pairs = _unlike("", self.tree, load_yaml(masked_yaml(config)))
        return [f"{path}={now}, was {before}" for path, before, now in pairs]

    def differences(self, other: Recorded) -> dict[str, tuple[str, str]]:
        """Key -> its value here and there, for each that two runs have otherwise, in the order of the other."""
        return {path: (here, there) for path, here, there in _unlike("", self.tree, other.tree)}


def _unlike(path: str, before: Any, now: Any) -> Iterator[tuple[str, str, str]]:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in (name for name in now if name in before):
            yield from _unlike(f"{path}.{name}" if path else str(name), before[name], now[name])
    elif before != now and not (is_null(before) and is_null(now)):
        yield path, _shown(before), _shown(now)


def _shown(value: Any) -> str:
    """A section that came or went is only named."""
    return "set" if isinstance(value, dict) else "null" if is_null(value) else str(value) or "nothing"
