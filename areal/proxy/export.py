"""Export: recorded interactions -> training rows. Pure functions of the stored rows, so a repeat gives the same numbers.

    table = export.rows(session, interactions, style="concat", turn_discount=0.9)   # list[Trajectory]
    credits = export.discounted_rewards(interactions, 0.9, reward_clip=1.0)         # interaction id -> R_i
    export.account(interactions)                                                    # recorded = trained + masked(reason)
    export.shares(map(export.fate, interactions), stale={})                         # the same, as a step writes it down

individual: a row per interaction, prompt masked, output trained. concat: a row per conversation branch on *token*
prefixes; every open row is tried, so that a sub-agent's turns do not cut the main conversation (T057). Over all rows
of either style each sampled, unmasked token is trained exactly once. Nothing is re-tokenised, nothing is written.
Reads: base/types. Used by statistics.py (the sums that people see), records.py (what the routes answer),
conversation.py, rollout/queue.py (the batch) and dashboard/view.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from areal.base.types import (
    BoolArray,
    ExportStyle,
    FloatArray,
    IntArray,
    Interaction,
    Session,
    Share,
    Span,
    Tag,
    Trajectory,
)

# Which reason is counted when an interaction carries several: the one that already explains all others comes first.
MASK_ORDER: tuple[Tag, ...] = (
    "superseded",
    "aborted",
    "untrainable",
    "side_request",
    "greedy",
    "constrained",
    "scripted_history",
)
# These are no step of the conversation: a parent's credit does not average over them.
NOT_A_STEP: frozenset[Tag] = frozenset({"superseded", "aborted", "side_request"})


@dataclass(frozen=True, slots=True)
class Account:
    """Where the sampled tokens of some interactions went: recorded = trained + sum(masked.values()).

    empty: interactions without one token to train (T058), skipped as rows.
    """

    recorded: int
    trained: int
    masked: Mapping[str, int] = field(default_factory=dict)
    empty: int = 0


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one interaction where nothing is too old. reason: why its other tokens are masked, "" where there is none."""

    interaction_id: str
    recorded: int
    trained: int
    reason: str


def clipped(reward: float, bound: float | None) -> float:
    """The reward that is trained where `reward` was set: within -bound .. bound (rollout.agent.reward_clip)."""
    return reward if bound is None else max(-bound, min(bound, reward))


def discounted_rewards(
    interactions: Sequence[Interaction], turn_discount: float, reward_clip: float | None = None
) -> dict[str, float]:
    """R_i = r_i + turn_discount * R_next along the credit tree; at a fork R_next is the mean over the children.

    r_i is the reward within ±reward_clip; a missing one counts 0. Superseded and aborted answers and side requests do not dilute their parent's mean,
    unless the conversation went on from them. Returns R by interaction id; raw rewards stay in the interactions."""
    ordered = sorted(interactions, key=lambda one: one.index)
    index_of = {one.id: one.index for one in ordered}
    following: dict[str, list[float]] = {}
    returns: dict[str, float] = {}
    for one in reversed(ordered):
        later = following.get(one.id, [])
        total = clipped(one.reward or 0.0, reward_clip) + turn_discount * (sum(later) / len(later) if later else 0.0)
        returns[one.id] = total
        parent = one.credit_parent
        is_step = bool(later) or not NOT_A_STEP.intersection(one.tags)
        if parent is not None and is_step and index_of.get(parent, one.index) < one.index:
            following.setdefault(parent, []).append(total)
    return {one.id: returns[one.id] for one in ordered}


def mask_reason(interaction: Interaction) -> Tag | None:
    """Why no token of this interaction is trained, or None. Per-token `constrained` masks are no such reason."""
    for tag in MASK_ORDER:
        if tag in interaction.tags and not (tag == "constrained" and interaction.completion.constrained is not None):
            return tag
    return None


def trained_mask(interaction: Interaction) -> BoolArray:
    """[n] over the output tokens: True where the token is trained."""
    completion = interaction.completion
    mask = np.full(len(completion.token_ids), mask_reason(interaction) is None, dtype=np.bool_)
    if completion.constrained is not None:
        mask &= ~completion.constrained
    return mask


def fate(one: Interaction) -> Fate:
    """Of its sampled tokens."""
    recorded, trained = len(one.completion.token_ids), int(trained_mask(one).sum())
    reason = "" if recorded == trained > 0 else mask_reason(one) or ("constrained" if recorded else "empty")
    return Fate(one.id, recorded, trained, reason)


def shares(fates: Iterable[Fate], stale: Mapping[str, int]) -> dict[str, Share]:
    """What of a session a step trains ("") and masks, by reason. stale: interaction id -> how many of its tokens that would be
    trained are too old. An interaction is counted as trained if any of its tokens is, else for the reason that takes the last one."""
    tokens: Counter[str] = Counter()
    interactions: Counter[str] = Counter()
    for one in fates:
        old = stale.get(one.interaction_id, 0)
        interactions["" if one.trained > old else "stale" if old else one.reason] += 1
        for reason, number in (("", one.trained - old), ("stale", old), (one.reason, one.recorded - one.trained)):
            tokens[reason] += number
    named = {"", *(+tokens), *interactions}  # + leaves out what is 0
    return {reason: Share(tokens[reason], interactions[reason]) for reason in sorted(named)}


