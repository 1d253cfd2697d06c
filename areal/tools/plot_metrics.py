"""A picture of any logged metric: `python -m areal.tools.plot_metrics --log-dir L --metric loss --output plots/loss.png`.

    draw([log_dir], "loss", Path("plots/loss.png"), smooth=5)

Reads metrics.jsonl, or the lines of train.log where there is none. A short name means the metric that ends with it
(`loss` is `train/loss`). A resumed run is one curve (base/metrics.py), NaN is a gap. Draws with matplotlib's figure
objects and the Agg canvas: no pyplot, no display, no toolkit. Limits: one metric a picture; several runs share the axes.
"""

from __future__ import annotations

import argparse
import io
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from areal.base.errors import ConfigError
from areal.base.logs import parse_line
from areal.base.metrics import MetricsTable, Series, read_metrics

METRICS_FILE = "metrics.jsonl"
LOG_FILE = "train.log"
_PREFERRED_PARTS = ("train", "rollout", "throughput", "eval")  # where a short name is looked for, in this order
_FIGURE_INCHES = (8.0, 4.5)
_DOTS_PER_INCH = 120


def draw(
    run_dirs: Sequence[Path], metric: str, output: Path, *, smooth: int = 1, title: str | None = None
) -> list[Series]:
    """Write a picture of one metric, a curve per folder; returns what was drawn.

    run_dirs: folders with metrics.jsonl or train.log, or run folders with `logs/` in them. smooth: width in steps of the
    running mean drawn over the (then pale) values; 1 = none. Raises ConfigError if a folder has no such metric or not
    one finite value; then no file is written."""
    curves = [(folder, _curve(folder, metric)) for folder in run_dirs]
    if not curves:
        raise ConfigError("no log folder was given")
    _save(curves, output, smooth, title)
    return [curve for _, curve in curves]


def read_run(folder: Path) -> MetricsTable:
    """The metrics of a log folder or a run folder. Raises ConfigError if it holds none."""
    for place in (folder, folder / "logs"):
        if (place / METRICS_FILE).is_file():
            return read_metrics(place / METRICS_FILE)
        if (place / LOG_FILE).is_file():
            return _read_log(place / LOG_FILE)
    raise ConfigError(
        f"{folder} has neither {METRICS_FILE} nor {LOG_FILE}; give the folder a run logged into (--log-dir)"
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
    parser.add_argument("--log-dir", action="append", required=True, help="log or run folder; repeat to compare runs")
    parser.add_argument("--metric", default="loss", help="a name in the log, short (loss) or whole (train/loss)")
    parser.add_argument("--output", required=True, help="picture to write, .png, .svg or .pdf; its folder is made")
    parser.add_argument("--smooth", type=int, default=1, help="running mean over so many steps (default 1: none)")
    arguments = parser.parse_args(argv)
    folders = [Path(folder) for folder in arguments.log_dir]
    try:
        curves = draw(folders, arguments.metric, Path(arguments.output), smooth=arguments.smooth)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    drawn = ", ".join(f"{curve.name}, {len(curve.steps)} steps" for curve in curves)
    print(f"{arguments.output}: {drawn}")
    return 0


def _curve(folder: Path, metric: str) -> Series:
    table = read_run(folder)
    curve = table.series(find_metric(table, metric))
    if not any(math.isfinite(value) for value in curve.values):
        others = ", ".join(name for name in table.names() if _finite(table, name))
        raise ConfigError(f"{curve.name} in {folder} has no finite value; metrics that have some: {others or 'none'}")
    return curve


def _finite(table: MetricsTable, name: str) -> bool:
    return any(math.isfinite(value) for value in table.series(name).values)


def _read_log(path: Path) -> MetricsTable:
    """The numbers of [part] lines that have a step, as `part/fact`; a later line wins."""
    rows: dict[int, dict[str, float]] = {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        line = parse_line(text)
        step = line.facts.get("step") if line else None
        if line is None or not isinstance(step, int):
            continue
        numbers: Mapping[str, float] = {
            f"{line.part}/{name}": float(value)
            for name, value in line.facts.items()
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
        }
        rows.setdefault(step, {}).update(numbers)
    return MetricsTable(rows)


def _save(curves: Sequence[tuple[Path, Series]], output: Path, smooth: int, title: str | None) -> None:
    # Imported here: a training process imports this module for `draw` and needs matplotlib only at its very end.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_FIGURE_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, (folder, curve) in enumerate(curves):
        color, label = f"C{number}", str(folder)
        marker = "o" if len(curve.steps) <= 50 else None  # a lone point between gaps has no line
        faint = smooth > 1
        axes.plot(
            curve.steps,
            curve.values,
            color=color,
            marker=marker,
            markersize=3,
            linewidth=1.2,
            alpha=0.35 if faint else 1.0,
            label=None if faint else label,
        )
        if faint:
            axes.plot(curve.steps, running_mean(curve.values, smooth), color=color, linewidth=1.8, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel(curves[0][1].name)
    axes.set_title(title or curves[0][1].name)
    axes.grid(alpha=0.25)
    if len(curves) > 1:
        axes.legend(fontsize="small")
    try:
        picture = io.BytesIO()
        figure.savefig(picture, format=output.suffix.removeprefix(".") or "png")
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_bytes(picture.getvalue())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {output}: {error}; choose another --output") from error


if __name__ == "__main__":
    sys.exit(main())
