"""How much of what asynchronous training can gain, it gains: measured async / sync throughput against the bound. Exit code 1 on a miss.

    python -m benchmarks.async [--only table|real] [--quick] [--per-step 512] [--lag 8] [--stale drop|mask|wait] [--json FILE]

Trajectories of log-normal length (CV, cut off at 12 mean lengths), w waves of them per step (512 trajectories, 512 / w slots), training
t per generation g. Synchronous: lag 0, the whole machine generates, then trains. Asynchronous: the best split, t / (g + t) of the
machine trains. The bound is (g + h + t) / (g + t) with the idle tail h of the very lengths that were drawn (docs/speed.md).
table: 36 cells on a virtual clock, with the product's store, admission, gate, dispatcher, queue and batcher. real: 3 cells with real
processes (worker, gateway, a server that plays tokens at their time) on the wall clock.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice, product
from pathlib import Path

from areal.rollout.speed import makespan
from benchmarks.async_rig import real
from benchmarks.async_rig.loop import Ran
from benchmarks.async_rig.virtual import Stale, play
from benchmarks.async_rig.workload import CUT, CVS, RATIOS, WAVES, Cell

ENOUGH = 0.9  # of the bound, where the longest trajectory fits the lag
PAPER_LIKE, PAPER_GAIN = (1.0, 2, 0.5), 2.77  # CV, waves, t / g of the table
SYNC_STEPS, STEPS = 4, 10


@dataclass(frozen=True, slots=True)
class Result:
    """One cell. gain: measured async / sync. longest_steps: of the longest trajectory, in asynchronous steps."""

    cell: Cell
    bound: float
    gain: float
    predicted: float
    longest_steps: float
    fits: bool
    dropped: float
    masked: float
    lag_mean: float
    lag_max: int

    @property
    def missed(self) -> bool:
        paper = self.cell.mean is None and (self.cell.cv, self.cell.waves, self.cell.ratio) == PAPER_LIKE
        return (self.fits and self.gain < ENOUGH * self.bound) or (paper and self.gain < PAPER_GAIN)


def measure(cell: Cell, *, lag: int, stale: Stale, steps: int) -> Result:
    """Both ways on the virtual clock."""
    sync = play(cell, max_lag=0, slots=cell.slots, train_seconds=cell.train, warm_up=0, steps=SYNC_STEPS)
    slots, share = cell.split
    ran = play(
        cell,
        max_lag=lag,
        slots=slots,
        train_seconds=cell.train / share,
        warm_up=warm_up(cell, lag, CUT),
        steps=steps,
        stale=stale,
        training=share,
    )
    return judged(cell, sync, ran, lag, cell.lengths(seed=1))


def measure_real(cell: Cell, *, lag: int, steps: int) -> Result:
    """Both ways on the wall clock."""
    lengths = real.lengths(cell)
    cell = replace(cell, mean=float(lengths.mean()))
    sync = real.play(cell, max_lag=0, slots=cell.slots, train_seconds=cell.train, warm_up=0, steps=SYNC_STEPS)
    slots, share = cell.split
    ran = real.play(
        cell,
        max_lag=lag,
        slots=slots,
        train_seconds=cell.train / share,
        warm_up=warm_up(cell, lag, float(lengths.max())),
        steps=steps,
        training=share,
    )
    return judged(cell, sync, ran, lag, (float(lengths[line]) for line in real.drawn(seed=1)))


def warm_up(cell: Cell, lag: int, longest: float) -> int:
    """Steps until the longest trajectory that began at the start has ended, and two more."""
    return min(lag, math.ceil(longest / (cell.generate + cell.train))) + 2


def judged(cell: Cell, sync: Ran, ran: Ran, lag: int, drawn: Iterator[float]) -> Result:
    """drawn: the lengths in their order, of which the synchronous steps took the first."""
    lengths = list(islice(drawn, sync.steps * cell.per_step))
    batches = [lengths[k : k + cell.per_step] for k in range(0, len(lengths), cell.per_step)]
    turns = sum(makespan(batch, cell.slots) for batch in batches) / len(batches) + cell.train
    longest = ran.longest / (cell.generate + cell.train)
    return Result(
        cell=cell,
        bound=turns / (cell.generate + cell.train),
        gain=ran.per_second / sync.per_second,
        predicted=ran.predicted,
        longest_steps=longest,
        fits=longest <= lag,
        dropped=sum(ran.dropped.values()) / ran.ended,
        masked=ran.masked_tokens,
        lag_mean=ran.lag_mean,
        lag_max=ran.lag_max,
    )


HEADER = (
    "| CV | waves | t/g | bound | measured | of the bound | advisor | longest trajectory | lag mean / max | dropped |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def row(found: Result) -> str:
    cell = found.cell
    lost = f"{found.dropped:.1%}" if found.dropped else f"{found.masked:.1%} masked" if found.masked else "0"
    return (
        f"| {cell.cv:g} | {cell.waves} | {cell.ratio:g} | {found.bound:.2f} | {found.gain:.2f} | {found.gain / found.bound:.0%} "
        f"| {found.predicted:.2f} | {found.longest_steps:.1f} steps{'' if found.fits else ' (does not fit)'} "
        f"| {found.lag_mean:.1f} / {found.lag_max} | {lost} |"
    )


def table(options: argparse.Namespace) -> list[Result]:
    per_step, steps = (64, 8) if options.quick else (options.per_step, STEPS)
    print(f"lag {options.lag}, too old: {options.stale}, {per_step} trajectories per step, {steps} steps\n{HEADER}")
    found = []
    for cv, waves, ratio in product(CVS, WAVES, RATIOS):
        cell = Cell(cv, waves, ratio, per_step)
        found.append(measure(cell, lag=options.lag, stale=options.stale, steps=steps))
        print(row(found[-1]), flush=True)
    return found


def real_cells(options: argparse.Namespace) -> list[Result]:
    cells = [Cell(0.5, 2, 0.5, 32), Cell(1.0, 2, 0.5, 32), Cell(1.0, 4, 1.0, 32)]
    print(
        f"\nreal processes, {real.UNIT_S:g} s a mean length, lag {options.lag}, 32 trajectories per step, {STEPS} steps\n{HEADER}"
    )
    found = []
    for cell in cells[1:2] if options.quick else cells:
        found.append(measure_real(cell, lag=options.lag, steps=STEPS))
        print(row(found[-1]), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("table", "real"))
    parser.add_argument(
        "--quick", action="store_true", help="64 trajectories per step; a look, too noisy for the targets"
    )
    parser.add_argument("--per-step", type=int, default=512, help="trajectories per step; a multiple of 8")
    parser.add_argument("--lag", type=int, default=8)
    parser.add_argument("--stale", choices=("drop", "mask", "wait"), default="drop")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    found: list[Result] = []
    if options.only != "real":
        found += table(options)
    if options.only != "table":
        found += real_cells(options)
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    missed = [each for each in found if each.missed]
    for each in missed:
        print(f"missed: {row(each)}")
    return 1 if missed and not options.quick else 0


if __name__ == "__main__":
    sys.exit(main())
