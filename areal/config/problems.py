"""Everything wrong with a configuration, collected, then raised at once: one sentence a line.

    problems = Problems()
    problems.add("rollout.workers", "0 must be at least 1")
    problems.raise_if_any()                                  # ConfigError, all lines

A problem names the key path as the user wrote it. Values of secrets never stand in one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from areal.base.errors import ConfigError
from areal.base.redact import redact


class Problems:
    """A growing list of sentences; order of discovery, each once."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, path: str, sentence: str) -> None:
        line = " ".join(redact(f"{path}: {sentence}" if path else sentence).split())
        if line not in self.lines:
            self.lines.append(line)

    def raise_if_any(self) -> None:
        if self.lines:
            raise ConfigError("\n".join(self.lines))


def nearest(path: str, known: Iterable[str]) -> str:
    """The known key path that was probably meant; "" if none is near.

    A key that exists under its own name elsewhere comes first (`rollout.admin_api_key` belongs under rollout.agent)."""
    known = list(known)
    leaf = path.rpartition(".")[2]
    elsewhere = [each for each in known if each.rpartition(".")[2] == leaf]
    if elsewhere:
        return max(elsewhere, key=lambda each: (_shared_prefix(each, path), _likeness(each, path), -len(each)))
    siblings = [each for each in known if each.rpartition(".")[0] == path.rpartition(".")[0]]
    for candidates in (siblings, known):
        found = difflib.get_close_matches(path, candidates, n=1, cutoff=0.6)
        if found:
            return found[0]
    by_leaf = {each.rpartition(".")[2]: each for each in known}
    close = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.75)
    return by_leaf[close[0]] if close else ""


def _likeness(one: str, other: str) -> float:
    """Of two sections, by their letters: `actr.path` means actor.path and not ref.path."""
    return difflib.SequenceMatcher(None, one, other).ratio() if "." in other else 0.0


def _shared_prefix(one: str, other: str) -> int:
    pairs = zip(one.split("."), other.split("."), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), len(one.split(".")))
