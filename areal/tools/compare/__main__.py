"""`areal compare RUN RUN`: what generating and training side by side gained, and what it cost in reward.

    areal train --config configs/tiny.yaml trial_name=sync async.enabled=false
    areal train --config configs/tiny.yaml trial_name=async
    areal compare runs/tiny/sync runs/tiny/async --output compare.png

Prints the ratio of throughput over the steps that both have trained, what each measured (g, t, h, CV, waves) and the bound that follows,
the rewards, and whether settings and tasks were the same; draws the metric over steps and over time, both runs in one picture. The
runs may be over or go on. Exit codes: 0 compared, 2 no such run or too little trained. docs/async.md reads the table.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from areal.base.errors import ArealError
from areal.tools.compare.report import Comparison, as_json, as_text
from areal.tools.compare.side import Side, shared_steps
from areal.tools.compare.tasks import same_work
from areal.tools.plot_metrics import draw


def main(argv: Sequence[str] | None = None) -> int:
    """See the module for the exit codes."""
    options = _parser().parse_args(argv)
    try:
        found = compare(options.runs[0], options.runs[1])
        folders = [found.base.side.folder, found.other.side.folder]
        smooth = options.smooth or max(1, (found.last - found.first + 1) // 20)
        draw(folders, options.metric, options.output, smooth=smooth, over=("step", "time"))
    except ArealError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    sys.stdout.write(as_json(found) if options.json else f"{as_text(found)}picture: {options.output}\n")
    return 0


def compare(one: Path, other: Path) -> Comparison:
    """The run with the lower lag comes first, else the one that was named first. Raises ConfigError, StoreError."""
    base, second = sorted((Side.of(one), Side.of(other)), key=lambda side: side.lag or 0)
    _, last = shared_steps(base, second)
    return Comparison.of(base, second, asyncio.run(same_work(base, second, last)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="areal compare",
        description="Two runs beside each other: speed, what bounds it, and rewards.",
        epilog="Exit codes: 0 compared, 2 no such run or too little trained.",
    )
    parser.add_argument("runs", type=Path, nargs=2, metavar="RUN", help="two run folders, running or finished")
    parser.add_argument(
        "--output", type=Path, default=Path("compare.png"), help="picture, .png, .svg or .pdf (compare.png)"
    )
    parser.add_argument("--metric", default="reward", help="what is drawn (reward)")
    parser.add_argument(
        "--smooth", type=int, default=0, help="running mean over so many steps; 0 = a twentieth of them"
    )
    parser.add_argument("--json", action="store_true", help="the numbers as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
