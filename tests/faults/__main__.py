"""Kill the processes of a training run while agents work with it: `python -m tests.faults --kills 200 [--seed 7]` (or `make kills KILLS=200`).

Ends with 0 when nothing was lost and nothing doubled; else with 1 and a sentence for each case, and the folder with all there is to look at stays.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.faults.campaign import Campaign


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--kills", type=int, default=200, help="how many; default 200")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(2**32), help="of victims and moments"
    )
    options = parser.parse_args(words)
    folder, started = Path(tempfile.mkdtemp(prefix="areal-kills-")), time.monotonic()
    print(f"{options.kills} kills from seed {options.seed}, in {folder}", flush=True)
    report = Campaign(folder, options.seed, options.kills, partial(print, flush=True)).run()
    print(report.text())
    print(f"{time.monotonic() - started:.0f} s, seed {options.seed}")
    for sentence in report.violations:
        print(sentence, file=sys.stderr)
    if report.violations:
        print(f"all there is to look at lies in {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
