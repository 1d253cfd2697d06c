"""When the run is saved: two kinds of checkpoint, written beside training.

    snapshots = Snapshots(folder.checkpoints, nets, schedules, keep=2, origin=start.origin, found=start.found, metrics=metrics)
    async with snapshots:
        await snapshots.save_if_due(version, groups)   # after a step, which trained so many; returns as soon as a copy of the state is in memory
        await snapshots.save(version)                  # at the end: waits until it is on disk

`saver` keeps models for people, `recover` what the run itself goes on from; one folder serves both where both are due. One is
written at a time; the next waits for it. What cannot be written (a full disk) is said aloud, training goes on and the last
good one stands; at the end it is an error. Older ones are pruned only after a newer one is complete, and the newest two recovery
states always stay (T081). Consumption rows carry their step: a resume to step s frees what later steps consumed (settled 4), so a
checkpoint needs no row of its own in the store. What is gone on from is chosen in recovery.py.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from areal.base.atomic import write_atomic
from areal.base.errors import ArealError, CheckpointError, ProcessDied
from areal.base.logs import announce, warn
from areal.base.metrics import MetricsFile
from areal.base.types import Version
from areal.engine.checkpoint_files import (
    Snapshot,
    checkpoints,
    critic_beside,
    looks_whole,
    read_mark,
    without_recovery,
    write_mark,
)
from areal.engine.nets import Nets

KEPT_STATES = 2  # the newest, and the one before it for the case that the newest is damaged
SAY_S = 30.0  # a wait for the disk longer than this is said, and again every so often
Purpose = Literal["saver", "recover"]


@dataclass(slots=True)
class Schedule:
    """When one kind is due; any of the three. epoch_groups: groups of one pass over the tasks; 0 without a data set."""

    freq_steps: int | None = None
    freq_epochs: int | None = None
    freq_secs: float | None = None
    epoch_groups: int = 0
    since: float = field(default_factory=time.monotonic)  # of the last save that was begun

    def due(self, step: int, now: float, *, trained: int = 0, before: int = 0) -> bool:
        """After `step` trained steps, at `now` (time.monotonic). trained: groups, those of this step too. before: without those."""
        by_steps = bool(self.freq_steps) and step % (self.freq_steps or 1) == 0
        by_time = self.freq_secs is not None and now - self.since >= self.freq_secs
        return by_steps or by_time or self._passes(trained) > self._passes(before)

    def _passes(self, groups: int) -> int:
        return groups // (self.epoch_groups * self.freq_epochs) if self.freq_epochs and self.epoch_groups else 0


class Snapshots:
    """Saves through the nets, moves the pointer, prunes."""

    def __init__(
        self,
        folder: Path,
        nets: Nets,
        schedules: Mapping[Purpose, Schedule],
        *,
        keep: int | None,
        origin: Mapping[str, str],
        found: Snapshot | None = None,
        trained: int = 0,
        metrics: MetricsFile | None = None,
    ) -> None:
        """trained: groups that the steps up to now have trained; which pass over the tasks the run is in follows from it."""
        self._folder = folder
        self._nets = nets
        self._schedules = schedules
        self._keep = keep
        self._origin = origin
        self._metrics = metrics
        self._trained = trained
        self._in_use = found.path if found else None  # servers and ranks were started from it
        self._last = found
        self._writing: asyncio.Task[None] | None = None
        self._failed: ArealError | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._writing is not None:
            self._writing.cancel()
            with suppress(asyncio.CancelledError, ArealError):  # the block ends for a reason of its own
                await self._writing

    async def save_if_due(self, version: Version, groups: int) -> None:
        """Begin to save the state that made `version`, for whatever is due. groups: how many its step trained."""
        now, before = time.monotonic(), self._trained
        self._trained += groups
        due: list[Purpose] = [
            purpose
            for purpose, schedule in self._schedules.items()
            if schedule.due(version.step, now, trained=self._trained, before=before)
        ]
        if due:
            await self._begin(version, due)

    async def save(self, version: Version) -> None:
        """For both, and wait until it is on disk. Raises CheckpointError where it could not be written."""
        await self.written()
        mark = read_mark(self._last.path) if self._last is not None and self._last.step == version.step else None
        if self._last is not None and mark is not None and mark.resumable and mark.has_model:
            await asyncio.to_thread(_keep_for, self._last.path, ["recover", "saver"])
            await asyncio.to_thread(prune, self._folder, keep=self._keep, in_use=self._in_use)
        else:
            await self._begin(version, ["recover", "saver"])
            await self.written()
        if self._failed is not None:
            raise CheckpointError(
                f"the end of the run is not saved: {self._failed}; the same command goes on from "
                f"{self._last.path if self._last else 'the start'}"
            ) from self._failed

    async def _begin(self, version: Version, purposes: list[Purpose]) -> None:
        started = time.monotonic()
        await self.written()
        waited = time.monotonic() - started
        for purpose in purposes:
            self._schedules[purpose].since = time.monotonic()
        path = self._folder / f"step-{version.step:06d}"
        about = {"kept_for": sorted(purposes), "version": asdict(version), "origin": dict(self._origin)}
        writing = await self._nets.begin_save(
            str(path), version.step, full="recover" in purposes, model="saver" in purposes, about=about
        )
        self._failed = None
        self._writing = asyncio.create_task(
            self._finish(Snapshot(version.step, path), writing, waited), name=f"checkpoint {path.name}"
        )

    async def written(self) -> None:
        """Wait until nothing is being written, and say so where that takes long."""
        started = time.monotonic()
        while self._writing is not None and not (await asyncio.wait({self._writing}, timeout=SAY_S))[0]:
            announce(
                "RLTrainer",
                f"waiting for {self._writing.get_name()} to be on disk for {time.monotonic() - started:.0f} s; if that disk hangs: while the "
                "run stops, one more Ctrl-C or SIGTERM ends it without",
            )
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    async def _finish(self, saved: Snapshot, writing: asyncio.Task[dict[str, Any]], waited: float) -> None:
        try:
            facts = await writing
        except ProcessDied:
            raise
        except ArealError as error:
            self._failed = error
            self._record(saved.step, {"checkpoint/failed": 1})
            warn(
                "RLTrainer",
                f"the checkpoint of step {saved.step} is not saved: {error}. Training goes on and it is tried again when the next is "
                f"due; the last good one is {self._last.path if self._last else 'none yet'}",
            )
            return
        held, took = waited + facts["held_seconds"], waited + facts["held_seconds"] + facts["write_seconds"]
        self._last = saved
        announce(
            "RLTrainer",
            f"checkpoint of step {saved.step} saved to {saved.path}: {facts['bytes'] / 1e6:.1f} MB in {took:.2f} s, of which training "
            f"waited {held:.3f} s",
        )
        numbers = {"held_seconds": held, "write_seconds": facts["write_seconds"], "bytes": facts["bytes"]}
        self._record(saved.step, {f"checkpoint/{name}": value for name, value in numbers.items()})
        await self._tidy(saved)

    async def _tidy(self, saved: Snapshot) -> None:
        """Beside a checkpoint that stands: none of it is worth a run, and the next one tries it again."""
        pointer = partial(write_atomic, self._folder / "latest", saved.path.name.encode())
        for work in (pointer, partial(prune, self._folder, keep=self._keep, in_use=self._in_use)):
            try:
                await asyncio.to_thread(work)
            except OSError as error:
                warn(
                    "RLTrainer",
                    f"the checkpoint of step {saved.step} stands, but `latest` may name an older one, and older ones may be left: {error}; "
                    "it is tried again with the next",
                )

    def _record(self, step: int, values: Mapping[str, float]) -> None:
        if self._metrics is not None and step > 0:
            self._metrics.write(step - 1, values)


def prune(folder: Path, *, keep: int | None, in_use: Path | None) -> None:
    """Remove what nobody needs any more: all but the newest KEPT_STATES recovery states and the newest `keep` models (None = all).

    What is not whole is neither counted nor touched. in_use: stays as a model."""
    whole = [found.path for found in checkpoints(folder) if looks_whole(found.path)]
    marks = {path: read_mark(path) for path in whole}
    states = [path for path in whole if marks[path].resumable][:KEPT_STATES]
    models = [path for path in whole if "saver" in marks[path].about.get("kept_for", ())][:keep]
    for path in whole:
        if path in states:
            continue
        if path in models or path == in_use:
            if marks[path].resumable:
                without_recovery(path)
                _remove(path / "recovery", critic_beside(path))
        else:
            _remove(path, critic_beside(path))
    with_state = {critic_beside(path) for path in states}
    _remove(*(path for path in folder.glob("critic-*") if path.suffix != ".damaged" and path not in with_state))


def _keep_for(path: Path, purposes: Collection[Purpose]) -> None:
    mark = read_mark(path)
    write_mark(path, replace(mark, about=dict(mark.about) | {"kept_for": sorted(purposes)}))


def _remove(*folders: Path) -> None:
    """Each goes out of sight at once, and then from the disk: a kill in between leaves nothing that looks like a checkpoint."""
    for folder in folders:
        if folder.exists():
            away = folder.with_name(f".{folder.name}.old")
            shutil.rmtree(away, ignore_errors=True)
            folder.rename(away)
            shutil.rmtree(away)