def account(interactions: Iterable[Interaction]) -> Account:
    """Sum up where every sampled token goes."""
    fates = [fate(one) for one in interactions]
    found = {reason: share.tokens for reason, share in shares(fates, {}).items()}
    trained = found.pop("")
    masked = {reason: number for reason, number in found.items() if number}
    return Account(sum(one.recorded for one in fates), trained, masked, sum(one.trained == 0 for one in fates))


def rows(
    session: Session,
    interactions: Sequence[Interaction],
    style: ExportStyle,
    turn_discount: float,
    reward_clip: float | None = None,
) -> list[Trajectory]:
    """The training rows of one session, in the order their first interaction started.

    Rows without a token to train are left out (account() counts them). Raw rewards, as they were set, stand beside the
    discounted ones in each row's spans. Unsampled positions have logprob 0, version -1, temperature 1."""
    built = _built(interactions, style, discounted_rewards(interactions, turn_discount, reward_clip))
    finished = (row.finish(session) for row in built)
    return [row for row in finished if row.trained.any()]


def branches(interactions: Sequence[Interaction]) -> list[tuple[str, ...]]:
    """The interaction ids of each concat row, those without a token to train included; the rows of which merging is counted."""
    return [
        row.interaction_ids()
        for row in _built(interactions, "concat", dict.fromkeys((one.id for one in interactions), 0.0))
    ]


def _built(interactions: Sequence[Interaction], style: ExportStyle, credit: Mapping[str, float]) -> list[_Row]:
    built: list[_Row] = []
    for one in sorted(interactions, key=lambda each: each.index):
        if not len(one.prompt_ids):
            continue  # the backend named no ids (T054): tagged untrainable, nothing to build on
        row = _row_to_extend(built, one) if style == "concat" else None
        if row is None:
            row = _Row()
            built.append(row)
        row.append(one, credit[one.id])
    return built


class _Row:
    """A row under construction: pieces of equal length that are joined once, at the end."""

    def __init__(self) -> None:
        self.ids: IntArray = np.zeros(0, np.int32)
        self.last_id = ""
        self._trained: list[BoolArray] = []
        self._logprobs: list[FloatArray] = []
        self._versions: list[IntArray] = []
        self._temperatures: list[FloatArray] = []
        self._spans: list[Span] = []

    def append(self, one: Interaction, credit: float) -> None:
        """Add what the prompt says beyond this row (masked), then the sampled tokens."""
        completion, news = one.completion, one.prompt_ids[len(self.ids) :]
        start, count = len(one.prompt_ids), len(completion.token_ids)
        mask = trained_mask(one)
        self._piece(np.zeros(len(news), np.bool_), np.zeros(len(news)), np.full(len(news), -1), np.ones(len(news)))
        # An untrainable token may hold NaN; 0 * NaN would poison a masked sum.
        logprobs = np.where(np.isfinite(completion.logprobs), completion.logprobs, 0.0)
        # Greedy tokens are masked; the trainer divides logits by the temperature of every token of the row.
        temperature = completion.temperature or 1.0
        self._piece(mask, logprobs, completion.versions, np.full(count, temperature))
        self.ids = np.concatenate([self.ids, news, completion.token_ids]).astype(np.int32)
        truncated = completion.finish_reason == "length"
        self._spans.append(Span(one.id, start, start + count, one.reward, credit, bool(mask.any()), truncated))
        self.last_id = one.id

    def interaction_ids(self) -> tuple[str, ...]:
        return tuple(span.interaction_id for span in self._spans)

    def _piece(
        self,
        trained: BoolArray,
        logprobs: npt.ArrayLike,
        versions: npt.ArrayLike,
        temperatures: npt.ArrayLike,
    ) -> None:
        self._trained.append(trained)
        self._logprobs.append(np.asarray(logprobs, np.float32))
        self._versions.append(np.asarray(versions, np.int32))
        self._temperatures.append(np.asarray(temperatures, np.float32))

    def finish(self, session: Session) -> Trajectory:
        return Trajectory(
            task_id=session.task_id,
            session_id=session.id,
            token_ids=self.ids,
            trained=np.concatenate(self._trained),
            logprobs=np.concatenate(self._logprobs),
            versions=np.concatenate(self._versions),
            temperatures=np.concatenate(self._temperatures),
            spans=tuple(self._spans),
        )


def _row_to_extend(open_rows: Sequence[_Row], one: Interaction) -> _Row | None:
    """The longest open row whose ids begin this prompt; among equals the token parent's, else the newest."""
    prompt, best, best_rank = one.prompt_ids, None, (-1, False)
    for row in open_rows:
        length = len(row.ids)
        rank = (length, row.last_id == one.token_parent)
        ends_alike = 0 < length <= len(prompt) and prompt[length - 1] == row.ids[-1]  # one look spares most comparisons
        if ends_alike and rank >= best_rank and np.array_equal(prompt[:length], row.ids):
            best, best_rank = row, rank
    return best
