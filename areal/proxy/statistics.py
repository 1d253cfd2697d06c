"""What became of a session, in numbers: turns, rows, merge rate, branches with their reasons, and where every token went.

    found = statistics(await store.reading.session(session_id), await store.sessions.interactions(session_id))
    found.merge_rate, found.branches, found.tokens.recorded == found.tokens.trained + masked + dropped

A pure function of the stored rows, and the one place where this is counted: `/rl/session`, export, dashboard, doctor and the table
of clients show these numbers. Rows are those of the concat style (export.py), whatever style a run trains.

A *branch* is a row other than the session's first; it carries the Fork that began it. The branch of a reason in OF_ITS_OWN had no
row to go on from (another conversation, another sample of the same call). Every other interaction but the first could go on from
a recorded row, and is *mergeable*; it is *merged* if it did. merge_rate = merged / mergeable; None where nothing was mergeable.
merged is also the number of rows saved: merged = interactions - rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from areal.base.types import BranchReason, Fork, Interaction
from areal.proxy import export
from areal.store.base import SessionSummary

OF_ITS_OWN: frozenset[BranchReason] = frozenset(
    {"new_conversation", "sub_agent", "side_request", "choice", "resampled", "retried", "parallel"}
)
_UNSEEN = Fork("parallel", "it began while another call was running, before there was an answer to go on from")


@dataclass(frozen=True, slots=True)
class TokenSums:
    """Sampled tokens: recorded = trained + masked + dropped, the last two by reason.

    Before a step has taken the session: what its rows would come to. A dropped session's tokens are all dropped, whatever their masks."""

    recorded: int
    trained: int
    masked: Mapping[str, int]
    dropped: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Branch:
    """A row other than the first: the interaction that began it, and why."""

    interaction_id: str
    index: int
    fork: Fork

    @property
    def lost(self) -> bool:
        """Whether it left a recorded row that it could have gone on from."""
        return self.fork.reason not in OF_ITS_OWN


@dataclass(frozen=True, slots=True)
class Statistics:
    """See the module. calls: HTTP calls, whatever the number of their choices. rows: also those without a token to train."""

    calls: int
    interactions: int
    rows: int
    mergeable: int
    merged: int
    branches: tuple[Branch, ...]
    tokens: TokenSums
    empty: int
    rewards_set: int
    reward_sum: float

    @property
    def merge_rate(self) -> float | None:
        return merge_rate(self.merged, self.mergeable)

    @property
    def reasons(self) -> dict[str, int]:
        """Branches by reason."""
        return dict(Counter(branch.fork.reason for branch in self.branches))


def merge_rate(merged: int, mergeable: int) -> float | None:
    """Of one session, or of the sums of several."""
    return merged / mergeable if mergeable else None


def statistics(summary: SessionSummary, interactions: Sequence[Interaction]) -> Statistics:
    """summary and interactions: of one session, as the store has them."""
    rows = export.branches(interactions)
    began = {row[0] for row in rows[1:]}
    branches = tuple(
        Branch(one.id, one.index, one.fork or _UNSEEN)
        for one in sorted(interactions, key=lambda each: each.index)
        if one.id in began
    )
    held = sum(map(len, rows))  # a backend that names no prompt ids leaves nothing to build on
    merged = held - len(rows)
    rewards = [one.reward for one in interactions if one.reward is not None]
    return Statistics(
        calls=len({one.id.partition("#")[0] for one in interactions}),
        interactions=len(interactions),
        rows=len(rows),
        mergeable=merged + sum(branch.lost for branch in branches),
        merged=merged,
        branches=branches,
        tokens=_tokens(summary, interactions),
        empty=export.account(interactions).empty,
        rewards_set=len(rewards),
        reward_sum=sum(rewards),
    )


def _tokens(summary: SessionSummary, interactions: Sequence[Interaction]) -> TokenSums:
    expected = export.account(interactions)
    # Of a deleted one nothing is left to look at; what a step that has it masks is known at its end.
    if summary.session.deleted_at is not None:
        expected = export.Account(summary.recorded_tokens, summary.recorded_tokens)
    why = summary.drop_reason or ("evaluation" if summary.session.purpose == "eval" else "")
    if why:
        return TokenSums(expected.recorded, 0, {}, {why: expected.recorded} if expected.recorded else {})
    if summary.account:  # a step has taken it, and may have masked what was too old
        masked = {reason: count for reason, count in summary.account.items() if reason}
        return TokenSums(expected.recorded, summary.trained_tokens, masked, {})
    return TokenSums(expected.recorded, expected.trained, expected.masked, {})
