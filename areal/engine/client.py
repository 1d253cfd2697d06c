"""The controller's end of a rank: typed commands out, typed replies back, one TCP link on loopback.

    async with EngineClient(ready["url"], run_token) as engine:
        stats = await engine.train_step(rows, 3, 3)
        manifest = await engine.publish(version=4, retire=[2])
    written = await engine.begin_save(path, 4, full=True)      # training goes on; `await written` waits for the disk

Of a net on several ranks it is the leader, rank 0, that it talks to. The ranks watch each other (chorus.py); only where none of them says
anything, this end does. A link that breaks
is ProcessDied for every call that waits and every later one; the rank's last log lines come from its scheduler. What a rank refuses is raised here
as the error it raised there. No torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar

import numpy as np

from areal.base.errors import ProcessDied
from areal.base.types import FloatArray
from areal.engine import commands
from areal.engine.chorus import patience
from areal.engine.commands import Command, Done, Published, Reply, Row, Scored, Stepped
from areal.engine.link import Link, raise_if_failed

LAST_WORD = 6
"""Times `patience`: when nobody else is to be waited for."""

_Reply = TypeVar("_Reply", Scored, Stepped, Published, Done)


class EngineClient:
    """One link to one rank. Calls may overlap; the rank takes them one at a time, in the order sent."""

    def __init__(self, url: str, token: str, *, within_s: float | None = None) -> None:
        """url: tcp://HOST:PORT as the rank reported. within_s: what the ranks allow themselves for a command; one that has not answered
        well after that hangs. Entering connects; raises as Link does."""
        self.url = url
        self._limit_s = None if within_s is None else within_s + LAST_WORD * patience(within_s)
        self._link = Link(url, token)
        self._next = 0

    async def __aenter__(self) -> Self:
        await self._link.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def score(self, rows: Sequence[Row], *, base: bool = False) -> list[FloatArray]:
        """Log-probs under the current weights, one array [n] per row, 0 where not trained. base: without the net's adapter."""
        request = self._number()
        reply = await self._call(commands.Score(request, list(rows), base), Scored)
        return [np.frombuffer(values, dtype="<f4").astype(np.float32) for values in reply.logprobs]

    async def train_step(
        self, rows: Sequence[Row], step: int, current_version: int, lags: Mapping[int, int] | None = None
    ) -> dict[str, float]:
        """One training step; stats as in commands.Stepped. current_version: label of the weights that are being trained; lags:
        how many steps each label in the rows is behind it."""
        request = self._number()
        command = commands.TrainStep(request, list(rows), step, current_version, dict(lags or {}))
        return (await self._call(command, Stepped)).stats

    async def publish(self, version: int, *, retire: Sequence[int] = ()) -> dict[str, Any]:
        """The manifest of the current weights under this label; labels in `retire` are freed before that."""
        request = self._number()
        return (await self._call(commands.Publish(request, version, list(retire)), Published)).manifest

    async def begin_save(
        self, path: str, step: int, *, full: bool, model: bool = True, about: Mapping[str, Any] | None = None
    ) -> asyncio.Task[dict[str, Any]]:
        """Ask for a checkpoint folder on the rank's disk; returns once the command is sent. full: with what `restore` needs; model: with what
        transformers loads.

        Steps that are asked for from here on change nothing in it. Await the result for when it is written: `held_seconds`,
        `write_seconds`, `bytes`; raises CheckpointError if it could not be."""
        request = self._number()
        reply = await self._link.send(commands.Save(request, path, step, full, model, dict(about or {})))
        return asyncio.create_task(self._written(reply), name=f"write {path}")

    async def _written(self, reply: asyncio.Future[Reply]) -> dict[str, Any]:
        return self._expected(await reply, Done, "Save").info

    async def save(self, path: str, step: int, *, full: bool) -> dict[str, Any]:
        """The same, and wait until it is written."""
        return await (await self.begin_save(path, step, full=full))

    async def restore(self, path: str) -> dict[str, Any]:
        """Go on from a full checkpoint; returns its facts (`step`, `optimizer_steps`)."""
        request = self._number()
        return (await self._call(commands.Restore(request, path), Done)).info

    async def stop(self) -> None:
        """Ask the rank to end; it answers, then exits 0."""
        request = self._number()
        await self._call(commands.Stop(request), Done)

    async def close(self) -> None:
        """Close the link; the rank goes on."""
        await self._link.close()

    def _number(self) -> int:
        self._next += 1
        return self._next

    async def _call(self, command: Command, expected: type[_Reply]) -> _Reply:
        asked = type(command).__name__
        try:
            async with asyncio.timeout(self._limit_s):
                reply = await self._link.ask(command)
        except TimeoutError:
            raise ProcessDied(
                f"the rank at {self.url}, which leads its net, hangs: it has not answered {asked} for {self._limit_s:.0f} s "
                "(actor.step_timeout_seconds and some more); see its log, and whether it was stopped"
            ) from None
        return self._expected(reply, expected, asked)

    def _expected(self, reply: Reply, expected: type[_Reply], asked: str) -> _Reply:
        raise_if_failed(reply)
        if not isinstance(reply, expected):
            raise ProcessDied(f"the rank at {self.url} answered {type(reply).__name__} to {asked}")
        return reply
