"""The update's state machine: the rank publishes, every backend swaps, the gate moves on. It sees both ends.

    publisher = WeightPublisher(engine, backends, gate)
    version = await publisher.publish(consumed=batch.group_ids)

Each backend swaps all-or-nothing between two of its own steps; a running request goes on under the new weights and its
tokens say so. The version counts as published when every backend serves it; one that cannot load it ends the run with its
reason, and a run that is started again serves its checkpoint's version everywhere before a session begins (settled 8). The copy
of the version before is retired only afterwards, so a reader never loses the file under its hands. Used by train.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from areal.base.errors import BackendError
from areal.base.types import Version
from areal.engine.client import EngineClient
from areal.inference.backend import Backend
from areal.rollout.staleness import StalenessGate


class WeightPublisher:
    """Moves one version from the engine to the backends."""

    def __init__(self, engine: EngineClient, backends: Sequence[Backend], gate: StalenessGate) -> None:
        self._engine = engine
        self._backends = backends
        self._gate = gate
        self._published: list[int] = []

    async def publish(self, consumed: Sequence[str]) -> Version:
        """Publish what the engine holds now. Raises BackendError if a backend could not load it; the gate stays."""
        version = self._gate.next_version()
        manifest = await self._engine.publish(version.label, retire=self._published)
        self._published = [version.label]
        results = await asyncio.gather(
            *(backend.load_weights(manifest, version.label) for backend in self._backends), return_exceptions=True
        )
        failures = [result for result in results if isinstance(result, BaseException)]
        for failure in failures:
            if not isinstance(failure, BackendError):
                raise failure
        if failures:
            raise BackendError(
                f"{len(failures)} of {len(results)} inference servers could not load version {version.label}: {failures[0]}"
            ) from failures[0]
        await self._gate.advance(version, consumed)
        return version
