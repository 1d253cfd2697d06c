"""From where a run goes on: the newest recovery state that is whole and its own.

    start = take_up(config, folder)
    start.found        # Snapshot(step=120, path=...) or None: from the beginning
    start.model_dir    # the folder that servers and ranks load; None where nothing is trained
    start.adapter_dir  # of the LoRA adapter that goes on beside it; None where there is none yet
    start.origin       # which model the run began with, for the marks of its checkpoints
    await check_store(start, store.training)    # ConfigError where the store is another run's, or older than the checkpoint
    Lives(config.recover, folder.checkpoints).again()       # whether a run whose process died begins again by itself

Every byte of a candidate is checked before a process starts. A damaged one is refused with the last good one named, or, with
recover.mode=auto, set aside (renamed to `….damaged`) and said aloud; where none is good the run does not begin anew by itself. A state
of another model is refused in every mode: the folder is another run's. Used by assemble.py; what is written, and when, is in snapshots.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from areal.base.errors import CheckpointError, ConfigError
from areal.base.logs import warn
from areal.base.types import Version
from areal.cluster.run_folder import RunFolder
from areal.config.run import RecoverConfig, RecoverMode, RunConfig
from areal.engine.checkpoint_files import ADAPTER, Snapshot, checkpoints, critic_beside, damage, looks_whole, read_mark
from areal.models.fetch import resolve
from areal.models.fingerprint import fingerprint
from areal.store.base import TrainingStore
from areal.store.location import has_store

PARTS = {"config": "its architecture differs", "tokenizer": "its tokenizer differs", "weights": "its weights differ"}


@dataclass(frozen=True, slots=True)
class Start:
    """See the module's docstring. version: that the checkpoint's weights were served as; None where there is no checkpoint."""

    found: Snapshot | None
    model_dir: Path | None
    origin: Mapping[str, str]
    version: Version | None = None

    @property
    def adapter_dir(self) -> Path | None:
        return (self.found.path / ADAPTER).parent if self.found and self.found.path != self.model_dir else None

    @property
    def step(self) -> int:
        return self.found.step if self.found else 0


def take_up(config: RunConfig, folder: RunFolder) -> Start:
    """Raises ConfigError where the folder must not be gone on with, CheckpointError where it should be and cannot."""
    if config.recover.mode == "off" and has_store(folder.root):
        raise ConfigError(
            f"{folder.root} holds a run already and recover.mode is off: choose another trial_name, or recover.mode=auto"
        )
    if not config.actor.path:
        return Start(None, None, {})
    found = newest_good(folder.checkpoints, config.recover.mode)
    if found is None:
        base = resolve(config.actor.path)
        return Start(None, base, _origin(config.actor.path, base))
    mark = read_mark(found.path)
    if mark.has_adapter != (config.actor.lora is not None):
        how, remedy = ("with", "back in") if mark.has_adapter else ("without", "out")
        raise ConfigError(
            f"{found.path} was trained {how} actor.lora: take the section {remedy}, or begin another run (trial_name) with actor.path set to "
            "a saved model"
        )
    origin = _same_origin(config, mark.about, found)
    version = msgspec.convert(mark.about.get("version"), Version | None)
    return Start(found, resolve(config.actor.path) if mark.has_adapter else found.path, origin, version)


async def check_store(start: Start, training: TrainingStore) -> None:
    """A version's row is written before a checkpoint of it. Raises ConfigError where there is none: what was trained, the data's place and
    the labels in use would be another run's, or forgotten."""
    made = start.version
    if start.found is None or made is None or await training.version(made.label) == made:
        return
    newest = await training.version()
    known = "is empty" if newest is None else f"knows versions up to {newest.label}, and not this one"
    raise ConfigError(
        f"{start.found.path} was saved as version {made.label} of {made.incarnation!r}, but the run's store {known}: it is another run's, or "
        "older. Put the run's own store back, or move this checkpoint away to go on from an earlier one; or begin another run "
        f"(trial_name) with actor.path={start.found.path}"
    )


