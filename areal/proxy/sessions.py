"""Session lifecycle in one worker: key -> running session, refresh, ending, expiry, take-over.

    sessions = Sessions(store, keys, worker="w0", policy=SessionPolicy.of(config.rollout.agent))
    row, key_text = await sessions.start(StartRequest(task_id="task-1"))     # NoCapacity -> 429
    async with sessions.calling(key, asyncio.current_task()) as live: ...    # InvalidKey -> 401
    await sessions.reward(key, 1.0, None)
    row = await sessions.end(key)

The store's rows decide; what lies here is a cache of them and the calls in flight. A session that another process started
is loaded on first use (a dead worker's sessions are taken over that way), and one that rests is let go of: its next call loads
it again. While a key is being refreshed its model calls are held and land whole in the new session (settled 11). Used by
app.py and control.py; expiry and letting go run in `serving()`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from areal.base.errors import ArealError, Conflict, Forbidden, InvalidKey, NoCapacity, StoreUnready, Unavailable
from areal.base.types import Ending, Purpose, Session, SessionRequest
from areal.config.rollout import AgentConfig
from areal.proxy.conversation import Conversation
from areal.proxy.live import LiveSession
from areal.store.base import SessionStore, Store
from areal.web.auth import SessionKey, SessionKeys

_log = logging.getLogger("areal.proxy")

RESTING_S = 300.0
AGAIN_S = 1.0  # between two tries to end a session whose grace is over
RESTING_BYTES = 256 * 2**20
NEVER_STARTED = "no session was ever started with this key; start one with POST /rl/start_session"
ENDED_BECAUSE: Mapping[Ending, str] = {
    "ended": "the session has ended",
    "refreshed": "the session was ended by a refresh",
    "expired": "the session was idle for too long and expired",
    "reward_failed": "the session ended because its reward could not be computed",
    "excluded": "the session was excluded from training",
}


@dataclass(frozen=True, slots=True)
class SessionPolicy:
    """Times in seconds. closing_bound_s: how long calls in flight may go on after end_session.

    resting_s, resting_bytes: a session without a call for so long is let go of, and the longest unused ones when all that
    rest take more memory than this."""

    session_timeout_s: float = 3600.0
    refresh_timeout_s: float = 120.0
    reward_grace_s: float = 0.0
    closing_bound_s: float = 10.0
    resting_s: float = RESTING_S
    resting_bytes: int = RESTING_BYTES

    @classmethod
    def of(cls, agent: AgentConfig, closing_bound_s: float = 10.0) -> SessionPolicy:
        timeout_s = agent.session_timeout_seconds
        return cls(
            timeout_s,
            agent.refresh_timeout_seconds,
            agent.reward_grace_seconds,
            closing_bound_s,
            resting_s=min(RESTING_S, timeout_s / 4),
        )


@dataclass(frozen=True, slots=True)
class StartRequest:
    """A checked start_session body. api_key: refresh this key instead of minting one. max_calls: recorded model calls after which this
    worker refuses further ones, for agents that it starts itself and that have no such limit."""

    task_id: str
    api_key: str | None = None
    purpose: Purpose = "train"
    tags: Mapping[str, str] = field(default_factory=dict)
    request_id: str | None = None
    max_calls: int | None = None


class Sessions:
    """All sessions this worker serves. One event loop."""

    def __init__(
        self,
        store: Store,
        keys: SessionKeys,
        *,
        worker: str,
        policy: SessionPolicy,
        on_end: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._keys = keys
        self._worker = worker
        self._policy = policy
        self._clock = clock  # seconds since the epoch, the store's
        self._on_end = on_end  # for example router.forget
        self._live: dict[str, LiveSession] = {}  # by key hash
        self._refreshing: set[str] = set()  # key hashes
        self._max_calls: dict[str, int] = {}  # by key hash, of those that have such a limit
        # One at a time per key: load, refresh, end. Model calls that come meanwhile wait here and see what became of it.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._draining = False
        self._graced: dict[str, asyncio.Task[None]] = {}  # ended for the client, still open for rewards
        self.broken = asyncio.Event()  # what ends sessions works no more
        self.failure: BaseException | None = None  # why

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Expiry runs inside this block; leaving it ends what only waited for late rewards."""
        loop = asyncio.create_task(self._expire_forever(), name="expire sessions")
        loop.add_done_callback(self._stopped)
        try:
            yield
        finally:
            loop.cancel()
            await asyncio.wait([loop])
            for live in [self._live[key_hash] for key_hash in self._graced]:
                await self._finish(live, "ended")

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """A session that nothing ends never makes room: whoever serves this has to end."""
        if not task.cancelled() and (bug := task.exception()) is not None:
            self.failure = bug
            self.broken.set()

    async def start(self, request: StartRequest) -> tuple[Session, str]:
        """A new session and its key. Raises NoCapacity, Conflict (the key is being refreshed), InvalidKey (forged)."""
        if self._draining:
            raise Unavailable("this worker is shutting down and starts no more sessions; retry in a few seconds")
        if request.api_key is not None:
            return await self._refresh(self._keys.check(request.api_key), request)
        key = self._keys.check(self._keys.mint(self._worker, request.request_id))
        session = await self._store.sessions.begin(self._row_request(key, request))
        if session.worker != key.worker:  # another worker answered this request id first
            key = self._keys.check(self._keys.mint(session.worker, request.request_id))
        if request.max_calls is not None:
            self._max_calls[key.hash] = request.max_calls
        return session, key.text

    @asynccontextmanager
    async def calling(self, key: SessionKey, task: asyncio.Task[Any]) -> AsyncIterator[LiveSession]:
        """The session that this task's model call belongs to, from here to the end of the block. Raises InvalidKey as `of`, Forbidden where
        it has had all its calls."""
        live = await self.of(key)  # no await between this and `calling`: nothing can end it in between
        most = self._max_calls.get(key.hash)
        if most is not None and live.conversation.calls >= most:
            raise Forbidden(
                f"session {live.id} has had its {most} model calls (rollout.agent.max_turns); end the task with what there is"
            )
        with live.calling(task):
            yield live

    async def of(self, key: SessionKey, *, awake: bool = True) -> LiveSession:
        """The running session under a key, loaded from the store if need be. Held while the key is being refreshed.

        awake: a session that was long idle counts as active. Raises InvalidKey: never started, ended, expired."""
        async with self._lock(key.hash):
            return await self._load(key.hash, awake=awake)

    async def reward(self, key: SessionKey, reward: float, interaction_id: str | None) -> str:
        """Set a reward on the last finished answer (all its choices), or on a named answer or choice.

        Returns its id. Raises NotFound, BadRequest (nothing recorded yet), InvalidKey (ended)."""
        live = await self._rewardable(key)
        try:
            return await set_reward(self._store.sessions, live.id, reward, interaction_id)
        except InvalidKey as error:
            raise _too_late(error) from None

    async def end(self, key: SessionKey, ending: Ending = "ended") -> Session:
        """End the session: admission closes, calls in flight finish or are aborted, durable when this returns.

        A repeated end returns the same row. With reward_grace_seconds it stays open for rewards that long."""
        async with self._lock(key.hash):
            row = await self._store.sessions.live(key.hash)
            if row is None:
                raise InvalidKey(NEVER_STARTED)
            if row.ending is not None:
                return row
            live = await self._load(key.hash)
            await live.close(self._policy.closing_bound_s)
            if not self._policy.reward_grace_s or ending != "ended":
                return await self._finish(live, ending)
            if key.hash not in self._graced:
                self._graced[key.hash] = asyncio.create_task(self._end_later(live), name=f"grace {live.id}")
                self._graced[key.hash].add_done_callback(self._stopped)
            return await self._store.sessions.get(live.id) or row

    async def exclude(self, session_id: str, because: str, *, delete: bool) -> Session:
        """Keep a session, of whichever worker, out of training; its calls in flight here are cut at once. Raises NotFound,
        Conflict (SessionStore.exclude). Another worker cuts them off with its next round of expiry."""
        row = await self._store.sessions.exclude(session_id, because, delete=delete)
        live = self._live.get(row.key_hash)
        if live is not None and live.id == row.id:
            await self._cut_off(live)
        return row

    async def look(self, key: SessionKey) -> tuple[Session, int]:
        """The running session under a key, else the newest ended one, and its calls in flight. Raises InvalidKey."""
        row = await self._store.sessions.live(key.hash)
        if row is None:
            raise InvalidKey(NEVER_STARTED)
        live = self._live.get(key.hash)
        return row, live.in_flight if live is not None and live.id == row.id else 0

    def model_key(self, key: SessionKey) -> str:
        """A key that opens the model routes of this session and nothing else."""
        return self._keys.model_key(key)

    async def drain(self, bound_s: float = 20.0) -> None:
        """Start no more sessions; wait until no model call is in flight, at most bound_s. The sessions live on in the
        store, and another process takes them over."""
        self._draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(bound_s):
                await asyncio.gather(*(live.idle() for live in list(self._live.values())))

    def counts(self) -> dict[str, int]:
        """Sessions that this process serves, and model calls in flight."""
        return {"sessions": len(self._live), "calls": sum(live.in_flight for live in self._live.values())}

    def _lock(self, key_hash: str) -> asyncio.Lock:
        return self._locks.setdefault(key_hash, asyncio.Lock())

    async def _load(self, key_hash: str, *, awake: bool = True) -> LiveSession:
        row = await self._store.sessions.live(key_hash)
        cached = self._live.get(key_hash)
        if row is None:
            raise InvalidKey(NEVER_STARTED)
        if row.ending is not None:
            self._forget(row)
            raise InvalidKey(f"{ENDED_BECAUSE[row.ending]} ({row.id}); start it again with POST /rl/start_session")
        if awake and self._clock() - row.last_active_at > self._policy.session_timeout_s / 2:
            await self._store.sessions.touch(row.id)  # before expiry takes it under the call's hands
        # Another worker may have served it meanwhile; our own calls in flight add rows by themselves.
        if (
            cached is not None
            and cached.id == row.id
            and (cached.in_flight or cached.closing or row.interaction_count <= len(cached.conversation))
        ):
            return cached
        live = LiveSession(row, Conversation(await self._store.sessions.interactions(row.id)))
        self._live[key_hash] = live
        return live

    async def _rewardable(self, key: SessionKey) -> LiveSession:
        try:
            return self._live.get(key.hash) or await self.of(key)  # also one whose admission has closed
        except InvalidKey as error:
            raise _too_late(error) from None

    async def _refresh(self, key: SessionKey, request: StartRequest) -> tuple[Session, str]:
        if key.hash in self._refreshing:
            raise Conflict("this key is being refreshed by another start_session; wait for its answer")
        self._refreshing.add(key.hash)
        try:
            async with self._lock(key.hash):
                row = await self._store.sessions.live(key.hash)
                again = row is not None and row.request_id == request.request_id is not None  # its answer was lost
                if row is not None and row.ending is None and not again:
                    live = await self._load(key.hash)
                    await live.close(self._policy.closing_bound_s)
                    await self._finish(live, "refreshed")
                return await self._begin_when_free(key, request), key.text
        finally:
            self._refreshing.discard(key.hash)

    async def _begin_when_free(self, key: SessionKey, request: StartRequest) -> Session:
        """Try until a slot is free; slots are rows that other processes change, so this looks again and again."""
        deadline = time.monotonic() + self._policy.refresh_timeout_s
        pause = 0.02
        while True:
            try:
                return await self._store.sessions.begin(self._row_request(key, request))
            except NoCapacity:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise
                await asyncio.sleep(min(pause, left))
                pause = min(pause * 1.5, 0.5)

    def _row_request(self, key: SessionKey, request: StartRequest) -> SessionRequest:
        return SessionRequest(
            task_id=request.task_id,
            key_hash=key.hash,
            worker=self._worker,
            purpose=request.purpose,
            tags=request.tags,
            request_id=request.request_id,
        )

    async def _finish(self, live: LiveSession, ending: Ending) -> Session:
        row = await self._store.sessions.end(live.id, ending)
        self._forget(row)
        return row

    async def _cut_off(self, live: LiveSession) -> None:
        """The session has ended in the store, without this process."""
        await live.close(0.0)
        self._forget(live.session)

    def _forget(self, row: Session) -> None:
        """A session that has ended, whether it is held here or was let go of."""
        self._max_calls.pop(row.key_hash, None)
        live = self._live.get(row.key_hash)
        if live is not None and live.id == row.id:
            live.closing = True
            del self._live[row.key_hash]
            grace = self._graced.pop(row.key_hash, None)
            if grace is not None and grace is not asyncio.current_task():
                grace.cancel()
        self._on_end(row.id)

    def _let_rest(self) -> None:
        """Let go of sessions that nobody has called for a while; the store has all of them."""
        resting = [
            (key_hash, live)
            for key_hash, live in self._live.items()
            if not live.in_flight and not live.closing and key_hash not in self._locks
        ]
        resting.sort(key=lambda one: one[1].used_at)
        size, now = sum(live.conversation.size for _, live in resting), time.monotonic()
        for key_hash, live in resting:
            if size <= self._policy.resting_bytes and now - live.used_at <= self._policy.resting_s:
                return
            size -= live.conversation.size
            del self._live[key_hash]

    async def _end_later(self, live: LiveSession) -> None:
        await asyncio.sleep(self._policy.reward_grace_s)
        while True:
            try:
                await self._finish(live, "ended")
                return
            except StoreUnready as error:  # it stays open for rewards meanwhile
                _log.warning("session %s is ended as soon as it can be written: %s", live.id, error)
                await asyncio.sleep(AGAIN_S)

    async def _expire_forever(self) -> None:
        """End idle sessions of any worker; a session with a call in flight is kept awake by its own worker."""
        period = min(30.0, max(0.05, self._policy.session_timeout_s / 4))
        while True:
            await asyncio.sleep(period)
            try:
                await self.expire_idle()
            except ArealError as error:  # the store is busy or full: the next round tries again
                _log.warning("expiry of idle sessions failed, it is tried again in %.0f s: %s", period, error)

    async def expire_idle(self) -> tuple[Session, ...]:
        """One round of expiry. Returns the sessions it ended; those that only rest are let go of on the way."""
        self._let_rest()
        busy = []
        for live in [one for key, one in self._live.items() if one.in_flight or key in self._graced]:
            try:
                await self._store.sessions.touch(live.id)
                busy.append(live.id)
            except InvalidKey:  # another process has ended it
                await self._cut_off(live)
        idle_since = self._clock() - self._policy.session_timeout_s
        expired = await self._store.sessions.expire(idle_since, busy)
        for row in expired:
            self._forget(row)
            _log.info("session %s expired after %.0f s without a call", row.id, self._policy.session_timeout_s)
        return expired


async def set_reward(store: SessionStore, session_id: str, reward: float, interaction_id: str | None) -> str:
    """Reward the last finished answer with all its choices, or what is named. Returns its id; raises as the store does."""
    named = await store.reward(session_id, reward, interaction_id)
    if interaction_id is None and "#" in named:
        named = await store.reward(session_id, reward, named.partition("#")[0])
    return named


def _too_late(error: InvalidKey) -> InvalidKey:
    reason = str(error).removeprefix("Invalid API key: ")
    return InvalidKey(
        f"{reason}; rewards are set before end_session, or within rollout.agent.reward_grace_seconds of it"
    )
