"""What a step was made of, written down as it is trained, so that it can be made again: RUN/steps.jsonl.

    with History.open(path, life) as history:              # Life: the configuration as it runs, the ranks' settings, where it began
        history.write(batch, step=7, made=version)
    found = read_history(path)                             # found.lives, found.steps[7], found.altered

Beside it stand the store (what every session recorded, which step consumed it), metrics.jsonl (loss and stats) and the checkpoints;
nothing is written twice but a digest of each session's rows. A line carries a digest of itself, so one that was edited is known. After
a resume the steps that the lost timeline had reached are forgotten, as in metrics.jsonl (T096). One writer. Read by replay.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from areal.base.lines import LineFile
from areal.base.types import Group, Version
from areal.rollout.batch import Batch


@dataclass(frozen=True, slots=True)
class Life:
    """One start of a run. first_step: it goes on after that many. started_from: the checkpoint, empty for the model itself. config:
    resolved, secrets masked. ranks: net -> its engine's settings. software: versions of what computes."""

    incarnation: str
    first_step: int
    started_from: str
    config: Mapping[str, Any]
    ranks: Mapping[str, Mapping[str, Any]]
    software: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Trained:
    """One training step. weights: label of the weights it trained. made: the version it made. lags: label -> steps behind. groups: in the
    order of the batch, group id -> session id -> digest of its rows, empty where the session was left out as too old."""

    step: int
    weights: int
    made: Version
    lags: Mapping[int, int]
    groups: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a steps.jsonl says of one timeline. lives: those with steps on it, in order. altered: numbers of lines, from 1, that are not as
    they were written."""

    lives: tuple[Life, ...]
    steps: Mapping[int, Trained]
    altered: tuple[int, ...]

    def life_of(self, step: int) -> Life:
        """The life that trained a step."""
        return next(life for life in reversed(self.lives) if life.incarnation == self.steps[step].made.incarnation)


class History:
    """Appends; each line is on its way to the disk when `write` returns."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)

    @classmethod
    def open(cls, path: Path, life: Life) -> Self:
        history = cls(path)
        history._append("life", life)
        return history

    def write(self, batch: Batch, *, step: int, made: Version) -> None:
        """The step is published."""
        digests = session_digests(batch.groups)
        members = batch.members
        groups = {
            group.id: {session: digests.get(session, "") for session in members[group.id]} for group in batch.groups
        }
        self._append("step", Trained(step, batch.weights.label, made, batch.lags, groups))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def _append(self, kind: str, what: Life | Trained) -> None:
        text = msgspec.json.encode(what)
        self._file.append(b'{"check": "%s", "%s": %s}' % (_check(text).encode(), kind.encode(), text))


class _Line(msgspec.Struct):
    check: str
    life: msgspec.Raw = msgspec.Raw()
    step: msgspec.Raw = msgspec.Raw()


def read_history(path: Path) -> Recorded:
    """Read a file, also while it is being written. Raises OSError if there is none."""
    lives: list[Life] = []
    steps: dict[int, Trained] = {}
    altered: list[int] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found = msgspec.json.decode(line, type=_Line)
            text = bytes(found.life) or bytes(found.step)
            if _check(text) != found.check:
                altered.append(number)
            if bytes(found.life):
                life = msgspec.json.decode(text, type=Life)
                steps = {step: trained for step, trained in steps.items() if step < life.first_step}
                lives.append(life)
            else:
                trained = msgspec.json.decode(text, type=Trained)
                steps[trained.step] = trained
        except msgspec.MsgspecError:  # cut by a crash, or nothing of ours
            continue
    known = {life.incarnation for life in lives}
    steps = {step: trained for step, trained in steps.items() if trained.made.incarnation in known}
    alive = {trained.made.incarnation for trained in steps.values()}
    return Recorded(tuple(life for life in lives if life.incarnation in alive), steps, tuple(altered))


def session_digests(groups: tuple[Group, ...]) -> dict[str, str]:
    """Session id -> digest of everything that is trained of it: ids, masks, log-probs, versions, temperatures, rewards."""
    found: dict[str, blake2b] = {}
    for group in groups:
        for row in group.trajectories:
            own = found.setdefault(row.session_id, blake2b(digest_size=8))
            for array in (row.token_ids, row.trained, row.logprobs, row.versions, row.temperatures):
                own.update(np.ascontiguousarray(array).tobytes())
            own.update(
                json.dumps([[span.start, span.end, span.raw_reward, span.reward] for span in row.spans]).encode()
            )
    return {session: own.hexdigest() for session, own in found.items()}


def _check(text: bytes) -> str:
    return blake2b(text, digest_size=8).hexdigest()
