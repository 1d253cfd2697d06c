"""What a user waits for before anything happens: import, `--help`, and a gateway that answers; and what it costs in memory.

    python benchmarks/startup.py [--rounds 5]

Every measurement is a process of its own, the rounds are interleaved, the median counts. Prints each time as a ratio to a bare
Python that imports nothing, and beside the bound it has to stay under: 1 s for import and help, 3 s for a ready gateway,
150 MB for the gateway's resident memory. Exit code 1 if one is broken. Numbers depend on the machine, ratios less.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil

COMMANDS = {
    "python, nothing imported": ["-c", "pass"],
    "import areal": ["-c", "import areal"],
    "areal --help": ["-m", "areal", "--help"],
    "areal train --help": ["-m", "areal.train", "--help"],
}
BOUNDS_S = {"import areal": 1.0, "areal --help": 1.0, "gateway, until it answers": 3.0}
GATEWAY_MB = 150.0


def seconds_of(words: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def gateway(folder: Path) -> tuple[float, float]:
    """(seconds from start until /health is answered, resident MB then)."""
    began = time.perf_counter()
    words = ["-m", "areal.gateway.server", "--port", "0", "--log-dir", str(folder)]
    environment = os.environ | {"XDG_STATE_HOME": str(folder)}
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "Gateway ready at" in line)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(line.rsplit(" ", 1)[1].strip() + "/health", timeout=10) as answer:
            assert json.load(answer)["status"] == "ok"
        ready = time.perf_counter() - began
        resident = psutil.Process(process.pid).memory_info().rss / 2**20
        process.send_signal(signal.SIGTERM)
    return ready, resident


def main() -> int:
    parser = argparse.ArgumentParser(description="Time until something happens.")
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    times: dict[str, list[float]] = {name: [] for name in (*COMMANDS, "gateway, until it answers")}
    resident: list[float] = []
    for _ in range(rounds):
        for name, words in COMMANDS.items():
            times[name].append(seconds_of(words))
        with tempfile.TemporaryDirectory() as folder:
            ready, megabytes = gateway(Path(folder))
        times["gateway, until it answers"].append(ready)
        resident.append(megabytes)
    base = statistics.median(times["python, nothing imported"])
    broken = False
    print(f"{'':30} {'median s':>9} {'× bare':>7} {'bound s':>8}   ({rounds} rounds, load {os.getloadavg()[0]:.1f})")
    for name, measured in times.items():
        median, bound = statistics.median(measured), BOUNDS_S.get(name)
        broken |= bound is not None and median > bound
        print(f"{name:30} {median:9.3f} {median / base:7.1f} {'' if bound is None else f'{bound:8.1f}'}")
    broken |= statistics.median(resident) > GATEWAY_MB
    print(f"{'gateway, resident':30} {statistics.median(resident):6.0f} MB of {GATEWAY_MB:.0f} MB")
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
