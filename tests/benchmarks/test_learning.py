"""The learning benchmark's machinery: the lag is exact, lag 0 is one thing under both names, and the verdict is that of the curves."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.learning import BEGIN, END, Case, Learner, Setting, curves, draw, table, verdicts, write_page

SHORT = Setting(steps=4, groups=2, samples=4, updates=2, every=2)


def test_each_step_trains_what_the_weights_of_lag_steps_ago_sampled() -> None:
    """Only of the current version's tokens the trainer can check the recorded log-probs; at lag 2 there are none after the first step."""
    for lag, checked in ((0, [True, True, True, True]), (2, [True, False, False, False])):
        learner = Learner(Case("decoupled", lag, 1), SHORT)
        stats = [learner.step(step) for step in range(SHORT.steps)]
        assert [one["logprob_gap_tokens"] > 0 for one in stats] == checked
        assert max(one["logprob_gap_max"] for one in stats) < 1e-3
        assert learner.sampled_by == SHORT.steps - 1 - lag


def test_without_lag_both_objectives_are_the_same_and_rewards_are_probabilities() -> None:
    naive, decoupled = (Learner(Case(objective, 0, 1), SHORT).run() for objective in ("naive", "decoupled"))
    assert naive == pytest.approx(decoupled, abs=1e-3)
    assert len(naive) == 3
    assert naive[0] == pytest.approx(0.356, abs=0.05)  # where the warm-up of the tiny net stops
    assert naive[0] != naive[-1]


def test_verdicts_pair_the_seeds() -> None:
    found = {
        Case("decoupled", 0, 1): [0.1, 0.5, 0.6],
        Case("decoupled", 0, 2): [0.1, 0.5, 0.8],
        Case("decoupled", 4, 1): [0.1, 0.5, 0.5],
        Case("decoupled", 4, 2): [0.1, 0.5, 0.74],
    }
    base, lagged = verdicts(found)
    assert (base.late, base.difference, base.holds) == (pytest.approx(0.7), 0.0, True)
    assert lagged.difference == pytest.approx(-0.08)
    assert lagged.error == pytest.approx(math.sqrt(0.0008 / 2))  # of -0.10 and -0.06
    assert not lagged.holds
    assert "| decoupled | 4 | 0.620 | 0.500 | -0.080 ± 0.020 | **no** |" in table([base, lagged])


def test_figures_that_are_held_are_not_made_again_and_the_page_is_written_from_them(tmp_path: Path) -> None:
    cases = [
        Case(objective, lag, seed) for objective in ("naive", "decoupled") for lag in (0, 1, 2, 4, 8) for seed in (1, 2)
    ]
    held = {str(case): [0.1 * case.seed, 0.2, 0.3] for case in cases}
    setting = {"steps": 4, "groups": 2, "samples": 4, "updates": 2, "lr": 1e-4, "every": 2}
    (tmp_path / "figures.json").write_text(json.dumps({"setting": setting, "curves": held}))
    found = curves(tmp_path / "figures.json", SHORT, cases)
    assert found[Case("naive", 8, 2)] == [0.2, 0.2, 0.3]
    page = tmp_path / "page.md"
    page.write_text(f"# Ours\n{BEGIN}old\n{END}more\n")
    write_page(page, verdicts(found))
    assert page.read_text().startswith(f"# Ours\n{BEGIN}| objective |")
    assert page.read_text().endswith(f"{END}more\n")
    draw(found, SHORT, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size < 200_000
    with pytest.raises(SystemExit, match="another setting"):
        curves(tmp_path / "figures.json", Setting(), cases)
