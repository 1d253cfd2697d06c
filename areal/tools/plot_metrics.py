"""A picture of any logged metric: `python -m areal.tools.plot_metrics --log-dir L --metric loss --output plots/loss.png`.

    areal plot runs/exp/sync runs/exp/async --metric reward --smooth 5 --x time --output reward.svg
    draw([run_dir], "loss", Path("plots/loss.png"), smooth=5, over=["step", "time"])

Reads metrics.jsonl, or the lines of train.log where there is none. A short name means the metric that ends with it
(`loss` is `train/loss`). A resumed run is one curve (base/metrics.py), NaN is a gap. Draws with matplotlib's figure
objects and the Agg canvas: no pyplot, no display, no toolkit. Limits: one metric a picture; several runs share the axes.
Used by summary.py and compare/.
"""

from __future__ import annotations

import argparse
import io
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

from areal.base.errors import ConfigError
from areal.base.logs import parse_line
from areal.base.metrics import MetricsTable, Series, finite, forget, read_metrics
from areal.cluster.run_folder import RunFolder

Axis = Literal["step", "time"]
METRICS_FILE = "metrics.jsonl"
LOG_FILE = "train.log"
_PREFERRED_PARTS = ("train", "rollout", "throughput", "eval")  # where a short name is looked for, in this order
_FIGURE_INCHES = (8.0, 4.5)
_DOTS_PER_INCH = 120


@dataclass(frozen=True, slots=True)
class Curve:
    """One run's values of one metric. seconds: of running, for each step (base/metrics.py: MetricsTable)."""

    label: str
    series: Series
    seconds: list[float]

    @classmethod
    def of(cls, folder: Path, metric: str) -> Self:
        """Raises ConfigError if the folder has no such metric or not one finite value."""
        table = read_run(folder)
        name = find_metric(table, metric)
        series = table.series(name)
        if not any(map(math.isfinite, series.values)):
            others = ", ".join(one for one in table.names() if any(map(math.isfinite, table.series(one).values)))
            raise ConfigError(f"{name} in {folder} has no finite value; metrics that have some: {others or 'none'}")
        return cls(str(folder), series, table.seconds_of(name))


def draw(
    run_dirs: Sequence[Path],
    metric: str,
    output: Path,
    *,
    smooth: int = 1,
    title: str | None = None,
    over: Sequence[Axis] = ("step",),
) -> list[Series]:
    """Write a picture of one metric, a curve per folder; returns what was drawn.

    run_dirs: folders with metrics.jsonl or train.log, or run folders. smooth: width in steps of the running mean drawn over the
    (then pale) values; 1 = none. over: what the curves are drawn over, a panel each. Raises ConfigError if a folder has no such
    metric or not one finite value; then no file is written."""
    if smooth < 1:
        raise ConfigError(f"--smooth {smooth}: a running mean is taken over at least 1 step")
    if not run_dirs:
        raise ConfigError("no run was given; name run folders, or --log-dir FOLDER")
    curves = [Curve.of(folder, metric) for folder in run_dirs]
    for curve in curves:
        if "time" in over and not any(map(math.isfinite, curve.seconds)):
            raise ConfigError(f"{curve.label} was logged without times, so it cannot be drawn over time; use --x step")
    _save(curves, output, smooth, title, over)
    return [curve.series for curve in curves]


def read_run(folder: Path) -> MetricsTable:
    """The metrics of a log folder or a run folder. Raises ConfigError if it holds none."""
    run = RunFolder.existing(folder)
    for place in (folder, run.logs, folder / "logs"):
        if (place / METRICS_FILE).is_file():
            # Several runs may log into one folder. Whose a log folder is nobody knows: then it is the latest one.
            return read_metrics(place / METRICS_FILE, run.identity)
        if (place / LOG_FILE).is_file():
            return _read_log(place / LOG_FILE)
    raise ConfigError(
        f"{folder} has neither {METRICS_FILE} nor {LOG_FILE}; give the folder of a run, or the one it logged into (--log-dir)"
    )


