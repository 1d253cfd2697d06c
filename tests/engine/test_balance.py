"""The load of experts over an optimizer step, the loss that evens it out, and the bias: the same however rows are packed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from areal.base.errors import ConfigError, TrainingError
from areal.engine.balance import LOAD
from areal.engine.batch import loss_weights, pack
from areal.engine.commands import Row
from areal.engine.engine import TrainEngine
from areal.engine.rows import decode_row
from areal.engine.settings import EngineSettings
from areal.models.experts import Router, Routing

GroupRows = Callable[..., list[Row]]
MakeMoe = Callable[..., TrainEngine]
EXPERTS = 8


@pytest.fixture
def make_moe(moe_dir: Path, make_settings: Callable[..., EngineSettings]) -> MakeMoe:
    return lambda **changes: TrainEngine.load(
        make_settings(model_dir=str(moe_dir), backend="archon:d1", deterministic=False, **changes)
    )


def routers(engine: TrainEngine) -> list[Router]:
    return [module for module in engine.policy.modules() if isinstance(module, Router)]


def each_row_by_itself(engine: TrainEngine, rows: list[Row]) -> tuple[Tensor, Tensor]:
    """The definition: choices and summed probabilities [layers, experts], the latter with gradients; tokens that are forwarded."""
    counts = torch.zeros(2, EXPERTS, dtype=torch.float64)
    mass: list[list[Tensor]] = [[], []]
    [stage] = engine.policy.own_stages()

    def look(router: Router, inputs: tuple[Tensor, Routing], out: tuple[Tensor, Tensor]) -> None:
        mass[router.layer].append((inputs[0] @ router.weight.T).softmax(-1).sum(0))
        counts[router.layer] += torch.bincount(out[1].flatten(), minlength=EXPERTS)

    hooks = [router.register_forward_hook(look) for router in routers(engine)]
    weighted = loss_weights([decode_row(row) for row in rows], "token_mean")
    for packed in pack(weighted, max_tokens=1, share_prefixes=False):
        stage(packed)
    for hook in hooks:
        hook.remove()
    return counts, torch.stack([torch.stack(each).sum(0) for each in mass])


def gradients(engine: TrainEngine, rows: list[Row]) -> dict[str, Tensor]:
    """Of one step, which is not applied."""
    kept: dict[str, Tensor] = {}

    def keep(step: int) -> None:
        kept.update((name, p.grad.clone()) for name, p in engine.policy.trained_parameters() if p.grad is not None)

    engine._optimizer.step = keep  # type: ignore[method-assign,assignment]
    with pytest.raises(TrainingError, match="not applied"):
        engine.train_step(rows, 1, 0)
    return kept


@pytest.mark.parametrize("max_tokens", [64, 4096])
def test_the_load_is_of_the_whole_step_however_it_is_packed(
    make_moe: MakeMoe, group_rows: GroupRows, max_tokens: int
) -> None:
    rows = group_rows(groups=2)
    engine = make_moe(max_tokens_per_mb=max_tokens)
    counts, _ = each_row_by_itself(engine, rows)
    stats = engine.train_step(rows, 0, 0)
    load = counts / counts.sum(1, keepdim=True)
    assert torch.equal(engine._balance.state_tensors()[LOAD], load)
    assert stats["moe_load_max"] == pytest.approx(float(load.max()) * EXPERTS)
    assert stats["moe_load_min"] == pytest.approx(float(load.min()) * EXPERTS)
    assert "moe_aux_loss" not in stats


def test_the_balance_loss_is_its_definition_however_rows_are_packed(make_moe: MakeMoe, group_rows: GroupRows) -> None:
    rows, still = group_rows(groups=2), {"optimizer": {"lr": 1e-12}}
    found = []
    for changes in ({"max_tokens_per_mb": 64, "moe_aux_loss": 10.0}, {"moe_aux_loss": 10.0}, {}):
        engine = make_moe(**changes, **still)
        stats = engine.train_step(rows, 0, 0)
        if changes:
            assert stats["moe_aux_loss"] == pytest.approx(2.0)  # even at first: 1 for each of two layers
        found.append(gradients(engine, rows))
    counts, mass = each_row_by_itself(engine, rows)
    load = counts / counts.sum(1, keepdim=True)
    (10.0 * EXPERTS * (load.float() * mass / mass.sum(1, keepdim=True).detach()).sum()).backward()
    packed_small, packed_large, without = found
    for name, p in engine.policy.trained_parameters():
        assert (packed_small[name] - packed_large[name]).norm() <= 1e-5 * packed_large[name].norm(), name
        added = packed_large[name] - without[name]
        theirs = torch.zeros_like(p) if p.grad is None else p.grad
        assert (added - theirs).norm() <= 1e-5 * packed_large[name].norm(), name


def test_the_balance_loss_evens_the_load(make_moe: MakeMoe, group_rows: GroupRows) -> None:
    rows = group_rows(groups=2)
    engine = make_moe(moe_aux_loss=1.0, optimizer={"lr": 1e-3})
    losses = [engine.train_step(rows, step, 0)["moe_aux_loss"] for step in range(16)]
    assert max(losses[-3:]) < 0.9 * losses[1]


def test_the_bias_moves_against_the_load_and_is_part_of_a_checkpoint(
    make_moe: MakeMoe, group_rows: GroupRows, tmp_path: Path
) -> None:
    rows = group_rows(groups=2)
    engine = make_moe(moe_bias_rate=0.02)
    engine.train_step(rows, 0, 0)
    load = engine._balance.state_tensors()[LOAD]
    for router in routers(engine):
        assert router.e_score_correction_bias is not None
        own = load[router.layer]
        assert torch.equal(router.e_score_correction_bias, (0.02 * (own.mean() - own).sign()).float())
    engine.save(str(tmp_path / "saved"), 1, full=True)
    again = make_moe(moe_bias_rate=0.02)
    again.restore(str(tmp_path / "saved"))
    last = [each.train_step(rows, 1, 0) for each in (engine, again)]
    assert last[0]["loss"] == last[1]["loss"]
    assert last[0]["moe_load_max"] == last[1]["moe_load_max"]
    for ours, theirs in zip(engine.named_tensors(), again.named_tensors(), strict=True):
        assert torch.equal(ours[1], theirs[1]), ours[0]
    still = make_moe(moe_bias_rate=0.02, optimizer={"lr": 1e-12})
    spread = [still.train_step(rows, step, 0)["moe_load_max"] for step in range(16)]
    assert spread[-1] < 0.8 * spread[0]


def test_a_net_without_experts_has_nothing_to_balance(make_settings: Callable[..., EngineSettings]) -> None:
    with pytest.raises(ConfigError, match="has none that archon knows"):
        TrainEngine.load(make_settings(backend="archon:d1", moe_aux_loss=1.0, deterministic=False))
