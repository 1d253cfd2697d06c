"""The update's state machine: the rank publishes, the servers swap, the gate moves on. It sees both ends.

    async with WeightPublisher(engine, servers, workers, gate, quorum=1) as publisher:      # servers: url -> Backend
        version = await publisher.publish(consumed=batch.group_ids)

Each server swaps all-or-nothing between two of its own steps; a running request goes on under the new weights and its tokens
say so. The version counts as published when a quorum serves it (settled 8). A server that fails to load it, or does not answer
within weights.load_timeout_seconds, keeps its old weights and its old label; before the gate moves on every worker stops using
it, and it is asked again in the background until it serves the current version. With fewer than the quorum the run ends with the
first server's reason. The copy of the version before is retired when the next one is published: by then every
server in service has it, and one that is out is asked again with the newest. Used by train.py; servers.py tells the workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Self

from areal.base.errors import ArealError, BackendError
from areal.base.logs import announce, warn
from areal.base.types import Version
from areal.engine.client import EngineClient
from areal.inference.backend import Backend
from areal.rollout.servers import tell_workers
from areal.rollout.staleness import StalenessGate
from areal.web.client import JsonClient

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
        quorum: int = 1,
    ) -> None:
        self._engine = engine
        self._servers = servers
        self._workers = workers
        self._gate = gate
        self._quorum = quorum
        self._published: list[int] = []
        self._newest: dict[str, Any] = {}  # the manifest of the last version that was published
        self._returning: dict[str, asyncio.Task[None]] = {}  # url of a server that is out -> what brings it back
        self._changing = asyncio.Lock()  # one at a time: a version moves, or a server comes back

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        tasks = list(self._returning.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def out(self) -> tuple[str, ...]:
        """URLs of the servers that get no traffic, because they do not serve the current version."""
        return tuple(self._returning)

    async def publish(self, consumed: Sequence[str]) -> Version:
        """Publish what the engine holds now. Raises BackendError if fewer than the quorum could load it; the gate stays."""
        async with self._changing:
            for task in self._returning.values():
                if task.done():
                    task.result()  # it ended by a bug: raise it here
            version = self._gate.next_version()
            await self._gate.reserve(version)
            self._newest = await self._engine.publish(version.label, retire=self._published)
            self._published = [version.label]
            failed = await self._load_everywhere(version.label)
            for url, reason in failed.items():
                warn(
                    "RLTrainer", f"inference server {url} gets no traffic until it serves the current weights: {reason}"
                )
                self._returning[url] = asyncio.create_task(self._bring_back(url), name=f"bring back {url}")
            # Also where nothing changed: a worker that heard of a return that then failed must not use that server.
            if self._returning:
                await self._tell_workers()
            await self._gate.advance(version, consumed)
        return version

    async def _load_everywhere(self, label: int) -> dict[str, ArealError]:
        """Every server in service loads the newest version. Returns those that did not, with their reasons."""
        serving = [url for url in self._servers if url not in self._returning]
        results = await asyncio.gather(
            *(self._servers[url].load_weights(self._newest, label) for url in serving), return_exceptions=True
        )
        failed: dict[str, ArealError] = {}
        for url, result in zip(serving, results, strict=True):
            if isinstance(result, ArealError):
                failed[url] = result
            elif isinstance(result, BaseException):
                raise result
        if len(serving) - len(failed) < self._quorum:
            out = len(self._servers) - len(serving) + len(failed)
            reason = next(iter(failed.values()))
            raise BackendError(
                f"{out} of {len(self._servers)} inference servers could not load version {label}, "
                f"weights.quorum={self._quorum} must: {reason}"
            ) from reason
        return failed

    async def _bring_back(self, url: str) -> None:
        """Ask a server that is out until it serves the current version, then let the workers use it again.

        The first try leaves publishing alone, since it may hang; a server that has just answered is asked for what was published
        meanwhile while nothing else is, so that one that loads more slowly than the run steps comes back too."""
        pause = ASK_AGAIN_S
        while True:
            await asyncio.sleep(pause)
            try:
                loaded = await self._servers[url].load_weights(self._newest, int(self._newest["version"]))
                async with self._changing:
                    if loaded != self._gate.current.label:
                        await self._servers[url].load_weights(self._newest, self._gate.current.label)
                    await self._tell_workers(returning=url)
                    del self._returning[url]
                    announce(
                        "RLTrainer",
                        f"inference server {url} serves version {self._gate.current.label} and is used again",
                    )
                    return
            except ArealError as reason:
                pause = min(2 * pause, LONGEST_PAUSE_S)
                announce("RLTrainer", f"inference server {url} is still out, asked again in {pause:.0f} s: {reason}")

    async def _tell_workers(self, *, returning: str = "") -> None:
        await tell_workers(
            self._workers, [url for url in self._servers if url not in self._returning or url == returning]
        )