class Lives:
    """How often in a row a run begins again by itself: `retries` times until there is a newer recovery state."""

    def __init__(self, recover: RecoverConfig, folder: Path) -> None:
        """folder: of its checkpoints."""
        self._retries = recover.retries if recover.mode != "off" else 0
        self._folder = folder
        self._left = self._retries
        self._newest = self._newest_state()

    def again(self) -> bool:
        """Whether once more; counted."""
        newest = self._newest_state()
        if newest > self._newest:
            self._newest, self._left = newest, self._retries
        self._left -= 1
        return self._left >= 0

    def __str__(self) -> str:
        return f"{self._retries - self._left} of {self._retries} (recover.retries)"

    def _newest_state(self) -> int:
        whole = (found for found in checkpoints(self._folder) if looks_whole(found.path))
        return next((found.step for found in whole if read_mark(found.path).resumable), -1)


def newest_good(folder: Path, mode: RecoverMode = "auto") -> Snapshot | None:
    """The newest whole recovery state below `folder`, None where there is none of any kind; see the module's docstring."""
    tidy(folder)
    damaged: dict[Path, str] = {}
    good = None
    for candidate in checkpoints(folder):
        if _only_a_model(candidate.path):
            continue
        reason = damage(candidate.path, recovery=True) or _misnamed(candidate)
        if reason is None:
            good = candidate
            break
        damaged[candidate.path] = reason
    if good is None and damaged:
        reasons = "; ".join(damaged.values())
        raise CheckpointError(
            f"no recovery state in {folder} is good: {reasons}. Put one back, or begin another run (trial_name) with actor.path set "
            "to a saved model"
        )
    if good is None and mode == "on":
        raise CheckpointError(f"recover.mode is on and {folder} holds no recovery state; use auto to begin a run")
    for path, reason in damaged.items():
        if mode != "auto":
            raise CheckpointError(
                f"{reason}. The last good one is {good.path if good else 'none'}: recover.mode=auto goes on from there"
            )
        aside = _set_aside(path)
        warn("RLTrainer", f"{reason}. It stands as {aside.name} now; the run goes on from {good.path if good else ''}")
    return good


def tidy(folder: Path) -> None:
    """Remove what a killed writer left; a checkpoint that was being replaced gets its name back. The run lock is held."""
    for path in folder.glob(".*") if folder.is_dir() else ():
        if path.suffix == ".former" and not (own := path.with_name(path.stem[1:])).exists():
            path.rename(own)
        elif path.suffix in (".partial", ".former", ".old"):
            shutil.rmtree(path)


def _only_a_model(path: Path) -> bool:
    try:
        return not read_mark(path).resumable
    except CheckpointError:
        return False


def _misnamed(candidate: Snapshot) -> str | None:
    step = read_mark(candidate.path).step
    return None if step == candidate.step else f"{candidate.path} was renamed or copied: it is of step {step}"


def _set_aside(path: Path) -> Path:
    for part in (path, critic_beside(path)):
        if part.exists():
            aside = part.with_name(f"{part.name}.damaged")
            shutil.rmtree(aside, ignore_errors=True)
            part.rename(aside)
    return path.with_name(f"{path.name}.damaged")


def _origin(path: str, folder: Path) -> dict[str, str]:
    return {"path": path, **fingerprint(folder)}


def _same_origin(config: RunConfig, about: Mapping[str, Any], found: Snapshot) -> dict[str, str]:
    """The run's origin, after a look at whether actor.path still names it."""
    wanted, origin = config.actor.path, dict(about.get("origin", {}))
    alone = config.actor.lora is None  # the checkpoint has all that is needed
    try:
        now = _origin(wanted, resolve(wanted))
    except ConfigError:
        if alone and wanted == origin.get("path"):
            return origin
        raise
    differs = [part for part in PARTS if origin and now[part] != origin[part]]
    if alone and differs == ["weights"] and wanted == origin["path"]:
        return origin  # the same name, fetched or built anew since
    if differs:
        raise ConfigError(
            f"{found.path} belongs to another model: the run began with actor.path={origin['path']}, now it is {wanted}, and "
            f"{', '.join(PARTS[part] for part in differs)}; set it back, or choose another trial_name"
        )
    if bool(about.get("critic")) != (config.critic is not None):
        raise ConfigError(
            f"{found.path} was saved {'with' if about.get('critic') else 'without'} a critic; set the critic section as it was, or "
            f"begin another run (trial_name) with actor.path={found.path}"
        )
    return origin
