"""What the gateway and the proxy behind it cost, beside what else could stand there. Each figure has a target.

    python benchmarks/gateway.py                  # everything; some twenty minutes
    python benchmarks/gateway.py --quick          # a short look at everything
    python benchmarks/gateway.py --only cpu       # cpu | streams | idle | abandoned | rendering, or several: cpu,idle

Added latency and CPU per streamed request beside a bare forwarder and LiteLLM's proxy on the same fake backend (it is
installed on first use into a cache of its own); 1,000 concurrent streams; memory of idle sessions; 100,000 abandoned
ones; turn 100 of a long conversation. Processes are the product's own, on loopback, on at most two cores, the clients included. Ratios are
measured side by side in one run and hold where the times do not; docs/benchmarks.md has measured figures. Exit code 1 when a
target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable

import uvloop
from gateway_rig import rendering, scale, streams
from gateway_rig.report import Report

from areal.web.serve import allow_open_files

CORES = 2


async def _rendering(report: Report, *, quick: bool) -> None:
    rendering.run(report, quick=quick)


SECTIONS: dict[str, Callable[..., Awaitable[None]]] = {
    "rendering": _rendering,
    "cpu": streams.run,
    "streams": scale.run_streams,
    "idle": scale.run_idle,
    "abandoned": scale.run_abandoned,
}


async def measure(names: list[str], *, quick: bool) -> int:
    report = Report()
    for name in names:
        await SECTIONS[name](report, quick=quick)
    return report.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small numbers, for a short look")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"some of: {', '.join(SECTIONS)}")
    said = parser.parse_args()
    names = said.only.split(",")
    if unknown := set(names) - set(SECTIONS):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there is {', '.join(SECTIONS)}")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])  # the processes started here inherit it
    allow_open_files()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(measure(names, quick=said.quick)))


if __name__ == "__main__":
    main()
