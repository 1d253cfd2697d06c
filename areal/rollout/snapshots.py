"""When the run is saved, and from where it goes on.

    snapshots = Snapshots(folder.checkpoints, nets, freq_steps=20, keep=2)
    await snapshots.save_if_due(step)                  # after `step` trained steps
    found = latest(folder.checkpoints)                 # Snapshot(step=120, path=...) or None

A checkpoint is complete or absent; the pointer `latest` moves last; older ones are pruned only then, so there is always a
good one (T081). Consumption rows carry their step: a resume to step s frees what later steps consumed (settled 4).
"""

from __future__ import annotations

import asyncio
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from areal.base.atomic import write_atomic
from areal.base.logs import announce, warn
from areal.engine.checkpoint_files import critic_beside, is_complete
from areal.engine.nets import Nets

_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True)
class Snapshot:
    step: int
    path: Path


class Snapshots:
    """Saves through the nets, moves the pointer, prunes."""

    def __init__(self, folder: Path, nets: Nets, *, freq_steps: int | None, keep: int) -> None:
        self._folder = folder
        self._nets = nets
        self._freq_steps = freq_steps
        self._keep = keep
        self._saved: int | None = None

    async def save_if_due(self, step: int) -> None:
        if self._freq_steps and step % self._freq_steps == 0:
            await self.save(step)

    async def save(self, step: int) -> None:
        """Save the state after `step` trained steps, unless it is saved already."""
        if step == self._saved:
            return
        path = self._folder / f"step-{step:06d}"
        await self._nets.save(str(path), step=step, full=True)
        write_atomic(self._folder / "latest", path.name.encode())
        self._saved = step
        announce("RLTrainer", f"checkpoint of step {step} saved to {path}")
        await asyncio.to_thread(self._prune, path)

    def _prune(self, newest: Path) -> None:
        complete = [snapshot.path for snapshot in _all(self._folder) if is_complete(snapshot.path)]
        for path in complete[: -self._keep]:
            if path != newest:
                shutil.rmtree(path)
                if critic_beside(path).is_dir():
                    shutil.rmtree(critic_beside(path))


def latest(folder: Path) -> Snapshot | None:
    """The newest complete checkpoint; an incomplete newer one is skipped with a warning and left alone."""
    for snapshot in reversed(_all(folder)):
        if is_complete(snapshot.path):
            return snapshot
        warn("RLTrainer", f"{snapshot.path} is incomplete (saving was interrupted); an older checkpoint is used")
    return None


def _all(folder: Path) -> list[Snapshot]:
    """By step."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if (name := _NAME.fullmatch(path.name)) and path.is_dir():
            found.append(Snapshot(int(name[1]), path))
    return sorted(found, key=lambda snapshot: snapshot.step)
