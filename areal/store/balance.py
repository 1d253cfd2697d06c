"""The books of a run: where everything that was recorded went, in four units, and who is at fault where a sum does not hold.

    books = balance(lines, counts)               # lines: one per session, group by group, as the store holds it
    books.recorded == books.total                # recorded = trained + masked + dropped + waiting + open
    books.faults                                 # sentences; empty where everything adds up

The two sides are counted apart: `recorded` from the interactions that were written as they finished, the shares from what each
step said it trained and masked. Every unit has one fate. A token is trained, masked, dropped with its session or group,
waiting (its group is finished) or open. An interaction is trained if any of its tokens is, a session if any of its interactions is.
A group is trained, dropped, waiting or open. Evaluation sessions stand apart. Pure; each store brings the lines (Reading.balance).
Shown by tools/status, checked at the end of each run and by the tests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from areal.base.errors import ShapeError
from areal.base.types import Counts, Share

MOST_FAULTS = 20  # that are named; one bug can be at fault in every session


@dataclass(frozen=True, slots=True)
class Line:
    """A session as the books see it. group_id: empty for evaluation. accepted, consumed_step, group_drop_reason: its group's.

    version: the label that the consuming step made. drop_reason: its own or its group's, empty where there is none. recorded: from
    its interactions. awaits_reward: it has ended, and the run's reward source has not rewarded it yet. account: what a step said of it,
    "" = trained, else the reason it is masked for."""

    session_id: str
    group_id: str
    running: bool
    accepted: bool
    consumed_step: int | None
    version: int | None
    drop_reason: str
    group_drop_reason: str
    rewarded: bool
    recorded: Share
    awaits_reward: bool = False
    account: Mapping[str, Share] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much of each unit."""

    tokens: int = 0
    interactions: int = 0
    sessions: int = 0
    groups: int = 0

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(
            self.tokens + other.tokens,
            self.interactions + other.interactions,
            self.sessions + other.sessions,
            self.groups + other.groups,
        )


