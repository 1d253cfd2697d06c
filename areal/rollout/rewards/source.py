"""What rewards sessions, as the scorer sees it, and how it fails.

    rewards = await source.rewards(cases)     # one call about one session, or about all of a group that are compared

A call fails in four ways. Unreadable: this time nothing came of it; asked again, up to rollout.reward.attempts. Hopeless: asking again
would not help. Away: it is not about the session; nothing is counted, and health.py looks whether the source answers anybody; Crowded is
away for its rate limit, Spent until somebody pays. Limited: it is there and answers later.
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

    def told(self, name: str, since: str) -> str:
        """Why nobody is scored by the source of this name."""
        return f"{name} gives no rewards since {since} ({self.cause}); {self.remedy}"


class Crowded(Away):
    """Its provider lets no more calls through for now: wait_s seconds, as far as it says. That is nobody's fault, unless the same call is refused
    again and again while others are answered."""

    def __init__(self, cause: str, wait_s: float) -> None:
        super().__init__(
            cause, "set calls_per_minute of its route to what your plan allows; sessions start again by themselves"
        )
        self.wait_s = wait_s


class Spent(Away):
    """What it may cost is spent: it answers nobody until its configuration is another."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause, "then sessions start again by themselves", wrong=True)

    def told(self, name: str, since: str) -> str:
        return (
            f"the token budget of {name} is spent since {since}, so no session is scored: {self.cause}; {self.remedy}"
        )


class Limited(ArealError):
    """Its calls of now are all made; the next may be made after wait_s seconds."""

    def __init__(self, cause: str, wait_s: float) -> None:
        super().__init__(cause)
        self.wait_s = wait_s


class Source(Protocol):
    """`name`: for people, as in "judge_model (qwen3-32b)". has_probe: whether `probe` asks something else than the case it is given, so that
    one bad case is told from a source that is away."""

    name: str
    has_probe: bool

    async def rewards(self, cases: Sequence[Case]) -> list[Rewards]:
        """One for each case, in their order. Raises Unreadable, Hopeless, Limited or Away."""
        ...

    async def probe(self, case: Case | None) -> None:
        """Whether it answers at all. case: one that met it away, None where none did. Raises Away or Limited."""
        ...
