"""Routing: from a request's keys to the worker that holds its session.

    target = await KeyRouter().route(exchange, run)        # Target("w0", "http://127.0.0.1:41873")

The key says the logical worker, the store's registry says where that worker lives now; nothing else is kept, so any
number of gateways stand side by side and restart freely. A reading of the registry is at most a second old. New sessions
go to the live worker with the fewest running sessions, counting those that this gateway has just sent. implicit.py is the
router of the internal token, which has no worker in it (settled 24).
Errors: InvalidKey, Forbidden, WorkerGone. Used by app.py; attachment.py opens the Run.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Protocol

import msgspec

from areal.base.errors import BackendError, BadRequest, Forbidden, InvalidKey, StoreError
from areal.base.types import WorkerInfo
from areal.store import REQUEST_PATIENCE_S
from areal.store.base import Registry, SessionStore, TrainingStore
from areal.web.auth import SessionKey, SessionKeys, opens, presented_keys

if TYPE_CHECKING:
    from areal.gateway.exchange import Exchange

READING_AGE_S = 1.0
LONG_SILENCE_S = 3600.0  # that old may the heartbeats be where none is fresh
LAST_READING_S = REQUEST_PATIENCE_S  # while the store cannot be read the last reading serves as long as a worker waits


class WorkerGone(BackendError):
    """The worker that this request needs does not live now; it, or one that takes it over, may be back soon."""

    retry_after_s = 2


@dataclass(frozen=True, slots=True)
class Target:
    """Where a request goes, and what the gateway adds to its headers on the way."""

    worker: str
    url: str
    headers: tuple[tuple[str, str], ...] = ()


class Directory:
    """The live workers, read from the registry at most once a second."""

    def __init__(self, registry: Registry, *, reading_age_s: float = READING_AGE_S) -> None:
        self._registry, self._age_s = registry, reading_age_s
        self._workers: tuple[WorkerInfo, ...] = ()
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()
        self._starting: Counter[str] = Counter()  # start_session calls under way
        self._started: Counter[str] = Counter()  # finished since the last reading
        self._refused: dict[str, float] = {}  # url -> when it refused a connection

    async def live(self, *, anew: bool = False) -> tuple[WorkerInfo, ...]:
        """Live workers in the order of their ids. anew: read the registry now."""
        asked = time.monotonic()
        if not anew and asked - self._read_at < self._age_s:
            return self._workers
        async with self._reading:
            if self._read_at > asked or (not anew and time.monotonic() - self._read_at < self._age_s):
                return self._workers  # read by another task while this one waited
            try:
                # Nobody's heartbeat is fresh while the store cannot be written: those that were there can say so themselves.
                workers = await self._registry.workers() or await self._registry.workers(LONG_SILENCE_S)
            except StoreError:
                if time.monotonic() - self._read_at > LAST_READING_S:
                    raise
                return self._workers
            self._workers = tuple(sorted(workers, key=lambda worker: worker.id))
            self._read_at = time.monotonic()
            self._started.clear()
            return self._workers

    async def place_of(self, topic: str) -> Target:
        """The live worker that a topic always goes to, while it lives (rendezvous hashing). Raises WorkerGone."""
        workers = await self.live() or await self.live(anew=True)
        if not workers:
            raise WorkerGone("no rollout worker is reachable; check that the service runs, then retry")
        worker = max(workers, key=lambda one: sha256(f"{one.id}\0{topic}".encode("utf-8", "surrogatepass")).digest())
        return Target(worker.id, worker.url)

    async def find(self, worker_id: str) -> Target:
        """Where this logical worker lives now. Raises WorkerGone."""
        for anew in (False, True):
            for worker in await self.live(anew=anew):
                if worker.id == worker_id:
                    return Target(worker.id, worker.url)
        raise WorkerGone(
            f"worker {worker_id}, which holds this session, is not reachable; check that the service runs, then retry: "
            "its sessions are kept and taken up again"
        )

    async def by_load(self) -> list[Target]:
        """All live workers, the one with the fewest running sessions first. Raises WorkerGone if there is none.

        A worker that refused a connection comes last until it has sent another heartbeat."""
        workers = await self.live() or await self.live(anew=True)
        if not workers:
            raise WorkerGone("no rollout worker is reachable; check that the service runs, then retry")

        def load(worker: WorkerInfo) -> tuple[bool, int, str]:
            refused = self._refused.get(worker.url, 0.0) >= worker.heartbeat_at
            running = worker.running_sessions + self._starting[worker.id] + self._started[worker.id]
            return refused, running, worker.id

        return [Target(worker.id, worker.url) for worker in sorted(workers, key=load)]

    @contextmanager
    def starting(self, target: Target) -> Iterator[None]:
        """A session is being started there; it counts as running until the registry has it."""
        self._starting[target.worker] += 1
        try:
            yield
        finally:
            self._starting[target.worker] -= 1
            self._started[target.worker] += 1

    def refused(self, target: Target) -> None:
        """This worker did not take a connection."""
        self._refused = {url: at for url, at in self._refused.items() if at > time.time() - 60}
        self._refused[target.url] = time.time()


@dataclass(frozen=True, slots=True)
class Run:
    """A training run that this gateway serves. keys checks session keys; admin_key opens the admin routes; sessions are read
    where only an answer's id says which session is meant, training for whether sessions may start."""

    id: str
    directory: Directory
    keys: SessionKeys
    admin_key: str = field(repr=False)
    model_names: tuple[str, ...] = ("default",)
    internal_token: str | None = field(default=None, repr=False)
    channel_token: str | None = field(default=None, repr=False)
    sessions: SessionStore = field(kw_only=True, repr=False)
    training: TrainingStore = field(kw_only=True, repr=False)


