"""One situation of the error guide, see the package."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Part = Literal[
    "Keys",
    "Gateway and ports",
    "Upstream channel",
    "Agents",
    "Rewards",
    "Asynchronous training",
    "Configuration",
    "Training",
    "Disk and processes",
]
_VALUE = re.compile(r"\{\w+\}|…")


@dataclass(frozen=True, slots=True)
class Situation:
    """name: for links and tests. seen: where a user meets it, in their words. says: the message."""

    name: str
    part: Part
    seen: str
    says: str
    cause: str
    remedy: str

    def text(self, **values: object) -> str:
        """The message with its values."""
        return self.says.format(**values)

    @property
    def pieces(self) -> tuple[str, ...]:
        """What of the message is always the same."""
        return tuple(piece for piece in _VALUE.split(self.says) if piece.strip(" .:;,()="))

    def said_in(self, text: str) -> bool:
        """Whether the message stands in a text, with any values."""
        words = ".*?".join(re.escape(piece) for piece in _VALUE.split(self.says))
        return re.search(words, text, re.DOTALL) is not None
