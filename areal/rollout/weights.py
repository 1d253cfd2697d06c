"""New weights, from the rank to the servers to the gate: does what the state machine in update.py says, and tells it what came of it.

    async with WeightPublisher(engine, servers, workers, gate, quorum=1) as publisher:      # servers: url -> Backend
        version = await publisher.publish(consumed=batch.group_ids)

Each server swaps all-or-nothing between two of its own steps; a running request goes on under the new weights and its tokens
say so. The version counts as published when a quorum serves it (settled 8). A server that refuses it or runs out of time keeps its
old weights and its old label; before the gate moves on every worker stops using it, and it is asked again in the background until it
serves the current version. A server whose process dies is taken out at once and started again (cluster/kept.py), and gets no request before
it serves the current version. With fewer than the quorum the run ends with the first server's reason. Deadlines: weights.load_timeout_seconds
for the rank's part and for each server's, servers.TELL_S for the workers, the store's own for the gate. The copy of the version before is
retired when the next one is published. Used by train.py; servers.py tells the workers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

from areal.base.errors import ArealError, BackendError, BackendTimeout, ProcessDied, TrainingError, WeightsRefused
from areal.base.logs import announce, warn
from areal.base.types import Version
from areal.cluster.kept import KeptProcess
from areal.cluster.scheduler import DEATH_S
from areal.engine.client import EngineClient
from areal.inference.backend import Backend
from areal.inference.client import LOAD_S
from areal.rollout.servers import tell_workers
from areal.rollout.staleness import StalenessGate
from areal.rollout.update import Action, Advance, AskAgain, End, Load, Publish, Restart, Step, Tell, Update
from areal.web.client import JsonClient

_log = logging.getLogger("areal.rollout")

ASK_AGAIN_S = 1.0  # a server that is out: the first pause before it is asked again; each further one is twice as long
LONGEST_PAUSE_S = 30.0


class WeightPublisher:
    """Moves one version after the other from the engine to the servers, and knows which of them serve the current one."""

    def __init__(
        self,
        engine: EngineClient,
        servers: Mapping[str, Backend],
        workers: Sequence[JsonClient],
        gate: StalenessGate,
        *,
        kept: Sequence[KeptProcess] = (),
        quorum: int = 1,
        timeout_s: float = LOAD_S,
    ) -> None:
        """kept: the servers' processes in their order, where they are to be started again. timeout_s: for the rank's part of a version; the
        servers' own is in their clients."""
        self._engine = engine
        self._urls = list(servers)
        self._backends = list(servers.values())
        self._workers = workers
        self._gate = gate
        self._kept = list(kept)
        self._timeout_s = timeout_s
        self._state = Update.of(servers=len(servers), quorum=quorum, current=gate.current.label)
        self._published: list[int] = []
        self._newest: dict[str, Any] = {}  # the manifest of the last version that was published
        self._consumed: Sequence[str] = ()
        self._version: asyncio.Future[Version] | None = None  # what `publish` waits for
        self._failure: BaseException | None = None  # why no version can be published any more
        self._ended = asyncio.Event()  # there is a failure
        self._reasons: dict[int, ArealError] = {}  # why a server is out
        self._refusals: Counter[int] = Counter()  # in a row, per server
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        for index in range(len(self._kept)):
            self._start(self._watch(index), f"watch {self._kept[index].name}")
        return self

    async def __aexit__(self, *exc: object) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def out(self) -> tuple[str, ...]:
        """URLs of the servers that get no traffic, because they do not serve the current version."""
        return tuple(url for url, server in zip(self._urls, self._state.servers, strict=True) if not server.serving)

    @property
    def kept(self) -> frozenset[str]:
        """Names of the processes whose death is dealt with here."""
        return frozenset(process.name for process in self._kept)

    async def failure(self) -> None:
        """Returns never; raises why no version can be published any more."""
        await self._ended.wait()
        assert self._failure is not None
        raise self._failure

    async def publish(self, consumed: Sequence[str]) -> Version:
        """Publish what the engine holds now. Raises BackendError if fewer than the quorum could load it, and what the arrow that
        failed raised; the gate stays."""
        if self._failure is not None:  # in the background, since the version before
            raise self._failure
        self._consumed = consumed
        self._version = asyncio.get_running_loop().create_future()
        self._go(self._state.begin(self._gate.next_version().label))
        return await self._version

    def _go(self, step: Step) -> None:
        self._state, actions = step
        for action in actions:
            self._start(self._do(action), str(action))

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            _log.error("the update of the weights broke at %s", task.get_name(), exc_info=bug)
            self._end(bug)

    def _end(self, reason: BaseException) -> None:
        """The run ends: with the version that is being published, or with what it waits for."""
        self._failure = self._failure or reason
        self._ended.set()
        if self._version is not None and not self._version.done():
            self._version.set_exception(reason)

    async def _do(self, action: Action) -> None:
        try:
            match action:
                case Publish(label):
                    await self._publish(label)
                case Load(index, attempt, label):
                    await self._load(index, attempt, label)
                case AskAgain(index):
                    await asyncio.sleep(min(ASK_AGAIN_S * 2 ** min(self._refusals[index], 10), LONGEST_PAUSE_S))
                    self._go(self._state.due(index))
                case Restart(index):
                    await self._restart(index)
                case Tell(serial, serving):
                    await self._tell(serial, serving)
                case Advance():
                    version = self._gate.next_version()
                    await self._gate.advance(version, self._consumed)
                    self._go(self._state.advanced())
                    assert self._version is not None
                    if not self._version.done():  # else the last server was lost at this very moment
                        self._version.set_result(version)
                case End("load"):
                    self._end(self._too_few())
        except ArealError as reason:  # of the rank, of the workers or of the store: `publish` raises it as it is
            self._go(self._state.failed())
            self._end(reason)

    async def _publish(self, label: int) -> None:
        await self._gate.reserve(self._gate.next_version())
        try:
            async with asyncio.timeout(self._timeout_s):
                self._newest = await self._engine.publish(label, retire=self._published)
        except TimeoutError:
            raise TrainingError(
                f"the rank did not publish version {label} within {self._timeout_s:g} s; see its log, or raise "
                "weights.load_timeout_seconds"
            ) from None
        self._published = [label]
        self._go(self._state.published())

    async def _watch(self, index: int) -> None:
        """Of one life of a server's process: its end is noticed at once."""
        reason = await self._kept[index].death()
        self._reasons[index] = reason
        warn(
            "RLTrainer",
            f"an inference server has ended; it gets no requests until it is started again and up to date: {reason}",
        )
        self._go(self._state.process(index, "died"))

    async def _restart(self, index: int) -> None:
        process = self._kept[index]
        try:
            await process.again()
        except ProcessDied as reason:
            self._reasons[index] = reason
            warn("RLTrainer", f"inference server {self._urls[index]} is given up: {reason}")
            self._go(self._state.process(index, "gone"))
        else:
            announce("RLTrainer", f"{process.name} is started again, and loads the current weights")
            self._start(self._watch(index), f"watch {process.name}")
            self._go(self._state.process(index, "up"))

    async def _died(self, index: int, reason: ArealError) -> bool:
        """Whether a load failed because the process ended: the broken link is seen first. Then `_watch` says what is to be done."""
        if not self._kept or isinstance(reason, WeightsRefused | BackendTimeout):
            return False
        with suppress(TimeoutError):
            await asyncio.wait_for(self._kept[index].death(), DEATH_S)
            return True
        return False

    async def _loaded(self, index: int, label: int) -> None:
        """Raises the server's reason. Before the first version was published it has what it was started with."""
        backend = self._backends[index]
        if self._newest:
            await backend.load_weights(self._newest, label)
        elif (served := (await backend.health()).version) != label:
            raise BackendError(f"it serves version {served}, not {label}, and nothing is published yet")

    async def _load(self, index: int, attempt: int, label: int) -> None:
        url, was_serving = self._urls[index], self._state.servers[index].serving
        try:
            await self._loaded(index, label)
        except ArealError as reason:
            if await self._died(index, reason):
                return
            self._reasons[index] = reason
            said = f"{url} {'gets no traffic until it serves the current weights' if was_serving else 'is still out'}: {reason}"
            if was_serving:
                self._refusals[index] = 0
                warn("RLTrainer", f"inference server {said}")
            else:
                self._refusals[index] += 1
                announce("RLTrainer", f"inference server {said}")
            self._go(self._state.load_failed(index, attempt))
        else:
            self._go(self._state.loaded(index, attempt))
            if not was_serving and self._state.servers[index].serving:
                announce("RLTrainer", f"inference server {url} serves version {label} and is used again")

    async def _tell(self, serial: int, serving: frozenset[int]) -> None:
        try:
            await tell_workers(self._workers, [self._urls[index] for index in sorted(serving)], serial=serial)
        except ArealError as reason:
            self._go(self._state.tell_failed(serial))
            if self._state.phase == "ended":
                self._end(reason)
        else:
            self._go(self._state.told(serial))

    def _too_few(self) -> BackendError:
        reason = self._reasons[min(set(range(len(self._urls))) - self._state.serving)]
        error = BackendError(
            f"{len(self.out)} of {len(self._urls)} inference servers could not load version {self._state.newest}, "
            f"weights.quorum={self._state.quorum} must: {reason}"
        )
        error.__cause__ = reason
        return error