def find_metric(table: MetricsTable, metric: str) -> str:
    """The full name of a metric. Raises ConfigError listing what there is."""
    names = table.names()
    if metric in names:
        return metric
    endings = [name for name in names if name.rpartition("/")[2] == metric]
    for part in _PREFERRED_PARTS:
        if f"{part}/{metric}" in endings:
            return f"{part}/{metric}"
    if len(endings) == 1:
        return endings[0]
    which = f"could be {' or '.join(endings)}" if endings else "is not in this log"
    listed = ", ".join(names) or "none at all"
    raise ConfigError(f"metric {metric!r} {which}; available: {listed}")


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of the last `width` finite values up to each place; NaN where none is finite."""
    means = []
    for end in range(1, len(values) + 1):
        window = [value for value in values[max(0, end - width) : end] if math.isfinite(value)]
        means.append(math.fsum(window) / len(window) if window else math.nan)
    return means


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 with the file written, 2 with a sentence and no file."""
    parser = argparse.ArgumentParser(
        prog="areal plot", description="Draw one metric of one or more runs into a picture."
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run or log folder; several are compared")
    parser.add_argument("--log-dir", action="append", default=[], help="the same; may be repeated")
    parser.add_argument("--metric", default="loss", help="a name in the log, short (loss) or whole (train/loss)")
    parser.add_argument("--output", required=True, help="picture to write, .png, .svg or .pdf; its folder is made")
    parser.add_argument("--smooth", type=int, default=1, help="running mean over so many steps (default 1: none)")
    parser.add_argument(
        "--x", choices=get_args(Axis), default="step", help="over steps, or the time that the run has run"
    )
    arguments = parser.parse_args(argv)
    folders = [Path(folder) for folder in (*arguments.log_dir, *arguments.runs)]
    try:
        output = Path(arguments.output)
        curves = draw(folders, arguments.metric, output, smooth=arguments.smooth, over=[arguments.x])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    drawn = ", ".join(f"{curve.name}, {len(curve.steps)} steps" for curve in curves)
    print(f"{arguments.output}: {drawn}")
    return 0


def _read_log(path: Path) -> MetricsTable:
    """The numbers of [part] lines that have a step, as `part/fact`; a later line wins, and what a part had reached beyond its first line
    of a start of the run is of a lost timeline."""
    rows: dict[int, dict[str, float]] = {}
    begun: set[str] = set()  # parts that have a line of this start
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if text.startswith("# run_id="):
            begun.clear()
        line = parse_line(text)
        step = line.facts.get("step") if line else None
        if line is None or not isinstance(step, int):
            continue
        if line.part not in begun:
            begun.add(line.part)
            forget(rows, step, only=line.part)
        numbers: Mapping[str, float] = {
            f"{line.part}/{name}": finite(value)
            for name, value in line.facts.items()
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
        }
        rows.setdefault(step, {}).update(numbers)
    return MetricsTable(rows)


def _save(curves: Sequence[Curve], output: Path, smooth: int, title: str | None, over: Sequence[Axis]) -> None:
    # Imported here: a training process imports this module for `draw` and needs matplotlib only at its very end.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width, height = _FIGURE_INCHES
    figure = Figure(figsize=(width * (1 + len(over)) / 2, height), dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(over), sharey=True, squeeze=False)[0]
    for axes, axis in zip(panels, over, strict=True):
        unit, name = _unit(curves) if axis == "time" else (1.0, "step")
        for number, curve in enumerate(curves):
            at = [place / unit for place in (curve.seconds if axis == "time" else curve.series.steps)]
            _plot(axes, at, curve, number, smooth)
        axes.set_xlabel(name)
        axes.grid(alpha=0.25)
    panels[0].set_ylabel(curves[0].series.name)
    figure.suptitle(title or curves[0].series.name)
    if len(curves) > 1:
        panels[0].legend(fontsize="small")
    try:
        picture = io.BytesIO()
        figure.savefig(picture, format=output.suffix.removeprefix(".") or "png")
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_bytes(picture.getvalue())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {output}: {error}; choose another --output") from error


def _plot(axes: Any, at: Sequence[float], curve: Curve, number: int, smooth: int) -> None:
    """at: where on the x axis each value stands."""
    color, values = f"C{number}", curve.series.values
    marker = "o" if len(values) <= 50 else None  # a lone point between gaps has no line
    faint = smooth > 1
    axes.plot(
        at,
        values,
        color=color,
        marker=marker,
        markersize=3,
        linewidth=1.2,
        alpha=0.35 if faint else 1.0,
        label=None if faint else curve.label,
    )
    if faint:
        axes.plot(at, running_mean(values, smooth), color=color, linewidth=1.8, label=curve.label)


def _unit(curves: Sequence[Curve]) -> tuple[float, str]:
    """The largest unit, in seconds, of which the longest curve has two, and what the axis says."""
    longest = max((at for curve in curves for at in curve.seconds if math.isfinite(at)), default=0.0)
    for seconds, name in ((3600.0, "hours"), (60.0, "minutes")):
        if longest >= 2 * seconds:
            return seconds, f"{name} of running"
    return 1.0, "seconds of running"


if __name__ == "__main__":
    sys.exit(main())