class Router(Protocol):
    """Maps a request to its worker. May look into the body, and may add headers for the worker."""

    async def route(self, exchange: Exchange, run: Run) -> Target: ...


class KeyRouter:
    """The router of keys that carry their worker, and of the admin key."""

    async def route(self, exchange: Exchange, run: Run) -> Target:
        """Raises InvalidKey (no key, forged, of another service), Forbidden (a good key of the wrong kind)."""
        presented = presented_keys(exchange.headers)
        access = exchange.route.access
        if access in ("admin", "start"):
            check_admin(presented, run, exchange.route.name)
            held_by = await _refreshed_worker(exchange, run) if access == "start" else None
            return held_by or (await run.directory.by_load())[0]
        try:
            key = run.keys.session_key(presented, model_only=not exchange.route.upstream.startswith("/rl/"))
        except (InvalidKey, Forbidden):
            if not opens(presented, run.admin_key):
                raise
            if access == "any_key":
                return (await run.directory.by_load())[0]
            raise InvalidKey(
                f"the admin key does not open {exchange.route.name}; use the session key that start_session gave"
            ) from None
        return await run.directory.find(key.worker)


def check_admin(presented: Sequence[str], run: Run, call: str) -> None:
    """Raises Forbidden for a session key, InvalidKey for anything else that is not the admin key."""
    if opens(presented, run.admin_key):
        return
    if presented and session_key(presented, run) is not None:
        raise Forbidden(f"a session key may not call {call}; use the admin key, rollout.agent.admin_api_key")
    if opens(presented, run.internal_token):
        raise Forbidden(f"the internal token may not call {call}; its sessions open and close by themselves")
    raise InvalidKey(f"{call} takes the admin key; check rollout.agent.admin_api_key")


def session_key(presented: Sequence[str], run: Run) -> SessionKey | None:
    """The good session key among those presented, also a model-only one, None if there is none."""
    try:
        return run.keys.session_key(presented, model_only=True)
    except InvalidKey:
        return None


class _StartBody(msgspec.Struct):
    api_key: str | None = None


async def _refreshed_worker(exchange: Exchange, run: Run) -> Target | None:
    """The worker of the key that this start_session refreshes; None if it asks for a new session.

    Raises BadRequest for a body that is no such request, InvalidKey for a foreign or forged key."""
    body = await exchange.decoded_body()
    try:
        key = msgspec.json.decode(body or b"{}", type=_StartBody).api_key
    except (msgspec.MsgspecError, RecursionError) as error:  # the latter: nested deeper than the decoder goes
        raise BadRequest(f'the body of start_session is {{"task_id": "…", "api_key": null}}: {error}') from None
    return await run.directory.find(run.keys.check(key).worker) if key else None
