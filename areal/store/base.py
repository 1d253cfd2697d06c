"""What survives a crash. One Protocol in three parts; every process of a run opens the same store.

    store = await open_store("sqlite:///RUN/store.sqlite")       # areal/store/__init__.py
    async with store:
        session = await store.sessions.begin(SessionRequest("task-1", key_hash, "w0"))
        await store.sessions.add(interaction)                    # durable when it returns
        await store.sessions.end(session.id, "ended")
        groups = await store.training.ready()

Everything that returns has been committed with fsync. Counters are derived from rows, never kept beside them
(settled 1-4, 9, 18). Errors: NoCapacity, Conflict, NotFound, InvalidKey, Unavailable, StoreError. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from areal.base.types import (
    Counts,
    Ending,
    Interaction,
    Limits,
    Session,
    SessionRequest,
    Share,
    Tag,
    Version,
    WorkerInfo,
)
from areal.store.balance import Balance

LARGEST_REWARD = 1e6  # in size; sums, discounts and squares of such rewards stay far from overflow in float32


@dataclass(frozen=True, slots=True)
class EndedGroup:
    """A group whose every session has ended (or that timed out with survivors), not yet consumed or dropped.

    sessions: those that ended well, in start order; the failed ones are only counted. accepted_at: when it completed.
    """

    id: str
    task_id: str
    sessions: tuple[Session, ...]
    accepted_at: float


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """A group that runs: it is not full yet, or sessions of it are live."""

    id: str
    task_id: str


@dataclass(frozen=True, slots=True)
class Loss:
    """What one task lost for one reason. groups: dropped whole. sessions: those dropped, in whichever way, and those with tokens
    that were masked as stale. tokens: recorded by the dropped ones, and the stale ones of the others."""

    task_id: str
    reason: str
    groups: int
    sessions: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Given:
    """How often a task was given out. groups: of this task. missing: sessions that those which run still lack."""

    groups: int
    missing: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """Sums over the ended sessions of some groups. reward: mean of the sessions' raw reward sums, None if none ended well."""

    sessions: int
    tokens: int
    reward: float | None


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """A session with its sums, for people. Tokens are sampled ones; reward is the sum of the raw rewards, None if there is none.

    drop_reason: why it is never trained, empty where it may be. account: tokens by the reason they are masked for, "" = trained;
    empty until a step has trained the session.
    fate: running · waiting for its reward · waiting for its group · accepted · in step N · trained at step N · dropped (REASON) · evaluation; then
    ", content deleted" where it was.
    """

    session: Session
    recorded_tokens: int
    reward: float | None
    fate: str
    drop_reason: str = ""
    account: Mapping[str, int] = field(default_factory=dict)

    @property
    def trained_tokens(self) -> int:
        return self.account.get("", 0)

    @property
    def masked_tokens(self) -> int:
        return sum(self.account.values()) - self.trained_tokens


class SessionStore(Protocol):
    """Sessions and what they recorded; written by proxies, one short transaction each."""

    async def begin(self, request: SessionRequest) -> Session:
        """Admit a session (settled 2, 3): id suffix, open group or a free group slot, insert, in one transaction.

        Raises NoCapacity (429), Unavailable before the first set_limits and (but for evaluation) while draining, BadRequest
        for an id that is empty, over-long or has a NUL. The same request_id again returns the same session (compare its key_hash).
        Eval sessions are admitted without a slot. A live session under the same key_hash -> Conflict."""
        ...

    async def live(self, key_hash: str) -> Session | None:
        """The running session under this key hash, else the newest ended one, else None."""
        ...

    async def get(self, session_id: str) -> Session | None: ...

    async def of_answer(self, interaction_id: str) -> Session | None:
        """The session that recorded this answer (of a call with choices, also by its bare id), None if none did."""
        ...

    async def add(self, interaction: Interaction) -> None:
        """Store one finished interaction; touches last_active_at. Repeating the same id changes nothing. Raises
        InvalidKey when the session has ended (its rows no longer change), NotFound when there is none."""
        ...

    async def tag(self, interaction_id: str, tag: Tag) -> None:
        """Mark an interaction after the fact, for example superseded."""
        ...

    async def reward(self, session_id: str, reward: float, interaction_id: str | None) -> str:
        """Set (overwrite) a reward; None = the last finished interaction that is no side request, superseded or
        aborted; a bare id with choices `<id>#k` rewards all of them. Returns the interaction id. Raises NotFound for an
        unknown id, BadRequest if there is none yet or the reward is not finite, InvalidKey after the end."""
        ...

    async def end(self, session_id: str, ending: Ending) -> Session:
        """End a running session; under Limits.scored it may now wait for its reward (RewardStore). Ending an ended one changes nothing and returns it as it is."""
        ...

    async def exclude(self, session_id: str, because: str = "", *, delete: bool = False) -> Session:
        """Keep a session out of training; one that runs ends (settled 18). Conflict once a step has taken it or trained
        it. delete: also remove its content for good, which is never refused; the facts that sums are made of stay. If the step
        that has it is lost, a deleted session counts as excluded. Repeating it changes nothing. Raises NotFound."""
        ...

    async def interactions(self, session_id: str) -> tuple[Interaction, ...]:
        """By `index`, those of one index in the order in which they finished."""
        ...

    async def touch(self, session_id: str) -> None:
        """The session is active now."""
        ...

    async def expire(
        self, idle_since: float, busy: Sequence[str] = (), worker: str | None = None
    ) -> tuple[Session, ...]:
        """End, as expired, the running sessions last active before `idle_since` (seconds since the epoch), except
        `busy` ones (a request is in flight); only those of `worker` where one is named, since a process knows only which
        of its own are busy. Returns those it ended."""
        ...


