"""Whom to kill and when: anywhere, or at the moments at which a careless service loses something.

    plan(seed=7, kills=200)                                # Kill(("rank",), "saving", after_steps=2), … the same for the same seed
    came = MOMENTS["saving"](watch)                        # returns at that moment; False: it did not come within PATIENCE_S

Each looks from outside, in a tight loop, at what the run leaves on disk (its store, checkpoints, shared memory) or the clients in their
journals: what is seen has just happened, and what it was for is still going on.
"""

from __future__ import annotations

import json
import random
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from areal.weights.shared_memory import FOLDER, run_prefix
from tests.faults.target import KINDS

PATIENCE_S = 25.0
TICK_S = 0.001
STARTING = "starting"  # while the run starts; whoever comes first of the victims that live by then


@dataclass(frozen=True, slots=True)
class Kill:
    """victims: kinds of process, killed at once. after_steps: so many are trained first, as far as they come."""

    victims: tuple[str, ...]
    moment: str
    after_steps: int


class Watch:
    """What a moment may look at. run: the run folder. journals: the clients'."""

    def __init__(self, run: Path, journals: Path, chance: random.Random) -> None:
        self.run, self.journals, self.random = run, journals, chance

    def saving(self) -> set[str]:
        """Checkpoints that are being written: what lies beside the finished ones."""
        folder = self.run / "checkpoints"
        return {path.name for path in folder.iterdir() if path.name.startswith(".")} if folder.is_dir() else set()

    def published(self) -> set[str]:
        """Weights in shared memory, whole or on their way."""
        return {path.name for path in FOLDER.glob(f"{run_prefix(self.run)}*-v*")}

    def last(self, what: str) -> float:
        """When a client last wrote a record of this kind (seconds since the epoch), as far as the ends of the journals tell."""
        newest = 0.0
        for path in self.journals.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 65536))
                lines = file.read().splitlines(keepends=True)
            for line in lines[-6:]:
                if line.startswith(b"{") and line.endswith(b"}\n") and (record := json.loads(line))["what"] == what:
                    newest = max(newest, record["at"])
        return newest


def soon(watch: Watch) -> bool:
    """Any time: between nothing and a few steps from now."""
    time.sleep(watch.random.expovariate(1 / 1.5))
    return True


def consumed(watch: Watch) -> bool:
    """A step has just been consumed in the store; its checkpoint is not written."""
    store = f"file:{watch.run / 'store.sqlite'}?mode=ro"
    with closing(sqlite3.connect(store, uri=True, timeout=60)) as connection:
        return _changes(lambda: connection.execute("SELECT count(consumed_step) FROM task_groups").fetchone()[0])


def saving(watch: Watch) -> bool:
    """In the middle of writing a checkpoint."""
    known = watch.saving()
    return _until(lambda: watch.saving() - known)


def publishing(watch: Watch) -> bool:
    """New weights have left the rank, or are about to; the server swaps, nothing is consumed yet."""
    known = watch.published()
    came = _until(lambda: watch.published() - known)
    time.sleep(watch.random.uniform(0, 0.03))
    return came


def streaming(watch: Watch) -> bool:
    """A client has just read the first chunk of a stream."""
    return _changes(lambda: watch.last("streaming"))


def calling(watch: Watch) -> bool:
    """A model call has just left."""
    return _changes(lambda: watch.last("sent"))


def rewarded(watch: Watch) -> bool:
    """A reward was acknowledged; the session's end is on its way."""
    return _changes(lambda: watch.last("rewarded"))


def ending(watch: Watch) -> bool:
    """The end of a session has just been asked for."""
    return _changes(lambda: watch.last("ending"))


def beginning(watch: Watch) -> bool:
    """A session, new or in another's place, has just been asked for."""
    return _changes(lambda: watch.last("starting"))


Moment = Callable[[Watch], bool]
MOMENTS: dict[str, Moment] = {
    one.__name__: one
    for one in (soon, consumed, saving, publishing, streaming, calling, rewarded, ending, beginning)
}  # fmt: skip


def plan(seed: int, kills: int) -> list[Kill]:
    """At least so many; a seed gives the same ones on any machine."""
    chance, found = random.Random(seed), list[Kill]()
    while sum(len(kill.victims) if kill.moment != STARTING else 1 for kill in found) < kills:
        if chance.random() < 0.12:
            found.append(Kill(tuple(chance.sample(KINDS, len(KINDS))), STARTING, 0))
            continue
        victims = tuple(chance.sample(KINDS, 2 if chance.random() < 0.15 else 1))
        found.append(Kill(victims, chance.choice([*MOMENTS, "soon"]), chance.randint(0, 3)))
    return found


def _changes(value: Callable[[], object]) -> bool:
    known = value()
    return _until(lambda: value() != known)


def _until(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(TICK_S)
    return True
