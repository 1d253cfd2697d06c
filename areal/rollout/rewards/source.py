"""What rewards sessions, as the scorer sees it, and how it fails.

    rewards = await source.rewards(cases)     # one call about one session, or about all of a group that are compared

A call fails in three ways. Unreadable: this time nothing came of it; asked again, up to rollout.reward.attempts. Hopeless: asking again
would not help. Away: it is not about the session; nothing is counted, and health.py looks whether the source answers anybody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from areal.base.errors import ArealError
from areal.rollout.rewards.case import Case

Rewards = Mapping[str | None, float]
"""By interaction id; None: the last answer."""


class Unreadable(ArealError):
    """Nothing that is a reward came of this call; another one may do better."""


class Hopeless(ArealError):
    """This session cannot be rewarded, however often it is tried."""


class Away(ArealError):
    """The source does not answer. remedy: what its operator can do. wrong: it answers, and refuses everybody (a key, a model id)."""

    def __init__(self, cause: str, remedy: str, *, wrong: bool = False) -> None:
        super().__init__(f"{cause}; {remedy}")
        self.cause, self.remedy, self.wrong = cause, remedy, wrong


class Source(Protocol):
    """`name`: for people, as in "judge_model (qwen3-32b)". has_probe: whether `probe` asks something else than the case it is given, so that
    one bad case is told from a source that is away."""

    name: str
    has_probe: bool

    async def rewards(self, cases: Sequence[Case]) -> list[Rewards]:
        """One for each case, in their order. Raises Unreadable, Hopeless or Away."""
        ...

    async def probe(self, case: Case | None) -> None:
        """Whether it answers at all. case: one that met it away, None where none did. Raises Away."""
        ...