class TrainingStore(Protocol):
    """What the controller reads and decides; written by the controller alone."""

    async def set_limits(self, limits: Limits) -> None:
        """Publish what begin() applies from now on. Raises ConfigError for limits under which nothing could start."""
        ...

    async def limits(self) -> Limits | None: ...

    async def ready(self) -> tuple[EndedGroup, ...]:
        """Accepted groups that no step has taken, in the order in which they opened. Groups past their time-out are settled
        here first."""
        ...

    async def take(self, version: Version, sessions: Mapping[str, Collection[str]]) -> bool:
        """Give accepted groups to the step that will make `version`, with exactly these sessions each (group id -> session
        ids); from here on none of them can be excluded, so that `advance` finds them as they are. False, and nothing is taken,
        if a group is no longer accepted or another session of it was excluded meanwhile. A step holds what it took
        last; of what it hands back, sessions whose content was deleted count as excluded."""
        ...

    async def advance(self, version: Version, consumed: Sequence[str]) -> None:
        """One transaction: the version row and the groups that its step took and trained (settled 4). Opens their slots. The same
        call again changes nothing. Raises Conflict for a label used otherwise or below the newest, and for a group
        that is not accepted (any more)."""
        ...

    async def drop(self, group_ids: Sequence[str], reason: str) -> None:
        """Never to be trained; counted by reason, its slot opens."""
        ...

    async def account(self, session_id: str, shares: Mapping[str, Share]) -> None:
        """What of a session a step trains ("") and what it masks, by reason; a later call replaces an earlier one. Counted once
        its group is consumed, never for a dropped session. Raises ShapeError unless the sums are what it recorded."""
        ...

    async def version(self, label: int | None = None) -> Version | None:
        """Which step a label stands for; None = the newest label. Lag is a difference of steps."""
        ...

    async def release_after(self, step: int, incarnation: str) -> int:
        """Recovery to a checkpoint of `step`: groups consumed by later steps are accepted again, except those of
        `incarnation` itself, the one that recovers (so it may be called again); so are groups that a step of another incarnation
        had taken. Their sessions whose content was deleted count as excluded. Returns how many were consumed."""
        ...

    async def interrupt(self, comes_again: Callable[[str], bool] = ...) -> dict[str, Given]:
        """The agents that this run started end with its processes: their sessions in running groups end (dropped as interrupted), their
        places are free again and the groups' time begins anew. A session that takes such a place has the attempt of the one before, so
        the same weights sample the same tokens. comes_again: whether somebody will fill the groups of this task; where not, their time is
        up, and they go on with the sessions that ended well, or are dropped. Repeating it changes nothing more.

        Returns the tasks that were given out, whatever became of them: the place in the data that a run goes on from."""
        ...

    async def occupancy(self) -> tuple[tuple[OpenGroup, ...], int]:
        """The groups that run, in the order in which they opened, and how many are accepted; at once, for loops that wait for work."""
        ...

    async def counts(self) -> Counts:
        """Everything, on one snapshot. Sums tokens over the whole run (tens of ms beside 100 000 sessions)."""
        ...


