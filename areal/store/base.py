"""What survives a crash. One Protocol in three parts; every process of a run opens the same store.

    store = await open_store("sqlite:///RUN/store.sqlite")       # areal/store/__init__.py
    async with store:
        session = await store.sessions.begin(SessionRequest("task-1", key_hash, "w0"))
        await store.sessions.add(interaction)                    # durable when it returns
        await store.sessions.end(session.id, "ended")
        groups = await store.training.ready(after=None)

Everything that returns has been committed with fsync. Counters are derived from rows, never kept beside them
(settled 1-4, 9, 18). Errors: NoCapacity, Conflict, NotFound, InvalidKey, Unavailable, StoreError. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from areal.base.types import (
    Counts,
    Ending,
    Interaction,
    Limits,
    Session,
    SessionRequest,
    Tag,
    Version,
    WorkerInfo,
)


@dataclass(frozen=True, slots=True)
class EndedGroup:
    """A group whose every session has ended (or that timed out with survivors), not yet consumed or dropped.

    sessions: those that ended well, in start order; the failed ones are only counted. accepted_at: when it completed.
    """

    id: str
    task_id: str
    sessions: tuple[Session, ...]
    accepted_at: float


class SessionStore(Protocol):
    """Sessions and what they recorded; written by proxies, one short transaction each."""

    async def begin(self, request: SessionRequest) -> Session:
        """Admit a session (settled 2, 3): id suffix, open group or a free group slot, insert, in one transaction.

        Raises NoCapacity (429), Unavailable while draining. The same request_id again returns the same session.
        Eval sessions are admitted without a slot. A live session under the same key_hash -> Conflict."""
        ...

    async def live(self, key_hash: str) -> Session | None:
        """The running session under this key, else the newest ended one, else None."""
        ...

    async def get(self, session_id: str) -> Session | None: ...

    async def add(self, interaction: Interaction) -> None:
        """Store one finished interaction; touches last_active_at. Repeating the same id changes nothing."""
        ...

    async def tag(self, interaction_id: str, tag: Tag) -> None:
        """Mark an interaction after the fact, for example superseded."""
        ...

    async def reward(self, session_id: str, reward: float, interaction_id: str | None) -> str:
        """Set (overwrite) a reward; None = the last finished interaction that is no side request, superseded or
        aborted. Returns the interaction id. Raises NotFound for an unknown id, BadRequest if there is none yet."""
        ...

    async def end(self, session_id: str, ending: Ending) -> Session:
        """End a running session; ending an ended one changes nothing and returns it as it is."""
        ...

    async def interactions(self, session_id: str) -> tuple[Interaction, ...]:
        """In finishing order of `index`."""
        ...

    async def touch(self, session_id: str) -> None:
        """The session is active now."""
        ...

    async def expire(self, idle_since: float, busy: Sequence[str]) -> tuple[Session, ...]:
        """End, as expired, the running sessions last active before `idle_since` (seconds since the epoch), except
        `busy` ones (a request is in flight). Returns those it ended."""
        ...


class TrainingStore(Protocol):
    """What the controller reads and decides; written by the controller alone."""

    async def set_limits(self, limits: Limits) -> None: ...

    async def ready(self) -> tuple[EndedGroup, ...]:
        """Accepted groups, oldest first. Groups past their time-out are settled here first."""
        ...

    async def advance(self, version: Version, consumed: Sequence[str]) -> None:
        """One transaction: the version row and the groups that its step trained (settled 4). Opens their slots."""
        ...

    async def drop(self, group_ids: Sequence[str], reason: str) -> None:
        """Never to be trained; counted by reason, its slot opens."""
        ...

    async def account(self, session_id: str, trained: int, masked: Mapping[str, int]) -> None:
        """How many recorded tokens of a consumed session were trained, and how many masked, by reason."""
        ...

    async def current_version(self) -> Version | None: ...

    async def version(self, label: int) -> Version | None:
        """Which step a label stands for; lag is a difference of steps."""
        ...

    async def release_after(self, step: int, incarnation: str) -> int:
        """Recovery to a checkpoint of `step`: groups consumed by later steps are accepted again. Returns how many."""
        ...

    async def counts(self) -> Counts: ...


class Registry(Protocol):
    """Which worker lives where, and a few facts every process of the run needs."""

    async def heartbeat(self, worker: WorkerInfo) -> None: ...

    async def workers(self, alive_within_s: float = 10.0) -> tuple[WorkerInfo, ...]:
        """Live workers with their running sessions counted from the session rows."""
        ...

    async def leave(self, worker_id: str) -> None: ...


class Store(Protocol):
    """An open store. `async with` closes it; queued writes are committed first."""

    sessions: SessionStore
    training: TrainingStore
    registry: Registry

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...