UNITS = tuple(Amounts.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class Balance:
    """See the module. waiting: in finished groups that no published step has trained yet. open: in groups that still fill or run, and
    in sessions that run on although their group went ahead. awaiting_reward: the part of `open` that has ended and waits for its reward.
    rewarded, unrewarded: ended training sessions with and without any reward, but for those that wait for it.
    trained_by_version: trained tokens by the label of the weights that their step made."""

    recorded: Amounts
    trained: Amounts
    masked: Mapping[str, Amounts]
    dropped: Mapping[str, Amounts]
    waiting: Amounts
    open: Amounts
    awaiting_reward: Amounts
    evaluation: Amounts
    rewarded: int
    unrewarded: int
    trained_by_version: Mapping[int, int]
    faults: tuple[str, ...]

    @property
    def total(self) -> Amounts:
        """What `recorded` must be."""
        parts = [self.trained, *self.masked.values(), *self.dropped.values(), self.waiting, self.open]
        return sum(parts, start=Amounts())


def balance(lines: Iterable[Line], counts: Counts) -> Balance:
    """Fold the lines, those of a group next to each other; counts: the store's own, of the same snapshot, which must agree."""
    books = _Books()
    for line in lines:
        books.enter(line)
    return books.close(counts)


def check_shares(session_id: str, recorded: Share, shares: Mapping[str, Share]) -> None:
    """Raises ShapeError unless the shares of a session add up to what it recorded."""
    tokens = sum(share.tokens for share in shares.values())
    interactions = sum(share.interactions for share in shares.values())
    least = min((min(share.tokens, share.interactions) for share in shares.values()), default=0)
    if (tokens, interactions) != (recorded.tokens, recorded.interactions) or least < 0:
        raise ShapeError(
            f"session {session_id!r} recorded {_words(recorded)}, but its shares ({_listed(shares)}) do not add "
            "up to them; every sampled token is trained or masked exactly once"
        )


class _Books:
    """The fold of `balance`: `enter` every line, then `close`."""

    def __init__(self) -> None:
        self._amounts: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0])  # (fate, reason)
        self._by_version: defaultdict[int, int] = defaultdict(int)
        self._rewarded = self._unrewarded = self._running = 0
        self._faults: list[str] = []
        self._group = ""

    def enter(self, line: Line) -> None:
        tokens, interactions = line.recorded.tokens, line.recorded.interactions
        self._running += line.running
        if not line.group_id:
            self._add(("evaluation", ""), tokens, interactions, 1)
            return
        self._add(("recorded", ""), tokens, interactions, 1)
        if line.awaits_reward:
            self._enter_awaiting(line)
        elif not line.running:
            self._rewarded += line.rewarded
            self._unrewarded += not line.rewarded
        if line.group_id != self._group:
            self._enter_group(line)
        if line.drop_reason:
            self._add(("dropped", line.drop_reason), tokens, interactions, 1)
            if line.account:
                self._blame(line, f"is dropped ({line.drop_reason}) and accounted for ({_listed(line.account)})")
        elif line.consumed_step is not None and not line.running:
            self._enter_consumed(line)
        else:
            fate = "waiting" if line.accepted and not line.running else "open"
            self._add((fate, ""), tokens, interactions, 1)

    def close(self, counts: Counts) -> Balance:
        found = Balance(
            recorded=self._sum("recorded"),
            trained=self._sum("trained"),
            masked=self._reasons("masked"),
            dropped=self._reasons("dropped"),
            waiting=self._sum("waiting"),
            open=self._sum("open"),
            awaiting_reward=self._sum("awaiting"),
            evaluation=self._sum("evaluation"),
            rewarded=self._rewarded,
            unrewarded=self._unrewarded,
            trained_by_version=dict(self._by_version),
            faults=(),
        )
        faults = self._faults[:MOST_FAULTS]
        if len(self._faults) > MOST_FAULTS:
            faults.append(f"and {len(self._faults) - MOST_FAULTS} more like these")
        faults += _sums_that_differ(found) + _counts_that_differ(found, self._running, counts)
        return replace(found, faults=tuple(faults))

    def _add(self, key: tuple[str, str], tokens: int, interactions: int, sessions: int, groups: int = 0) -> None:
        own = self._amounts[key]  # not Amounts: there are several of these for each session of a run
        own[0] += tokens
        own[1] += interactions
        own[2] += sessions
        own[3] += groups

    def _sum(self, fate: str) -> Amounts:
        return Amounts(*self._amounts[fate, ""])

    def _reasons(self, wanted: str) -> dict[str, Amounts]:
        return {reason: Amounts(*own) for (fate, reason), own in sorted(self._amounts.items()) if fate == wanted}

    def _enter_group(self, line: Line) -> None:
        self._group = line.group_id
        self._add(("recorded", ""), 0, 0, 0, 1)
        consumed = line.consumed_step is not None
        if line.group_drop_reason and consumed:
            self._faults.append(f"group {line.group_id} is dropped ({line.group_drop_reason}) and was trained")
        if consumed and not line.accepted:
            self._faults.append(
                f"group {line.group_id} was trained at step {line.consumed_step} before it was complete"
            )
        fate = ("waiting" if line.accepted else "open", "")
        if consumed:
            fate = ("trained", "")
        if line.group_drop_reason:
            fate = ("dropped", line.group_drop_reason)
        self._add(fate, 0, 0, 0, 1)

    def _enter_awaiting(self, line: Line) -> None:
        self._add(("awaiting", ""), line.recorded.tokens, line.recorded.interactions, 1)
        if line.running or line.drop_reason or line.accepted:
            self._blame(line, "waits for its reward although it runs, is dropped, or its group was complete without it")

    def _enter_consumed(self, line: Line) -> None:
        """Of a group that a step has trained: what that step said of this session."""
        tokens = sum(share.tokens for share in line.account.values())
        interactions = sum(share.interactions for share in line.account.values())
        if not line.account:
            self._blame(line, f"was in step {line.consumed_step}, which does not say what became of it")
        elif (tokens, interactions) != (line.recorded.tokens, line.recorded.interactions):
            self._blame(line, f"is accounted for differently by step {line.consumed_step}: {_listed(line.account)}")
        for reason, share in line.account.items():
            self._add(_fate(reason), share.tokens, share.interactions, 0)
        if line.account:
            trained = line.account.get("", Share(0, 0))
            most = max(line.account, key=lambda reason: (line.account[reason].interactions, reason))
            self._add(_fate("" if trained.tokens else most), 0, 0, 1)
            if line.version is not None:
                self._by_version[line.version] += trained.tokens

    def _blame(self, line: Line, what: str) -> None:
        self._faults.append(
            f"session {line.session_id!r} of group {line.group_id} recorded {_words(line.recorded)} and {what}"
        )


def _fate(reason: str) -> tuple[str, str]:
    return ("masked", reason) if reason else ("trained", "")


def _sums_that_differ(books: Balance) -> list[str]:
    total = books.total
    return [
        f"{getattr(books.recorded, unit)} {unit} were recorded, but trained, masked, dropped, waiting and open are "
        f"{getattr(total, unit)} together"
        for unit in UNITS
        if getattr(books.recorded, unit) != getattr(total, unit)
    ]


def _counts_that_differ(books: Balance, running: int, counts: Counts) -> list[str]:
    """What the run steers by (Counts) is derived by queries of its own."""
    pairs = {
        "recorded tokens": (counts.recorded_tokens, books.recorded.tokens),
        "trained tokens": (counts.trained_tokens, books.trained.tokens),
        "masked tokens": (counts.masked_tokens, sum(own.tokens for own in books.masked.values())),
        "dropped tokens": (counts.dropped_tokens, sum(own.tokens for own in books.dropped.values())),
        "open groups": (counts.running, books.open.groups),
        "waiting groups": (counts.accepted, books.waiting.groups),
        "trained groups": (counts.consumed, books.trained.groups),
        "dropped groups": (sum(counts.dropped.values()), sum(own.groups for own in books.dropped.values())),
        "running sessions": (counts.running_sessions, running),
        "sessions that wait for their reward": (counts.awaiting_reward, books.awaiting_reward.sessions),
    }
    return [
        f"the store counts {counted} {what}, its sessions and groups make {entered}"
        for what, (counted, entered) in pairs.items()
        if counted != entered
    ]


def _words(share: Share) -> str:
    return f"{share.tokens} tokens in {share.interactions} interactions"


def _listed(shares: Mapping[str, Share]) -> str:
    return ", ".join(
        f"{f'masked for {reason}' if reason else 'trained'}: {_words(share)}"
        for reason, share in sorted(shares.items())
    )
