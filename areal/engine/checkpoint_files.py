"""Checkpoint folders as files: which there are, whether one is whole, what it says of itself. No torch; no tensor is made.

    for found in checkpoints(run / "checkpoints"): found.step, found.path      # newest first, whole or not
    mark = read_mark(path)                             # its completion mark; CheckpointError where there is none
    damage(path, recovery=True)                        # None, or what is missing or altered, in words: every byte is read
    critic_beside(path)                                # checkpoints/critic-000120, where a critic is trained too

The mark (`checkpoint.json`) is the last file written into a folder before that gets its name. It lists every other file with
its size and checksum, and carries its own, so a file that was cut, lost, altered or left over from another save is seen. A folder that holds
`recovery/` is a place to go on from; one without is a model and nothing more. Whoever loads a checkpoint's state goes through
here and through engine/checkpoint.py. Used by rollout/snapshots.py and rollout/recovery.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from areal.base.atomic import write_atomic
from areal.base.digests import checksum, file_damage, safetensors_damage
from areal.base.errors import CheckpointError

MARK = "checkpoint.json"
FORMAT = 4
_READ = (
    2,
    3,
    FORMAT,
)  # 3 was the same without the mark's own checksum, 2 had all state in recovery/optimizer.safetensors
STATE = "recovery/state.json"
MODEL = "model.safetensors"
ADAPTER = "adapter/adapter_model.safetensors"
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True)
class File:
    """One file of a checkpoint: its size in bytes and its checksum (base/digests.py)."""

    bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Mark:
    """What a checkpoint says of itself. files: by their path inside the folder. about: what the controller wrote beside them,
    see rollout/snapshots.py. checksum: of all this, set by write_mark."""

    format: int
    step: int
    files: Mapping[str, File]
    about: Mapping[str, Any] = field(default_factory=dict)
    checksum: str = ""

    @property
    def resumable(self) -> bool:
        """It holds what a run needs to go on, not only a model."""
        return STATE in self.files

    @property
    def has_model(self) -> bool:
        """It holds what transformers loads, not only an adapter."""
        return MODEL in self.files

    @property
    def has_adapter(self) -> bool:
        return ADAPTER in self.files


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A checkpoint folder of a run and the step it is named after."""

    step: int
    path: Path


def checkpoints(folder: Path) -> list[Snapshot]:
    """Every `step-…` folder, whole or not, newest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if (name := _NAME.fullmatch(path.name)) and path.is_dir():
            found.append(Snapshot(int(name[1]), path))
    return sorted(found, key=lambda snapshot: -snapshot.step)


def critic_beside(folder: Path) -> Path:
    """Where the critic that belongs to a policy's checkpoint lies."""
    return folder.with_name(f"critic-{folder.name.rpartition('-')[2]}")


def read_mark(folder: Path) -> Mark:
    """The completion mark. Raises CheckpointError where it is missing, unreadable, altered or of another format."""
    path = folder / MARK
    try:
        mark = msgspec.json.decode(path.read_bytes(), type=Mark)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{folder} is no complete checkpoint: it has no {MARK}, which is written last; name a folder that areal saved"
        ) from None
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); use an earlier checkpoint") from None
    if mark.format not in _READ:
        raise CheckpointError(
            f"{folder} is of format {mark.format}, this version reads {' and '.join(map(str, _READ))}; use the version of areal that wrote it"
        )
    if mark.checksum != _checksum(mark) and (mark.checksum or mark.format == FORMAT):
        raise CheckpointError(f"{path} is not what was written; use an earlier checkpoint")
    return mark


def write_mark(folder: Path, mark: Mark) -> None:
    """Put the mark in place, whole and durable; the last thing that happens to a checkpoint."""
    text = json.dumps(asdict(replace(mark, checksum=_checksum(mark))), indent=1)
    write_atomic(folder / MARK, text.encode() + b"\n")


def describe(path: Path) -> File:
    """A small file as it is now."""
    data = path.read_bytes()
    return File(len(data), checksum(data))


def looks_whole(folder: Path) -> bool:
    """The mark is there, and every file it lists has its size; a critic that belongs to it too. Cheap: no data is read."""
    try:
        mark = read_mark(folder)
        sizes = all((folder / name).stat().st_size == file.bytes for name, file in mark.files.items())
    except (CheckpointError, FileNotFoundError):
        return False
    return sizes and (not _wants_critic(mark) or looks_whole(critic_beside(folder)))


def damage(folder: Path, *, recovery: bool, part: tuple[int, int] = (0, 1)) -> str | None:
    """What is wrong with a checkpoint, in words; None where every byte is what was written. recovery: it must also hold what a run
    needs to go on, its critic's part included. part: (number, of how many) of the files is all that is looked at, where others do the
    rest. Raises OSError where a file is there and cannot be read."""
    try:
        mark = read_mark(folder)
    except CheckpointError as error:
        return str(error)
    if recovery and not mark.resumable:
        return f"{folder} has no recovery state; it is a model and no place to go on from"
    number, parts = part
    for name, file in sorted(mark.files.items(), key=lambda one: -one[1].bytes)[number::parts]:
        check = safetensors_damage if name.endswith(".safetensors") else file_damage
        if found := check(folder / name, size=file.bytes, checksum=file.checksum):
            return f"{folder} is damaged: {found}"
    if not (recovery and _wants_critic(mark)):
        return None
    critic = critic_beside(folder)
    try:
        same = read_mark(critic).about.get("save") == mark.about.get("save")
    except CheckpointError as error:
        return str(error)
    if not same:
        return f"{critic} was saved with another checkpoint than {folder}"
    return damage(critic, recovery=True)


def without_recovery(folder: Path) -> None:
    """Make a mere model of it: the mark first, so that a kill in between leaves a whole checkpoint with files it does not list."""
    mark = read_mark(folder)
    kept = {name: file for name, file in mark.files.items() if not name.startswith("recovery/")}
    write_mark(folder, replace(mark, files=kept))


def _checksum(mark: Mark) -> str:
    return checksum(json.dumps(asdict(replace(mark, checksum="")), sort_keys=True).encode())


def _wants_critic(mark: Mark) -> bool:
    return mark.resumable and bool(mark.about.get("critic"))
