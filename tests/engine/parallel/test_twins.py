"""Every layout trains as one process does: loss, gradients and weights after three steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from areal.base.errors import TrainingError
from areal.engine.commands import Row
from areal.engine.engine import TrainEngine
from areal.engine.optimizer import Applied
from areal.engine.parallel.world import World, local
from areal.engine.settings import EngineSettings
from tests.engine.parallel.pool import Case, Pool, alone, refusal
from tests.engine.parallel.twins import assert_twins

GroupRows = Callable[..., list[Row]]
MakeRow = Callable[..., Row]


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


@pytest.mark.parametrize("backend", ["fsdp:d1", "archon:d1"])
def test_a_device_trains_as_the_cpu_does(device: str, tiny_dir: Path, group_rows: GroupRows, backend: str) -> None:
    if device == "cpu":
        pytest.skip("compares the device of --device with the CPU")
    case = Case(backend, str(tiny_dir), group_rows(groups=3), settings={"max_tokens_per_mb": 64})
    assert_twins(alone(case), alone(case, "cpu"))


def test_more_ranks_than_gpus_are_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with Pool(2) as pool:
        pool.device = "cuda"
        with pytest.raises(pytest.skip.Exception, match=r"archon:t2 needs 2 GPUs, .* there are 1"):
            pool.run(Case("archon:t2", "", []))


@pytest.mark.parametrize("backend", ["fsdp:d2", "archon:d2"])
def test_what_one_rank_finds_wrong_all_of_them_refuse(
    pool: Pool, tiny_dir: Path, group_rows: GroupRows, make_row: MakeRow, backend: str
) -> None:
    """A temperature so low that a token's log-prob is no number: on one rank's row, and the others wait for nobody."""
    rows = [*group_rows(groups=2), make_row([7, 8, 9, 10], [2, 3], session="s-odd", sequence=99, temperature=1e-39)]
    case = Case(backend, str(tiny_dir), rows, settings={"max_tokens_per_mb": 64})
    first, second = pool.call(backend, refusal, case)
    assert first == second
    assert first.startswith("session s-odd: the policy's log-prob of token ")
    assert_twins(*(run(Case(backend, str(tiny_dir), rows[:-1], steps=1)) for run in (pool.run, alone)))


def poisoned_step(world: World, model_dir: str, rows: list[Row]) -> tuple[str, bool, float]:
    """What this rank says where the last one's gradient alone holds a NaN, whether its weights stay, and the loss of a step after that."""
    facts = {"backend": str(world.spec), "model_dir": model_dir, "algorithm": "grpo", "threads": 1, "total_steps": 9}
    engine = TrainEngine.load(EngineSettings.model_validate(facts), world)
    held = [local(p.detach()) for _, p in engine.policy.trained_parameters()]
    before, step = [piece.clone() for piece in held], engine._optimizer.step

    def poisoned(number: int) -> Applied | None:
        grads = [local(p.grad) for _, p in engine.policy.trained_parameters() if p.grad is not None]
        if world.rank == world.spec.size - 1:
            next(grad for grad in grads if grad.numel()).flatten()[0] = math.nan
        return step(number)

    engine._optimizer.step = poisoned  # type: ignore[method-assign]
    said = refused(engine, rows)
    engine._optimizer.step = step  # type: ignore[method-assign]
    stays = all(map(torch.equal, before, held))
    return said, stays, engine.train_step(rows, 0, 0)["loss"]


def refused(engine: TrainEngine, rows: list[Row]) -> str:
    with pytest.raises(TrainingError) as caught:
        engine.train_step(rows, 0, 0)
    return str(caught.value)


@pytest.mark.parametrize("backend", ["fsdp:d2", "archon:t2"])
def test_a_gradient_that_is_no_number_on_one_rank_moves_none(
    pool: Pool, tiny_dir: Path, group_rows: GroupRows, backend: str
) -> None:
    rows = group_rows(groups=2)
    expected = alone(Case(backend, str(tiny_dir), rows, steps=1)).losses[0]
    first, second = pool.call(backend, poisoned_step, str(tiny_dir), rows)
    assert first == second
    said, stays, loss = first
    assert "gradient over 12 rows is not finite although each row's own is; the step was not applied" in said
    assert stays
    assert loss == pytest.approx(expected, abs=5e-6)
