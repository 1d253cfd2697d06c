"""What the service holds, read from its files and from outside: store, training log, checkpoints. Judged by judge.py.

    held = read_held(run)                                   # the small facts, in one transaction
    held.groups["g3"].step, held.sessions["t-1"].ending, held.answers["chatcmpl-…"].reward
    held.timeline                                           # step -> the version that stands for it, lost ones left out
    checkpoints(run), trained(run)

The store is read by SQL of its own, not through the product's reading side, so that what that side hides would be seen.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open


@dataclass(frozen=True, slots=True)
class HeldSession:
    """request: the request_id by which its client started it. group: empty for none. dropped: why it is never trained."""

    id: str
    request: str
    group: str
    ending: str
    dropped: str = ""
    account: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HeldAnswer:
    """tokens: sampled ones."""

    id: str
    session: str
    tokens: int
    reward: float | None = None
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HeldGroup:
    """step, incarnation: of the step that trained it, None and empty before. dropped: the reason, empty where it is not."""

    id: str
    task: str
    accepted: bool
    step: int | None = None
    incarnation: str = ""
    dropped: str = ""
    dropped_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Published:
    """A row of the store's versions."""

    label: int
    step: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class Held:
    """One consistent look at the store."""

    sessions: Mapping[str, HeldSession]
    answers: Mapping[str, HeldAnswer]
    groups: Mapping[str, HeldGroup]
    versions: tuple[Published, ...]  # by label

    @property
    def timeline(self) -> dict[int, Published]:
        """Step -> the version that its training made. A life that goes on from step c makes what others did after c a lost timeline.

        A label that was taken for a step of which nothing is consumed yet makes no step."""
        consumed = {(group.step, group.incarnation) for group in self.groups.values()}
        last = {version.incarnation: version.label for version in self.versions}
        found: dict[int, Published] = {}
        incarnation = ""
        for version in self.versions:
            if version.incarnation != incarnation:
                incarnation = version.incarnation
                found = {step: one for step, one in found.items() if step <= version.step}
                found.setdefault(
                    version.step, version
                )  # where it starts: another life made that step, but at the very first
            elif last[incarnation] != version.label or (version.step, incarnation) in consumed:
                found[version.step] = version
        return found


@dataclass(frozen=True, slots=True)
class Trained:
    """What the trainer says of a step: a row of metrics.jsonl."""

    step: int  # the number of the version it made
    label: int
    sessions: int
    recorded_tokens: int
    trained_tokens: int
    updates: int
    at: float  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete one: both its files open, its facts are JSON."""

    step: int
    updates: int  # of the optimizer


NOTHING = Held({}, {}, {}, ())


def read_held(run: Path) -> Held:
    """Of a run folder; NOTHING where the run died before it had made a store."""
    store = run / "store.sqlite"
    if not store.exists():
        return NOTHING
    with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True, timeout=60)) as connection:
        connection.row_factory = sqlite3.Row
        connection.execute("BEGIN")
        if not connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'versions'").fetchone():
            return NOTHING
        return _held(connection)


def _held(connection: sqlite3.Connection) -> Held:
    accounts: dict[int, dict[str, int]] = {}
    for row in connection.execute("SELECT * FROM token_accounts"):
        accounts.setdefault(row["session_seq"], {})[row["reason"]] = row["tokens"]
    names, sessions = {}, {}
    for row in connection.execute("SELECT * FROM sessions"):
        names[row["seq"]] = row["id"]
        sessions[row["id"]] = HeldSession(
            row["id"],
            row["request_id"] or "",
            "" if row["group_seq"] is None else f"g{row['group_seq']}",
            row["ending"] or "",
            row["drop_reason"] or "",
            accounts.get(row["seq"], {}),
        )
    answers = {
        row["id"]: HeldAnswer(
            row["id"], names[row["session_seq"]], row["output_tokens"], row["reward"], tuple(json.loads(row["tags"]))
        )
        for row in connection.execute("SELECT * FROM interactions")
    }
    groups = {
        f"g{row['seq']}": HeldGroup(
            f"g{row['seq']}",
            row["task_id"],
            row["accepted_at"] is not None,
            row["consumed_step"],
            row["consumed_incarnation"] or "",
            row["drop_reason"] or "",
            row["dropped_at"] or 0.0,
        )
        for row in connection.execute("SELECT * FROM task_groups")
    }
    versions = connection.execute("SELECT label, step, incarnation FROM versions ORDER BY label")
    return Held(sessions, answers, groups, tuple(Published(*row) for row in versions))


def checkpoints(run: Path) -> dict[int, Checkpoint]:
    """The complete checkpoints of a run, by step."""
    found = {}
    for folder in (run / "checkpoints").glob("step-*"):
        try:
            facts = json.loads((folder / "recovery" / "state.json").read_text())
            for file in (folder / "model.safetensors", folder / "recovery" / "pieces-0.safetensors"):
                with safe_open(file, "numpy"):
                    pass
        except (OSError, ValueError, SafetensorError):
            continue
        found[int(facts["step"])] = Checkpoint(int(facts["step"]), int(facts["optimizer_steps"]))
    return found


def trained(run: Path) -> list[Trained]:
    """All rows of training that the trainer has written, those of lost timelines too."""
    file, found = run / "logs" / "metrics.jsonl", []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:  # a kill cut it
            continue
        if "train/version" in row:
            numbers = ("version", "sessions", "recorded_tokens", "trained_tokens", "updates")
            found.append(Trained(row["step"] + 1, *(int(row[f"train/{name}"]) for name in numbers), row["time"]))
    return found
