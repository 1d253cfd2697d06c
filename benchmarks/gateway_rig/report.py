"""Figures with their targets: printed as they are measured, and summed up at the end.

report = Report()
report.figure("gateway / forwarder", 1.31, at_most=1.5)
report.note("forwarder", "2.31 ms CPU per request")          # measured, without a target
report.skipped("LiteLLM", "pip could not install it")
sys.exit(report.end())                                        # 1 when a target was missed
"""

from __future__ import annotations

import os
import time


class Report:
    """Collects what was missed. One line per figure."""

    def __init__(self) -> None:
        self._missed: list[str] = []
        self._met = 0

    def heading(self, text: str) -> None:
        load = os.getloadavg()[0]
        print(
            f"\n{text}   [{time.strftime('%H:%M:%S')}, load {load:.1f} on {len(os.sched_getaffinity(0))} cores]",
            flush=True,
        )

    def figure(
        self, name: str, value: float, unit: str = "", *, at_most: float | None = None, at_least: float | None = None
    ) -> None:
        """One figure with its target, which is met at equality too."""
        met = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
        target = f"<= {at_most:g}" if at_most is not None else f">= {at_least:g}"
        print(f"  {name:54} {value:10.2f} {unit:10} target {target:8} {'met' if met else 'MISSED'}", flush=True)
        self._met += met
        if not met:
            self._missed.append(f"{name}: {value:.2f} {unit} (target {target})")

    def note(self, name: str, text: str) -> None:
        print(f"  {name:54} {text}", flush=True)

    def skipped(self, name: str, reason: str) -> None:
        print(f"  {name:54} skipped: {reason}", flush=True)

    def end(self) -> int:
        """The summary, and the exit code of the whole benchmark."""
        print(f"\n{self._met} targets met, {len(self._missed)} missed")
        for line in self._missed:
            print(f"  missed: {line}")
        return 1 if self._missed else 0
