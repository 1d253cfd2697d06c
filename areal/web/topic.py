"""What a request under the internal token is about: the words by which gateway and worker agree on its session.

    topic = Topic.hint("7f3a…")                  # the client named its session
    topic = Topic.opening("What is 2+2?")        # it did not: the first user message says where to look
    header = (TOPIC_HEADER, keys.seal(topic.text))
    Topic.parse(keys.unseal(header_value)) == topic

Names are data of a client: bounded, printable, or else a digest. The header is sealed with the run's signing secret, and
no gateway passes on one that came from outside. Made by gateway/implicit.py, read by proxy/callers.py. Pure.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from areal.base.errors import InvalidKey, NotFound

TOPIC_HEADER = "x-areal-topic"
LONGEST_HINT = 200  # characters that stand in task ids as they are; a longer hint is named by its digest

Kind = Literal["hint", "conversation"]


@dataclass(frozen=True, slots=True)
class Topic:
    """kind: hint = the client named its session; conversation = `name` is the digest of its first user message."""

    kind: Kind
    name: str

    @classmethod
    def hint(cls, text: str) -> Topic:
        """Of a client's own name for its session."""
        return cls("hint", text if len(text) <= LONGEST_HINT and text.isprintable() else f"sha256-{_digest(text)}")

    @classmethod
    def opening(cls, text: str) -> Topic:
        """Of the first user message of a conversation."""
        return cls("conversation", _digest(text))

    @property
    def task_id(self) -> str:
        """The task of its sessions: hint-<hint>, or conversation-<digest of the first user message>."""
        return f"{self.kind}-{self.name}"

    @classmethod
    def of_task(cls, task_id: str) -> Topic | None:
        """The topic whose sessions have this task id; None where it names none."""
        kind, dash, name = task_id.partition("-")
        if not dash or kind not in ("hint", "conversation"):
            return None
        return cls("hint" if kind == "hint" else "conversation", name)

    @property
    def text(self) -> str:
        return f"{self.kind}:{self.name}"

    @classmethod
    def parse(cls, text: str) -> Topic:
        """The topic whose `text` this is. Raises InvalidKey for anything else."""
        kind, _, name = text.partition(":")
        if kind == "hint":
            return cls("hint", name)
        if kind == "conversation":
            return cls("conversation", name)
        raise InvalidKey("this session hint is not one of this release; restart gateway and workers together")


def unknown_answer(interaction_id: str) -> NotFound:
    """Said where an answer is to name a session, and in the same words whether it is unknown or another's."""
    return NotFound(
        f"no session that opened by itself has the finished answer {interaction_id[:80]!r}; use the id of one of its answers"
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
