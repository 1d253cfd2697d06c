"""A net that is held whole several times trains as one process does, and its replicas stay equal to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from areal.engine.commands import Row
from areal.engine.engine import TrainEngine
from areal.engine.parallel.world import World, local
from areal.engine.piece_files import own_pieces
from areal.engine.settings import EngineSettings
from tests.engine.parallel.conftest import WriteNet
from tests.engine.parallel.pool import Case, Pool, alone
from tests.engine.parallel.test_offload import assert_same_bits
from tests.engine.parallel.twins import GRADIENT, WEIGHTS, Apart, apart, assert_twins

GroupRows = Callable[..., list[Row]]
LORA = {"rank": 4, "alpha": 8}
BUDGET = 24
"""Tokens of a micro-batch: a rank of d2 and one of d4 has several, of which the last one brings the sums over the replicas."""


def case_of(backend: str, folder: Path, rows: list[Row], replicas: int = 2, **changes: object) -> Case:
    settings = {"max_tokens_per_mb": BUDGET, "replicas": replicas} | changes
    return Case(backend, str(folder), rows, settings=settings)


@pytest.mark.parametrize("backend", ["fsdp:d2", "archon:d2"])
def test_two_processes_that_each_hold_all_train_as_one(
    pool: Pool, tiny_dir: Path, group_rows: GroupRows, backend: str
) -> None:
    case = case_of(backend, tiny_dir, group_rows(groups=3))
    ours, theirs = pool.run(case), alone(replace(case, settings={"max_tokens_per_mb": BUDGET}))
    assert_twins(ours, theirs)
    assert ours.local_bytes == [theirs.local_bytes[0]] * 2
    for mine, expected in zip(ours.scores, theirs.scores, strict=True):
        assert mine == pytest.approx(expected, abs=2e-6)


def test_a_missing_sum_over_the_replicas_is_seen(pool: Pool, tiny_dir: Path, group_rows: GroupRows) -> None:
    case = case_of("fsdp:d2", tiny_dir, group_rows(groups=3))
    ours = pool.run(replace(case, fault="replicas_apart", steps=1))
    found = Apart.of(ours, alone(replace(case, settings={"max_tokens_per_mb": BUDGET}, steps=1)))
    assert found.gradient > 1000 * GRADIENT, found
    assert not found.replicas_equal


def sent_and_written(world: World, model_dir: str) -> tuple[int, int, int]:
    """Bytes that this rank holds, that it sends where the leader makes weights whole, and that it writes into a checkpoint."""
    facts = {"backend": str(world.spec), "model_dir": model_dir, "algorithm": "grpo", "threads": 1, "total_steps": 9}
    engine = TrainEngine.load(EngineSettings.model_validate(facts | {"replicas": 2}), world)
    messages: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        send = dist.send
        patch.setattr(dist, "send", lambda tensor, **to: (messages.append(tensor.numel()), send(tensor, **to)))
        for _ in engine.named_tensors():
            pass
    written = own_pieces(engine.policy.trained_parameters(), world).values()
    held = sum(local(p).numel() * p.element_size() for _, p in engine.policy.trained_parameters())
    return held, sum(messages), sum(one.numbers.numel() * one.numbers.element_size() for one in written)


@pytest.mark.heavy
def test_a_piece_is_sent_and_written_once(pool: Pool, tiny_dir: Path) -> None:
    """By the replica that the leader belongs to: its neighbour, within the host."""
    first, second, *others = pool.call("fsdp:d4", sent_and_written, str(tiny_dir))
    assert first == (first[0], 0, first[0])
    assert second[0] <= second[1] < 1.02 * second[0]  # messages are aligned
    assert second[2] == second[0]
    assert [one[1:] for one in others] == [(0, 0)] * 2


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("backend", "replicas", "changes"),
    [
        ("fsdp:d4", 4, {}),
        ("fsdp:d4", 2, {"role": "critic"}),
        ("fsdp:d4", 2, {"gradient_checkpointing": "full", "mini_batch_size": 6}),
        ("archon:d2t2", 2, {"role": "critic"}),
        ("archon:d2p2", 2, {}),
    ],
)
def test_replicas_and_the_rest(
    pool: Pool, tiny_dir: Path, group_rows: GroupRows, backend: str, replicas: int, changes: dict[str, object]
) -> None:
    case = case_of(backend, tiny_dir, group_rows(groups=3), replicas, **changes)
    ours, theirs = pool.run(case), alone(replace(case, settings=dict(case.settings) | {"replicas": 1}))
    assert_twins(ours, theirs, weights=5e-5 if changes.get("role") == "critic" else WEIGHTS)  # its head begins at 0
    assert all(own < 1.2 * replicas / 4 * theirs.local_bytes[0] for own in ours.local_bytes)


@pytest.mark.heavy
def test_each_stage_of_a_process_sums_with_its_last_micro_batch(
    pool: Pool, write_net: WriteNet, group_rows: GroupRows
) -> None:
    case = case_of("archon:d2p2", write_net(num_hidden_layers=4), group_rows(groups=3), pipeline_chunks=2)
    assert_twins(pool.run(case), alone(replace(case, settings={"max_tokens_per_mb": BUDGET})))


@pytest.mark.heavy
@pytest.mark.parametrize("backend", ["archon:d4e2", "archon:d4e4", "archon:d2t2e2", "fsdp:d4"])
def test_experts_are_held_as_often_as_e_allows(pool: Pool, moe_dir: Path, group_rows: GroupRows, backend: str) -> None:
    case = case_of(backend, moe_dir, group_rows(groups=3))
    once = replace(case, settings={"max_tokens_per_mb": BUDGET})
    ours, theirs = pool.run(case), alone(once)
    assert_twins(ours, theirs)
    share = ours.local_bytes[0] / theirs.local_bytes[0]
    assert (0.3 < share < 0.45) if "e4" in backend else (0.49 < share < 0.55)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("backend", "changes"),
    [("fsdp:d4", {}), ("fsdp:d2", {"lora": LORA}), ("archon:d2t2", {"dtype": "bfloat16"})],
)
def test_what_lies_on_the_host_is_trained_to_the_same_bits(
    pool: Pool, tiny_dir: Path, group_rows: GroupRows, backend: str, changes: dict[str, object]
) -> None:
    rows = group_rows(groups=3)
    stays, leaves = (pool.run(case_of(backend, tiny_dir, rows, offload=where, **changes)) for where in ("none", "all"))
    assert_same_bits(leaves, stays)
    assert leaves.replicas_equal


@pytest.mark.heavy
def test_an_adapter_in_replicas_is_that_of_one_process(pool: Pool, tiny_dir: Path, group_rows: GroupRows) -> None:
    optimizer = {"lr": 1e-2, "gradient_clipping": 1e9}
    case = case_of("fsdp:d4", tiny_dir, group_rows(groups=3), lora=LORA, optimizer=optimizer)
    assert_twins(pool.run(case), alone(replace(case, settings=dict(case.settings) | {"replicas": 1})))


@pytest.mark.heavy
@pytest.mark.parametrize("backend", ["fsdp:d4", "archon:d2t2"])
def test_bfloat16_is_as_near_to_float32_as_on_one(
    pool: Pool, tiny_dir: Path, group_rows: GroupRows, backend: str
) -> None:
    case = case_of(backend, tiny_dir, group_rows(groups=3), dtype="bfloat16")
    one = replace(case, settings={"max_tokens_per_mb": BUDGET})
    exact, ours, theirs = (
        alone(one),
        pool.run(case),
        alone(replace(one, settings=dict(one.settings) | {"dtype": "bfloat16"})),
    )
    assert ours.replicas_equal
    for name, gradient in exact.gradients.items():
        assert apart(ours.gradients[name], gradient) <= 2 * apart(theirs.gradients[name], gradient) + 1e-3, name
    assert all(tensor.dtype == torch.bfloat16 for tensor in ours.weights.values())
