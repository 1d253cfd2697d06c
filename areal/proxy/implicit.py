"""Sessions that open and close by themselves, for agents that are configured once and never call start_session.

    implicit = ImplicitSessions(store, sessions, keys, worker="w0", agent=config.rollout.agent)
    async with implicit.calling(guest, call, asyncio.current_task()) as live: ...     # NoCapacity -> 429
    key = await implicit.key(guest.topic, interaction_id)                             # for rewards and the end

A topic (web/topic.py) has places 0, 1, 2, …; each is a session key made from topic and place, under which sessions follow
one another. So any worker finds a topic's sessions in the store, and after a restart nothing is forgotten. A client's own
hint has one open session, whatever conversations are in it (settled 24). Without a hint, a call belongs to the session
whose conversation it continues, else it opens one. A session ends after max_turns calls, or when it is idle; where no slot
is free the call waits. Used by callers.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

from areal.base.errors import BadRequest, Conflict, InvalidKey, NoCapacity, NotFound
from areal.base.types import ModelCall, Session, SessionRequest
from areal.config.rollout import AgentConfig
from areal.proxy.live import LiveSession
from areal.proxy.sessions import ENDED_BECAUSE, Sessions
from areal.store.base import Store
from areal.web.auth import SessionKey, SessionKeys
from areal.web.topic import Topic, unknown_answer

_LONGEST_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class Guest:
    """Who calls under the internal token. tags: of the sessions that it opens."""

    topic: Topic
    tags: Mapping[str, str] = field(default_factory=dict)


class ImplicitSessions:
    """Finds, opens and ends them in one worker. One event loop."""

    def __init__(self, store: Store, sessions: Sessions, keys: SessionKeys, *, worker: str, agent: AgentConfig) -> None:
        self._store, self._sessions, self._keys = store, sessions, keys
        self._worker, self._max_turns = worker, agent.max_turns
        self._wait_s = agent.refresh_timeout_seconds
        self._locks: WeakValueDictionary[Topic, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def calling(self, guest: Guest, call: ModelCall, task: asyncio.Task[Any]) -> AsyncIterator[LiveSession]:
        """The session that this task's model call belongs to, opened if need be, and ended with its last turn.

        Raises NoCapacity when no slot became free in refresh_timeout_seconds, BadRequest for a call that names an answer
        of a session that nothing names."""
        key: SessionKey | None = None
        live: LiveSession | None = None
        try:
            async with AsyncExitStack() as stack:
                key, live = await self._admitted(guest, call, task, stack)
                yield live
        finally:
            # The last call to leave ends it; whoever is closing it already waits for this very task.
            if key is not None and live is not None and not live.closing and not live.in_flight and self._full(live):
                await asyncio.shield(self._sessions.end(key))  # also when the client hangs up just now

    async def find(self, topic: Topic, call: ModelCall) -> LiveSession | None:
        """The session that the call would land in if it were made now; None if it would open one."""
        async with self._lock(topic):
            found, _ = await self._look(topic, call)
            return None if found is None else found[1]

    async def key(self, topic: Topic, interaction_id: str | None = None) -> SessionKey:
        """Of the topic's session that holds this answer; without one, of that which began last, the running ones first.

        Raises NotFound if the topic never had one, or none with this answer, InvalidKey if another has taken its place."""
        rows = [(key, row) async for key, row in self._places(topic) if row is not None]
        if not rows:
            raise NotFound("no session was opened under this name yet; make a model call with it first")
        if interaction_id is None:
            return max(rows, key=lambda one: (one[1].ending is None, one[1].started_at))[0]
        held = await self._store.sessions.of_answer(interaction_id)
        for key, row in rows:
            if held is not None and held.key_hash == key.hash:
                if held.id != row.id and held.ending is not None:
                    raise InvalidKey(
                        f"{ENDED_BECAUSE[held.ending]} ({held.id}), and another has begun in its place; "
                        "reward an answer before its session ends, or set rollout.agent.reward_grace_seconds"
                    )
                return key
        raise unknown_answer(interaction_id)

    async def _admitted(
        self, guest: Guest, call: ModelCall, task: asyncio.Task[Any], stack: AsyncExitStack
    ) -> tuple[SessionKey, LiveSession]:
        """Tried until a slot is free: another process's rows decide, and no lock is held while it waits."""
        deadline, pause = time.monotonic() + self._wait_s, 0.02
        while True:
            try:
                async with self._lock(guest.topic):
                    found, free = await self._look(guest.topic, call)
                    key = free if found is None else found[0]
                    if found is None:
                        if call.previous and guest.topic.kind == "conversation":
                            raise _unnamed(call)
                        await self._store.sessions.begin(self._request(guest, key))
                    return key, await stack.enter_async_context(self._sessions.calling(key, task))
            except (NoCapacity, Conflict, InvalidKey):  # full; opened, or ended, by another process meanwhile
                left = deadline - time.monotonic()
                if left <= 0:
                    raise
            await asyncio.sleep(min(pause, left))
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)

    async def _look(self, topic: Topic, call: ModelCall) -> tuple[tuple[SessionKey, LiveSession] | None, SessionKey]:
        """The open session that the call belongs to, and the first place that is free for a new one."""
        free: SessionKey | None = None
        best: tuple[SessionKey, LiveSession] | None = None
        best_rank: tuple[int, bool] = (0, False)
        async for key, row in self._places(topic):
            live = await self._open_one(key, row)
            if live is None:
                free = free or (key if row is None or row.ending is not None else None)
                continue
            unused = not live.conversation.calls and not live.in_flight  # the call that opened it failed
            surely = 1 if topic.kind == "hint" or unused else live.conversation.belongs(call)
            if (rank := (surely, not live.in_flight)) > best_rank and surely:
                best, best_rank = (key, live), rank
        assert free is not None  # the last place was never used
        return best, free

    async def _open_one(self, key: SessionKey, row: Session | None) -> LiveSession | None:
        """The session at a place if it takes calls; a full one that nobody ended (its worker died) is ended here."""
        if row is None or row.ending is not None:
            return None
        try:
            live = await self._sessions.of(key, awake=False)
        except InvalidKey:  # it ended meanwhile; the place is free for the next call
            return None
        if live.closing or not self._full(live):
            return None if live.closing else live
        if not live.in_flight:
            await self._sessions.end(key)
        return None

    async def _places(self, topic: Topic) -> AsyncIterator[tuple[SessionKey, Session | None]]:
        """Every place with its newest session, up to the first that never had one."""
        for place in count():
            key = self._keys.of_topic(topic.text, place)
            row = await self._store.sessions.live(key.hash)
            yield key, row
            if row is None:
                return

    def _full(self, live: LiveSession) -> bool:
        return live.conversation.calls + live.in_flight >= self._max_turns

    def _request(self, guest: Guest, key: SessionKey) -> SessionRequest:
        return SessionRequest(guest.topic.task_id, key.hash, self._worker, tags=guest.tags)

    def _lock(self, topic: Topic) -> asyncio.Lock:
        return self._locks.setdefault(topic, asyncio.Lock())


def _unnamed(call: ModelCall) -> BadRequest:
    return BadRequest(
        f"nothing says which session the answer {call.previous[:80]!r} belongs to; send the header x-session-id (or a "
        "prompt_cache_key) with every call, or send the whole conversation",
        param="previous_response_id",
    )
