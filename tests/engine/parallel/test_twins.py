"""Every layout trains as one process does: loss, gradients and weights after three steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from areal.engine.commands import Row
from tests.engine.parallel.pool import Case, Pool, Result, alone

LOSS = 5e-6
GRADIENT = 1e-5
WEIGHTS = 1e-5
NORM = 1e-5

GroupRows = Callable[..., list[Row]]


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative L2."""
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))


def assert_twins(ours: Result, theirs: Result, *, weights: float = WEIGHTS) -> None:
    assert ours.gradients.keys() == theirs.gradients.keys()
    assert ours.weights.keys() == theirs.weights.keys()
    assert max(abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=True)) <= LOSS
    norms = zip(ours.stats, theirs.stats, strict=True)
    assert all(own["grad_norm"] == pytest.approx(one["grad_norm"], rel=NORM) for own, one in norms)
    assert ours.replicas_equal
    gradient = {name: apart(ours.gradients[name], theirs.gradients[name]) for name in theirs.gradients}
    worst = max(gradient, key=gradient.__getitem__)
    assert gradient[worst] <= GRADIENT, (worst, gradient[worst])
    weight = {name: apart(ours.weights[name], theirs.weights[name]) for name in theirs.weights}
    worst = max(weight, key=weight.__getitem__)
    assert weight[worst] <= weights, (worst, weight[worst])


@pytest.mark.parametrize("backend", ["fsdp:d2", "archon:d2", "archon:t2", "archon:c2"])
def test_two_processes_train_as_one(pool: Pool, tiny_dir: Path, group_rows: GroupRows, backend: str) -> None:
    case = Case(backend, str(tiny_dir), group_rows(groups=3), settings={"max_tokens_per_mb": 64})
    ours, theirs = pool.run(case), alone(case)
    assert_twins(ours, theirs)
    whole_bytes = theirs.local_bytes[0]
    assert all(own < 0.6 * whole_bytes for own in ours.local_bytes)


def test_our_own_net_is_transformers(tiny_dir: Path, group_rows: GroupRows) -> None:
    ours, theirs = (alone(Case(backend, str(tiny_dir), group_rows(groups=3))) for backend in ("archon:d1", "fsdp:d1"))
    weights = {name.removeprefix("model."): tensor for name, tensor in ours.weights.items()}
    assert weights.keys() == {name.removeprefix("model.") for name in theirs.weights}
    assert_twins(ours, theirs)
