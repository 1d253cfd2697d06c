"""How a run stands: `areal status RUN` (a running, a stopped or a crashed one), and whether every sum of it holds.

    areal status runs/my-exp/trial-0
    areal status runs/my-exp/trial-0 --json
    status = asyncio.run(look(Path("runs/my-exp/trial-0"))); status.faults

Nothing is changed: the store is opened to be read, beside whatever lives. Exit codes: 0 the sums hold, 1 one does not (the sessions
and groups at fault are named), 2 there is no such run or its store cannot be read. What the words mean: docs/accounting.md.
The sums are those of the store (Reading.balance); this module adds what files and processes say. No torch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from areal.base.errors import ArealError
from areal.base.metrics import MetricsTable
from areal.base.types import Counts, Limits, Version
from areal.cluster.process_tree import members
from areal.cluster.run_folder import RunFolder
from areal.cluster.run_lock import Holder, holder
from areal.config.recorded import Recorded
from areal.engine.checkpoint_files import checkpoints, looks_whole
from areal.store import open_store
from areal.store.balance import Balance
from areal.store.base import Store
from areal.store.location import find_store
from areal.tools.books import as_table, faults_of


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the run. ready: it has reported so; one that starts, also again, has not, and has no pid (0) between two starts.
    heartbeat_seconds: since it last told the store that it lives; None for those that do not."""

    name: str
    pid: int
    alive: bool
    ready: bool = True
    heartbeat_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """step: how many steps its weights were trained. complete: every file is there, as long as it should be."""

    name: str
    step: int
    complete: bool
    saved_at: float


@dataclass(frozen=True, slots=True)
class Status:
    """One look at a run. state: running, stopped (in order) or crashed (its controller is gone without a word). steps, total_steps:
    trained and wanted. version: label being served. lag_mean, lag_max: of the newest logged step. waits_for: empty unless it runs."""

    run: str
    state: Literal["running", "stopped", "crashed"]
    since: float | None
    steps: int
    total_steps: int | None
    version: int | None
    lag_mean: float | None
    lag_max: int | None
    most_lag: int | None
    checkpoint: Checkpoint | None
    processes: tuple[Process, ...]
    waits_for: str
    books: Balance
    faults: tuple[str, ...]


async def look(run: Path) -> Status:
    """Raises ConfigError if the folder holds no run, StoreError if its store cannot be read."""
    url = find_store(run)
    config = Recorded.of(run / "config.yaml")
    metrics = RunFolder.existing(run).metrics()
    async with await open_store(url, read_only=True) as store:
        held = holder(run)
        counts, limits = await store.training.counts(), await store.training.limits()
        version, books = await store.reading.served(), await store.reading.balance()
        processes = await _processes(run, held, store)
    state: Literal["running", "stopped", "crashed"] = (
        "stopped" if held is None else "running" if held.alive else "crashed"
    )
    total = config.number("total_train_steps")
    lag_max = _newest(metrics, "train/lag_max")
    return Status(
        run=f"{run.parent.name}/{run.name}",
        state=state,
        since=held.since if held else None,
        steps=version.step if version else 0,
        total_steps=None if total is None else int(total),
        version=version.label if version else None,
        lag_mean=_newest(metrics, "train/lag_mean"),
        lag_max=None if lag_max is None else int(lag_max),
        most_lag=limits.max_lag if limits else None,
        checkpoint=_checkpoint(run / "checkpoints"),
        processes=processes,
        waits_for=_waits_for(counts, limits, version) if state == "running" else "",
        books=books,
        faults=faults_of(books, metrics),
    )


