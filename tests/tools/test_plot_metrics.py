"""Pictures of metrics: without a display, of one timeline, with a sentence where there is nothing to draw."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal.base.errors import ConfigError
from areal.base.logs import Log, open_log
from areal.tools.plot_metrics import draw, find_metric, main, read_run, running_mean

PNG = b"\x89PNG"


def rows(path: Path, *values: object, run: str = "r", start: int = 0) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    with (path / "metrics.jsonl").open("a") as file:
        for step, value in enumerate(values, start):
            file.write(json.dumps({"run_id": run, "step": step, "train/loss": value, "train/reward": 0.5}) + "\n")
    return path


def test_T095_it_draws_without_a_display_and_without_pyplot(tmp_path: Path) -> None:
    rows(tmp_path / "log", 3.0, 2.0, 1.0)
    output = tmp_path / "p" / "loss.png"
    words = ["--log-dir", str(tmp_path / "log"), "--metric", "loss", "--output", str(output)]
    program = (
        "import sys; sys.modules['tkinter'] = None\n"
        "from areal.tools.plot_metrics import main\n"
        "code = main(sys.argv[1:])\n"
        "assert 'matplotlib.pyplot' not in sys.modules and 'torch' not in sys.modules\n"
        "sys.exit(code)"
    )
    environment = os.environ | {"DISPLAY": "localhost:64.0", "MPLBACKEND": ""}
    for command in ([sys.executable, "-c", program], [sys.executable, "-m", "areal.tools.plot_metrics"]):
        output.unlink(missing_ok=True)
        done = subprocess.run([*command, *words], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert output.read_bytes().startswith(PNG)
        assert "train/loss, 3 steps" in done.stdout


def test_T096_a_resumed_run_is_one_curve(tmp_path: Path) -> None:
    rows(tmp_path, *[0.0] * 16, run="first")
    rows(tmp_path, *[1.0] * 11, run="second", start=10)
    [curve] = draw([tmp_path], "loss", tmp_path / "loss.png", smooth=3)
    assert curve.steps == list(range(21))
    assert curve.values == [0.0] * 10 + [1.0] * 11


def test_T097_an_absent_metric_lists_the_available_ones_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows(tmp_path, 1.0)
    output = tmp_path / "out.png"
    assert main(["--log-dir", str(tmp_path), "--metric", "nope", "--output", str(output)]) == 2
    assert "available: train/loss, train/reward" in capsys.readouterr().err
    assert not output.exists()


def test_T097_only_null_nan_and_words_is_an_error_and_some_are_gaps(tmp_path: Path) -> None:
    nothing = rows(tmp_path / "nothing", float("nan"), None, "inf")
    with pytest.raises(ConfigError, match="no finite value; metrics that have some: train/reward"):
        draw([nothing], "loss", tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()
    [curve] = draw([rows(tmp_path / "some", 1.0, float("nan"), None, 2.0)], "loss", tmp_path / "b.png")
    assert [math.isnan(value) for value in curve.values] == [False, True, True, False]
    assert (tmp_path / "b.png").read_bytes().startswith(PNG)


def test_T096_a_log_alone_is_one_curve_too(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "train.log"
    for first, last in ((0, 15), (10, 12)):
        with open_log(log, run_id="r", terminal=False):
            for step in range(first, last + 1):
                Log("rollout").line(step=step + 1, generated=first)
                Log("train").line(step=step, updated=4, loss=float(first))
    table = read_run(tmp_path)
    assert table.series("train/loss").values == [0.0] * 10 + [10.0] * 3
    assert table.series("rollout/generated").steps == list(range(1, 14))


def test_T097_a_number_beyond_all_bounds_is_a_gap(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 1}\n{"step": 1, "loss": 1' + "0" * 400 + "}\n")
    assert [math.isnan(value) for value in read_run(tmp_path).series("loss").values] == [False, True]


def test_the_log_lines_hold_the_same_numbers_and_are_read_where_there_is_no_metrics_file(tmp_path: Path) -> None:
    with open_log(tmp_path / "logs" / "train.log", run_id="r", terminal=False):
        for step in range(3):
            Log("rollout").line(step=step, generated=4, tokens=10, queue="5/256")
            Log("train").line(step=step, updated=4, loss=0.5 * step)
    assert read_run(tmp_path).series("train/loss").values == [0.0, 0.5, 1.0]
    [curve] = draw([tmp_path], "tokens", tmp_path / "tokens.png")
    assert curve.name == "rollout/tokens"


def test_several_runs_share_a_picture(tmp_path: Path) -> None:
    one, other = rows(tmp_path / "one", 1.0, 2.0), rows(tmp_path / "other", 2.0, 3.0)
    assert len(draw([one, other], "reward", tmp_path / "r.svg")) == 2
    assert "<svg" in (tmp_path / "r.svg").read_text()


def test_over_time_and_by_run_folders(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    rows(folder / "logs", 1.0, 2.0)
    assert main([str(folder), "--x", "time", "--output", str(tmp_path / "x.svg")]) == 2  # these rows tell no time
    timed = [{"run_id": "r", "step": step, "time": 50 + 7200 * step, "train/loss": 1 / step} for step in (1, 2, 3)]
    (folder / "logs" / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in timed))
    assert main([str(folder), str(folder), "--x", "time", "--output", str(tmp_path / "x.svg")]) == 0
    assert "hours of running" in (tmp_path / "x.svg").read_text()


def test_a_run_that_shares_a_log_folder_is_drawn_alone(tmp_path: Path) -> None:
    rows(tmp_path / "logs", 1.0, 2.0, 3.0, run="one")
    rows(tmp_path / "logs", 9.0, 9.0, run="two")
    for run in ("one", "two"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "run_id").write_text(f"{run}\n")
        (tmp_path / run / "config.yaml").write_text(f"stats_logger: {{log_dir: {tmp_path / 'logs'}}}\n")
    one, two = draw([tmp_path / "one", tmp_path / "two"], "loss", tmp_path / "x.png")
    assert (one.values, two.values) == ([1.0, 2.0, 3.0], [9.0, 9.0])


def test_no_run_and_a_width_of_no_steps_are_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--output", str(tmp_path / "x.png")]) == 2
    assert "no run was given; name run folders" in capsys.readouterr().err
    assert main([str(tmp_path), "--smooth", "0", "--output", str(tmp_path / "x.png")]) == 2
    assert "--smooth 0" in capsys.readouterr().err


def test_ambiguous_and_whole_names(tmp_path: Path) -> None:
    table = read_run(rows(tmp_path, 1.0))
    table.rows[0] |= {"a/x": 1.0, "b/x": 2.0, "rollout/loss": 1.0, "test/only": 1.0}
    assert find_metric(table, "b/x") == "b/x"
    assert find_metric(table, "loss") == "train/loss"
    assert find_metric(table, "only") == "test/only"
    with pytest.raises(ConfigError, match="could be a/x or b/x"):
        find_metric(table, "x")


def test_a_folder_without_logs_and_an_unwritable_output_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither metrics.jsonl nor train.log"):
        draw([tmp_path], "loss", tmp_path / "x.png")
    rows(tmp_path / "log", 1.0)
    for output in (tmp_path / "log", tmp_path / "x.nope"):
        with pytest.raises(ConfigError, match="cannot write"):
            draw([tmp_path / "log"], "loss", output)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_the_running_mean_is_a_mean_of_finite_values(width: int) -> None:
    values = [1.0, math.nan, 3.0, 5.0]
    for end, mean in enumerate(running_mean(values, width), 1):
        finite = [value for value in values[max(0, end - width) : end] if value == value]
        assert mean == pytest.approx(sum(finite) / len(finite)) if finite else math.isnan(mean)
