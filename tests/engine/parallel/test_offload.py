"""What lies in host memory between uses is trained to the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from areal.config.engine import OptimizerConfig
from areal.engine.commands import Row
from areal.engine.optimizer import Optimizer
from tests.engine.parallel.pool import Case, Pool, Result, alone
from tests.engine.parallel.twins import assert_twins

GroupRows = Callable[..., list[Row]]


def case_of(backend: str, folder: Path, rows: list[Row], **changes: object) -> Case:
    return Case(backend, str(folder), rows, settings={"max_tokens_per_mb": 64} | changes)


def assert_same_bits(ours: Result, theirs: Result) -> None:
    assert ours.losses == theirs.losses
    assert [each["grad_norm"] for each in ours.stats] == [each["grad_norm"] for each in theirs.stats]
    assert ours.scores == theirs.scores
    assert ours.weights.keys() == theirs.weights.keys()
    assert all(torch.equal(ours.weights[name], expected) for name, expected in theirs.weights.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_optimizer_steps_on_the_host_as_on_the_device(tiny_dir: Path, group_rows: GroupRows, dtype: str) -> None:
    rows = group_rows(groups=3)
    stays = case_of("fsdp:d1", tiny_dir, rows, dtype=dtype)
    assert_same_bits(alone(case_of("fsdp:d1", tiny_dir, rows, dtype=dtype, offload="optimizer")), alone(stays))


def test_masters_and_moments_are_apart_from_the_parameters() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 4))
    optimizer = Optimizer([("w", weight)], OptimizerConfig(lr=0.1), total_steps=10, on_host=True)
    weight.grad = torch.ones(3, 4)
    optimizer.step(0)
    master = optimizer._masters["w"]
    assert master.device.type == "cpu"
    assert master.data_ptr() != weight.data_ptr()
    assert torch.equal(master, weight)
    assert not torch.equal(weight, torch.ones(3, 4))
    assert set(optimizer.state_tensors()) == {"exp_avg.w", "exp_avg_sq.w", "step.w"}


def test_parameters_come_to_the_device_layer_by_layer(
    pool: Pool, tiny_dir: Path, group_rows: GroupRows, tmp_path: Path
) -> None:
    """One process too: its one piece lies on the host. What is saved under it any other goes on from, and the other way round."""
    rows = group_rows(groups=3)
    for backend in ("fsdp:d1", "fsdp:d2"):
        stays = case_of(backend, tiny_dir, rows)
        leaves = replace(stays, settings={**stays.settings, "offload": "all"})
        assert_same_bits(
            *(pool.run(replace(each, saved_to=str(tmp_path / name))) for name, each in (("out", leaves), ("in", stays)))
        )
    went_on = [
        pool.run(
            replace(case_of("fsdp:d1", tiny_dir, rows, offload=offload), restored_from=str(tmp_path / name), steps=1)
        )
        for offload, name in (("none", "out"), ("all", "in"), ("optimizer", "in"))
    ]
    assert_same_bits(went_on[0], went_on[1])
    assert_same_bits(went_on[0], went_on[2])


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("backend", "kind", "changes"),
    [
        ("archon:d2t2", "all", {}),
        ("archon:t2c2", "optimizer", {}),
        ("archon:d2p2", "optimizer", {"dtype": "bfloat16"}),
        ("fsdp:d2", "all", {"dtype": "bfloat16"}),
        ("fsdp:d2", "all", {"lora": {"rank": 4, "alpha": 8}}),
        ("fsdp:d2", "optimizer", {"lora": {"rank": 4, "alpha": 8}, "gradient_checkpointing": "full"}),
    ],
)
def test_a_layout_trains_to_the_same_bits(
    pool: Pool, tiny_dir: Path, group_rows: GroupRows, backend: str, kind: str, changes: dict[str, object]
) -> None:
    rows = group_rows(groups=3)
    stays = case_of(backend, tiny_dir, rows, **changes)
    assert_same_bits(pool.run(case_of(backend, tiny_dir, rows, offload=kind, **changes)), pool.run(stays))


@pytest.mark.heavy
def test_where_nothing_was_in_pieces_sums_over_t_come_in_another_order(
    pool: Pool, tiny_dir: Path, group_rows: GroupRows
) -> None:
    """With d = c = 1 a layer's gradients are summed over t with the layer, and not with all others at the end."""
    rows = group_rows(groups=3)
    ours, theirs = (pool.run(case_of("archon:t2p2", tiny_dir, rows, offload=offload)) for offload in ("all", "none"))
    assert_twins(ours, theirs)


@pytest.mark.heavy
@pytest.mark.parametrize("backend", ["archon:d2e2", "archon:d2t2e2"])
def test_experts_leave_too(pool: Pool, moe_dir: Path, group_rows: GroupRows, backend: str) -> None:
    rows = group_rows(groups=3)
    ours = pool.run(case_of(backend, moe_dir, rows, offload="all"))
    assert_same_bits(ours, pool.run(case_of(backend, moe_dir, rows)))
    assert_twins(ours, alone(case_of(backend, moe_dir, rows)))
