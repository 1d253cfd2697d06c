"""The expert dimension: its twins are one process, alone and together with the other dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.engine.archon import ArchonNet
from areal.engine.batch import pack
from areal.engine.commands import Row
from areal.engine.engine import TrainEngine
from areal.engine.parallel.world import World
from areal.engine.rows import decode_row
from areal.engine.settings import EngineSettings
from areal.models.experts import Routing
from tests.engine.parallel.expert_faults import EXPERT_FAULTS
from tests.engine.parallel.pool import Case, Pool, Result, alone
from tests.engine.parallel.twins import assert_twins

GroupRows = Callable[..., list[Row]]
SETTINGS = {"max_tokens_per_mb": 64, "moe_aux_loss": 0.1}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def pool_of_4() -> Iterator[Pool]:
    with Pool(4) as pool:
        yield pool


def case(backend: str, folder: Path, rows: list[Row], **changes: Any) -> Case:
    return Case(backend, str(folder), rows, settings=SETTINGS | changes)


def assert_equal_steps(ours: Result, theirs: Result) -> None:
    assert_twins(ours, theirs)
    for our, their in zip(ours.stats, theirs.stats, strict=True):
        assert our["moe_load_max"] == their["moe_load_max"]
        assert our["moe_load_min"] == their["moe_load_min"]
        assert our["moe_aux_loss"] == pytest.approx(their["moe_aux_loss"], rel=1e-5)


def test_T086_experts_on_two_processes_and_the_norm_over_both_kinds_of_parameter(
    pool: Pool, moe_dir: Path, group_rows: GroupRows
) -> None:
    wanted = case("archon:d2e2", moe_dir, group_rows(groups=3), optimizer={"lr": 1e-4, "gradient_clipping": 0.1})
    ours, theirs = pool.run(wanted), alone(wanted)
    assert_equal_steps(ours, theirs)
    for our, their in zip(ours.stats, theirs.stats, strict=True):
        assert our["grad_norm"] == pytest.approx(their["grad_norm"], rel=1e-5)
        assert our["grad_norm"] > 0.1
    assert all(own < 0.6 * theirs.local_bytes[0] for own in ours.local_bytes)


LAYOUTS = (
    "archon:d4e2",
    "archon:d4e4",
    "archon:(attn:d4|ffn:t2e2)",
    "archon:t2e2",
    "archon:c2e2",
    "archon:(attn:t2|ffn:t2)",
    "archon:d2t2e2",
    "archon:d2p2e2",
    "archon:(attn:d2t2|ffn:t2e2)",
    "archon:t2c2e4",
)


@pytest.mark.heavy
@pytest.mark.parametrize("backend", LAYOUTS)
def test_experts_and_the_other_dimensions(pool_of_4: Pool, moe_dir: Path, group_rows: GroupRows, backend: str) -> None:
    wanted = case(backend, moe_dir, group_rows(groups=3))
    ours, theirs = pool_of_4.run(wanted), alone(wanted)
    assert_equal_steps(ours, theirs)
    for our, their in zip(ours.stats, theirs.stats, strict=True):
        assert our["grad_norm"] == pytest.approx(their["grad_norm"], rel=1e-5)
    assert all(own < 1.1 / len(ours.local_bytes) * theirs.local_bytes[0] for own in ours.local_bytes)


@pytest.mark.heavy
def test_ranks_without_rows_and_experts_without_tokens(pool_of_4: Pool, moe_dir: Path, group_rows: GroupRows) -> None:
    """One row of few tokens on four ranks: three of them go through empty micro-batches, and most experts get nothing."""
    rows = group_rows(groups=1, samples=1, prompt=2, output=2, turns=False)
    wanted = case("archon:d4e4", moe_dir, rows)
    assert_equal_steps(pool_of_4.run(wanted), alone(wanted))


@pytest.mark.heavy
def test_the_bias_is_the_same_on_all_ranks(pool: Pool, moe_dir: Path, group_rows: GroupRows) -> None:
    wanted = case("archon:d2e2", moe_dir, group_rows(groups=3), moe_bias_rate=0.01)
    ours, theirs = pool.run(wanted), alone(wanted)
    assert_equal_steps(ours, theirs)
    biases = [name for name in ours.weights if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2
    assert all(torch.equal(ours.weights[name], theirs.weights[name]) for name in biases)


def forced(world: World, folder: str, row: Row) -> tuple[list[float], list[float]]:
    """Log-probs of the row where the routers choose, and where every layer is told what to choose."""
    facts = {"backend": str(world.spec), "model_dir": folder, "algorithm": "grpo", "threads": 1, "total_steps": 1}
    net = TrainEngine.load(EngineSettings.model_validate(facts), world).policy
    assert isinstance(net, ArchonNet)
    [stage], generator = net.own_stages(), torch.Generator().manual_seed(1)
    [packed] = pack([decode_row(row)], max_tokens=64)
    piece, said = stage.tokens.piece(packed), []
    choices = {layer: torch.rand(len(piece.ids), 8, generator=generator).argsort(1)[:, :2] for layer in range(2)}
    for routing in (Routing(), Routing(replay=choices)):
        with torch.no_grad():
            x = stage.decoder(piece.ids, piece.positions, piece.attend, routing)
            said.append(stage._outputs(x.index_select(0, piece.source), packed, piece)[0].tolist())
    return said[0], said[1]


@pytest.mark.heavy
def test_recorded_choices_are_taken_by_each_rank_for_its_own_tokens(
    pool: Pool, moe_dir: Path, make_row: Callable[..., Row]
) -> None:
    row = make_row(list(range(2, 35)), list(range(1, 33)))
    [(chosen, told)] = pool.call("archon:d1", forced, str(moe_dir), row)
    assert max(abs(a - b) for a, b in zip(chosen, told, strict=True)) > 1e-3
    for ours in pool.call("archon:t2e2", forced, str(moe_dir), row):
        assert ours == (pytest.approx(chosen, abs=1e-5), pytest.approx(told, abs=1e-5))


@pytest.mark.heavy
@pytest.mark.parametrize("fault", list(EXPERT_FAULTS))
def test_a_planted_fault_is_seen(pool_of_4: Pool, moe_dir: Path, group_rows: GroupRows, fault: str) -> None:
    wanted = case("archon:d4e2", moe_dir, group_rows(groups=3))
    with pytest.raises(AssertionError):
        assert_equal_steps(pool_of_4.run(replace(wanted, fault=fault)), alone(wanted))