@dataclass(frozen=True, slots=True)
class Unrewarded:
    """A session that has ended well and waits for its reward. closed: its group waits for no session that still runs, so that all of it
    can be compared; always so for evaluation."""

    session: Session
    closed: bool


class RewardStore(Protocol):
    """Rewards that come after the end, from the run's own reward source (Limits.scored); the controller's alone."""

    async def waiting(self) -> tuple[Unrewarded, ...]:
        """Those that wait, in the order in which they ended."""
        ...

    async def write(self, verdicts: Mapping[str, Mapping[str | None, float] | None]) -> tuple[str, ...]:
        """One transaction: session id -> its rewards by interaction id (None = the last finished one, with all its choices), or None where
        there will be none, which drops it as reward_failed ({}: it stays, and none of its answers has one). A session that does not wait (any more) stays as it is, so the same call again
        changes nothing. Their groups are settled. Returns the sessions that took theirs. Raises BadRequest for a reward that is no
        number, NotFound for one of an answer that the session has not."""
        ...


class Registry(Protocol):
    """Which worker lives where, and a few facts every process of the run needs."""

    async def heartbeat(self, worker: WorkerInfo) -> None: ...

    async def workers(self, alive_within_s: float = 10.0) -> tuple[WorkerInfo, ...]:
        """Live workers with their running sessions counted from the session rows."""
        ...

    async def leave(self, worker_id: str) -> None: ...


class Reading(Protocol):
    """Lists and sums for people (dashboard, status, export); reads only, on no request's path."""

    async def recent(self, limit: int = 100, *, running: bool | None = None) -> tuple[SessionSummary, ...]:
        """Newest first; running True or False takes only those."""
        ...

    async def session(self, session_id: str) -> SessionSummary | None: ...

    async def walk(self, after: str = "", limit: int = 100) -> tuple[SessionSummary, ...]:
        """All sessions in pages, in the order in which they began: the next ones after this id, "" for the first."""
        ...

    async def tagged(self, tags: Mapping[str, str]) -> tuple[str, ...]:
        """Ids of the sessions that carry all of these tags, in the order in which they began; none for no tags. Walks
        through all sessions."""
        ...

    async def dropped_sessions(self) -> dict[str, int]:
        """Sessions by the reason they are never trained for (empty, expired, reward_failed, excluded, late,
        interrupted)."""
        ...

    async def masked_tokens(self) -> dict[str, int]:
        """Tokens of consumed sessions by the reason they were masked for."""
        ...

    async def consumed(self, version: Version) -> tuple[EndedGroup, ...]:
        """The groups that the step which made `version` trained, with the sessions that it had, as `ready` gave them to it."""
        ...

    async def balance(self) -> Balance:
        """Where everything recorded went, in every unit, on one snapshot, with what does not add up. Walks through all sessions."""
        ...

    async def losses(self, limit: int = 20) -> tuple[Loss, ...]:
        """Drops by task and reason, and what was masked as stale; the largest in tokens first. Walks through all that was lost."""
        ...

    async def finished(self, first: int, count: int) -> Finished:
        """Of groups number `first` to `first + count - 1` in the order in which they were completed, accepted or dropped; for
        reports: it walks through all groups."""
        ...

    async def served(self) -> Version | None:
        """The version that the run stands at: the newest that began a life of the run or whose step was advanced. A label that is only
        taken (`TrainingStore.version` knows it too) stands for weights that may never be served."""
        ...


@dataclass(frozen=True, slots=True)
class Retention:
    """How long what was said in a session is kept once nothing can train it any more; None: no bound. steps: after the step that
    trained it. seconds: after its end. used_bytes: of the whole store, the oldest go first."""

    steps: int | None = None
    seconds: float | None = None
    used_bytes: int | None = None


class Upkeep(Protocol):
    """What keeps a store small; the controller's alone."""

    async def forget(self, keep: Retention, safe_step: int) -> int:
        """Delete the content of trained, dropped and evaluation sessions that is not to be kept any longer, and give its room back to
        the disk. safe_step: what a resume goes back to at worst; what later steps trained may be trained again, and stays. Facts,
        accounts and sums stay. A short transaction per some sessions. Returns how many sessions it was."""
        ...


class Store(Protocol):
    """An open store. `async with` closes it; queued writes are committed first."""

    sessions: SessionStore
    training: TrainingStore
    rewards: RewardStore
    registry: Registry
    reading: Reading
    upkeep: Upkeep

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...
