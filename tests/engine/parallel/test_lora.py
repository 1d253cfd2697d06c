"""An adapter on two processes is trained as on one; the base lies in pieces and stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import equal

from areal.engine.commands import Row
from tests.engine.parallel.pool import Case, Pool, alone
from tests.engine.parallel.twins import GRADIENT, LOSS, WEIGHTS, Apart, apart, assert_twins

GroupRows = Callable[..., list[Row]]

LORA = {"rank": 4, "alpha": 8}


def case_of(folder: Path, rows: list[Row], **changes: object) -> Case:
    settings = {"max_tokens_per_mb": 64, "lora": LORA, "optimizer": {"lr": 1e-2, "gradient_clipping": 1e9}}
    return Case("fsdp:d2", str(folder), rows, settings=settings | changes)


def test_two_processes_train_one_adapter(pool: Pool, tiny_dir: Path, group_rows: GroupRows, tmp_path: Path) -> None:
    case = case_of(tiny_dir, group_rows(groups=3))
    ours, theirs = (
        run(replace(case, saved_to=str(tmp_path / name))) for run, name in ((pool.run, "two"), (alone, "one"))
    )
    assert_twins(ours, theirs)
    assert len(ours.weights) == 28, "the adapter is all that is published"
    assert all(own < 0.6 * theirs.local_bytes[0] for own in ours.local_bytes)
    two, one = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    assert two.keys() == one.keys()
    assert max(apart(two[name], one[name]) for name in one) <= 1e-5
    begun = load_file(tiny_dir / "model.safetensors")
    unchanged = {name for name in begun if equal(two[name], begun[name])}
    assert {name for name in begun if "_proj" in name} == begun.keys() - unchanged
    again, straight = (
        run(replace(case, restored_from=str(tmp_path / name), steps=1))
        for run, name in ((pool.run, "one"), (alone, "two"))
    )
    assert abs(again.losses[0] - straight.losses[0]) <= LOSS
    assert max(apart(again.weights[name], expected) for name, expected in straight.weights.items()) <= WEIGHTS


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_computing_activations_again_changes_nothing(
    pool: Pool, tiny_dir: Path, group_rows: GroupRows, kind: str
) -> None:
    rows = group_rows(groups=3)
    assert_twins(pool.run(case_of(tiny_dir, rows, gradient_checkpointing=kind)), alone(case_of(tiny_dir, rows)))


@pytest.mark.heavy
def test_a_rank_that_begins_otherwise_is_seen(pool: Pool, tiny_dir: Path, group_rows: GroupRows) -> None:
    case = case_of(tiny_dir, group_rows(groups=3))
    ours = pool.run(replace(case, fault="an_adapter_of_its_own", steps=1))
    found = Apart.of(ours, alone(replace(case, steps=1)))
    assert found.gradient > 1000 * GRADIENT, found
