"""Fuzz the gateway and its workers: `python -m tests.fuzz --minutes 10 [--seed 7]` (or `make fuzz MINUTES=10`).

Bursts of each kind in turn (attacks.py, and described.py from the OpenAPI description), each from a new seed; after every burst the
store is checked. Ends with 0 when the time is up, with 1 and the smallest failing request at the first failure. A request that
makes the service (or these fuzzers) eat memory is a failure too: the process may have 4 GiB of addresses.
"""

from __future__ import annotations

import argparse
import logging
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.bursts import Bursts
from tests.fuzz.target import Target

MOST_MEMORY = 4 << 30


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long; default 10")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32), help="of the first burst")
    options = parser.parse_args(words)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = MOST_MEMORY if hard == resource.RLIM_INFINITY else min(MOST_MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    logging.getLogger("areal").setLevel(
        logging.ERROR
    )  # fields that nobody knows are said once, and here there are many
    print(f"fuzzing for {options.minutes:g} minutes from seed {options.seed}", flush=True)
    until, done = time.monotonic() + 60 * options.minutes, Counter[str]()
    with tempfile.TemporaryDirectory(prefix="areal-fuzz-") as folder, Target.running(Path(folder)) as target:
        bursts = Bursts(target, examples=100)
        for number, kind in enumerate(bursts.forever()):
            if time.monotonic() > until:
                break
            before = target.requests
            try:
                bursts.run(kind, options.seed + number)
            except Exception:
                print(f"FAILED in {kind}, seed {options.seed + number}, after {dict(done)} requests", file=sys.stderr)
                raise
            done[kind] += target.requests - before
    print(f"passed: {sum(done.values())} requests, {dict(done)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