def as_text(status: Status, now: float) -> str:
    """For a person. now: seconds since the epoch."""
    since = f" since {_clock(status.since)}" if status.since and status.state == "running" else ""
    of = f" of {status.total_steps}" if status.total_steps else ""
    lines = [
        f"{status.run}: {status.state}{since}, {status.steps}{of} steps trained, version {_or_none(status.version)}"
    ]
    if status.lag_max is not None:
        lines.append(
            f"lag: mean {status.lag_mean:.2f}, most {status.lag_max} steps (allowed {_or_none(status.most_lag)})"
        )
    if (saved := status.checkpoint) is not None:
        whole = "" if saved.complete else ", INCOMPLETE: a resume takes an earlier one"
        lines.append(f"last checkpoint: {saved.name}, {_ago(now - saved.saved_at)} ago{whole}")
    else:
        lines.append("last checkpoint: none")
    for process in status.processes:
        heard = "" if process.heartbeat_seconds is None else f", last heard of {_ago(process.heartbeat_seconds)} ago"
        lines.append(f"process {process.name}: {_life(process)} (pid {process.pid or 'none'}{heard})")
    if status.waits_for:
        lines.append(f"now: {status.waits_for}")
    lines += ["", as_table(status.books), ""]
    books = status.books
    lines.append(f"rewards: {books.rewarded} ended sessions have one, {books.unrewarded} have none")
    lines += [f"AT FAULT: {fault}" for fault in status.faults] or ["every sum holds"]
    return "\n".join(lines) + "\n"


def as_json(status: Status) -> str:
    """The same as one object; recorded, trained, masked, … are objects by unit."""
    tree: dict[str, Any] = msgspec.to_builtins(status)
    tree["books"]["total"] = msgspec.to_builtins(status.books.total)
    return json.dumps(tree, indent=2) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """`areal status`. See the module for the exit codes."""
    parser = argparse.ArgumentParser(
        prog="areal status",
        description="How a run stands, and whether everything it recorded is accounted for.",
        epilog="Exit codes: 0 every sum holds, 1 one does not, 2 no such run or its store cannot be read.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run folder")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    options = parser.parse_args(argv)
    try:
        status = asyncio.run(look(options.run.absolute()))
    except ArealError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    sys.stdout.write(as_json(status) if options.json else as_text(status, time.time()))
    return 1 if status.faults else 0


def _newest(metrics: MetricsTable, name: str) -> float | None:
    values = metrics.series(name).values
    return values[-1] if values and math.isfinite(values[-1]) else None


async def _processes(run: Path, held: Holder | None, store: Store) -> tuple[Process, ...]:
    """Of a run that did not end in order: the controller, and what it had started (their files; none is left by an orderly end)."""
    if held is None:
        return ()
    heartbeats = {one.pid: one.heartbeat_at for one in await store.registry.workers(alive_within_s=math.inf)}
    now, found = time.time(), [Process("controller", held.pid, held.alive)]
    for spec in sorted((run / "processes").glob("*.spec.json")):
        name = spec.name.removesuffix(".spec.json")
        living = members(f"{held.marker}:{name}:")
        try:
            pid, ready = int(json.loads((run / "processes" / f"{name}.ready.json").read_bytes())["pid"]), True
        except (OSError, ValueError, KeyError, TypeError):  # it starts, or ends at this moment
            pid, ready = min(living, default=0), False
        heard = heartbeats.get(pid)
        alive = bool(living)
        found.append(Process(name, pid, alive, ready, None if heard is None else max(0.0, now - heard)))
    return tuple(found)


def _life(process: Process) -> str:
    return "GONE" if not process.alive else "alive" if process.ready else "starting"


def _checkpoint(folder: Path) -> Checkpoint | None:
    """The newest; its files are compared by size, not read."""
    for found in checkpoints(folder):
        with suppress(FileNotFoundError):  # it is removed at this moment
            return Checkpoint(found.path.name, found.step, looks_whole(found.path), found.path.stat().st_mtime)
    return None


def _waits_for(counts: Counts, limits: Limits | None, version: Version | None) -> str:
    if limits is None or version is None:
        return "starting: it has not opened for sessions yet"
    have = min(counts.accepted, limits.batch_groups)
    there = f"{have} of {limits.batch_groups} finished groups for step {version.step} are there"
    runs = f"{counts.running_sessions} sessions run, {counts.free_slots} slots are free"
    if have == limits.batch_groups:
        return f"training step {version.step}: {there}; {runs}"
    closed = "" if limits.accepting else "; no new sessions are taken, the run drains"
    if limits.held:
        closed = f"; no session starts: {limits.held}"
    if counts.awaiting_reward:
        runs = f"{runs}, {counts.awaiting_reward} sessions wait for their reward"
    return f"waiting for agents: {there}; {runs}{closed}"


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _or_none(value: int | None) -> str:
    return "none" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
