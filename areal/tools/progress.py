"""The progress display of a run on a terminal: what runs, what waits, how old, how good, how long still.

    with Progress(total_steps=60, title="my-exp/trial-0", enabled=sys.stdout.isatty()) as progress:
        progress.counts(counts)
        progress.step(7, reward=0.42, loss=0.1, version=7, lag=1, tokens_per_second=310.0)

Log lines go on above it. Where there is no terminal it draws nothing: the log lines say the same.
"""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.text import Text

from areal.base.types import Counts

_SPARKS = "▁▂▃▄▅▆▇█"


class Progress:
    """A bar over the steps and one line of facts. All methods are cheap and may be called from the event loop."""

    def __init__(self, *, total_steps: int, first_step: int, title: str, enabled: bool) -> None:
        self._bar = Bar(
            TextColumn(f"[bold]{title}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self._task = self._bar.add_task("steps", total=total_steps, completed=first_step, left="")
        self._facts: dict[str, str] = {}
        self._rewards: list[float] = []
        self._first_step = first_step
        self._total = total_steps
        self._first_finished: float | None = None
        self._live = Live(self._render(), console=Console(), refresh_per_second=4, transient=True) if enabled else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)

    def counts(self, counts: Counts) -> None:
        """What the store counts now."""
        self._facts |= {
            "sessions": str(counts.running_sessions),
            "queue": str(counts.accepted),
            "slots": str(counts.free_slots),
        }
        self._draw()

    def step(self, done: int, *, reward: float, loss: float, version: int, lag: int, tokens_per_second: float) -> None:
        """`done` steps are trained and published."""
        self._rewards.append(reward)
        self._facts |= {
            "version": str(version),
            "lag": str(lag),
            "reward": f"{reward:.3f}",
            "loss": f"{loss:+.4f}",
            "tokens/s": f"{tokens_per_second:.0f}",
        }
        self._bar.update(self._task, completed=done, left=self._left(done))
        self._draw()

    def _left(self, done: int) -> str:
        """Time left at the pace since the first step, which alone carries the warm-up."""
        now = time.monotonic()
        if self._first_finished is None:
            self._first_finished = now
            self._first_step = done
            return ""
        seconds = (now - self._first_finished) / max(1, done - self._first_step) * (self._total - done)
        return f"{int(seconds // 60)}:{int(seconds % 60):02d} left"

    def _draw(self) -> None:
        if self._live is not None:
            self._live.update(self._render())

    def _render(self) -> Group:
        facts = Text("  ".join(f"{name} {value}" for name, value in self._facts.items()), style="dim")
        return Group(self._bar, facts, Text(sparkline(self._rewards[-60:]), style="green"))


def sparkline(values: list[float]) -> str:
    """A one-line picture of a series, scaled to its own range; empty for no values."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((value - low) * scale)] for value in values)
