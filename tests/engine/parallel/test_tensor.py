"""The tensor dimension: its twins are one process, what is not cut stays the same on all ranks, and nothing whole is held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from areal.algorithms.logprobs import Part, token_logprobs
from areal.config.engine import OptimizerConfig
from areal.engine.archon import load_archon
from areal.engine.commands import Row
from areal.engine.optimizer import Optimizer
from areal.engine.parallel import tensor
from areal.engine.parallel.tensor import cut_tensor
from areal.engine.parallel.world import World, local, replicas
from tests.engine.parallel.conftest import WriteNet
from tests.engine.parallel.pool import Case, Pool, alone
from tests.engine.parallel.twins import WEIGHTS, apart, assert_twins

GroupRows = Callable[..., list[Row]]
EXPERTS = {"family": "Qwen3Moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

EXACT_ROUTERS = {
    "family": "Dots1",
    "kv_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
"""Of a family that keeps them in float32."""


@pytest.mark.heavy
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_T088_norms_on_all_tensor_ranks_stay_equal_to_the_bit(
    pool: Pool, write_net: WriteNet, group_rows: GroupRows, sequence_parallel: bool
) -> None:
    case = Case("archon:t2", str(write_net()), group_rows(), settings={"max_tokens_per_mb": 64})
    ours = pool.run(replace(case, settings=dict(case.settings) | {"sequence_parallel": sequence_parallel}))
    assert ours.replicas_equal
    assert "model.layers.0.self_attn.q_norm.weight" in ours.weights
    assert_twins(ours, alone(case))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("backend", "net", "settings"),
    [
        ("archon:t4", {"kv_heads": 4, "tie_word_embeddings": False}, {}),
        ("archon:d2t2", {}, {}),
        ("archon:d2t2", {"tie_word_embeddings": True}, {"sequence_parallel": False}),
        ("archon:t2p2", {"tie_word_embeddings": True}, {}),
        ("archon:t2", {"family": "Qwen2"}, {"algorithm": "gspo", "mini_batch_size": 4}),
        ("archon:t2", {"family": "Llama", "attention_bias": True}, {}),
        ("archon:t2", {"family": "Llama", "tie_word_embeddings": True}, {"role": "critic"}),
        ("archon:d2t2", {}, {"role": "critic", "sequence_parallel": False}),
    ],
)
def test_tensor_ranks_train_as_one_process(
    pool: Pool,
    write_net: WriteNet,
    group_rows: GroupRows,
    backend: str,
    net: dict[str, object],
    settings: dict[str, object],
) -> None:
    folder = str(write_net(**net))
    case = Case(backend, folder, group_rows(groups=3), settings={"max_tokens_per_mb": 64} | settings)
    ours, theirs = pool.run(case), alone(case)
    assert_twins(ours, theirs, weights=5e-5 if settings.get("role") == "critic" else WEIGHTS)  # its head begins at 0
    for mine, expected in zip(ours.scores, theirs.scores, strict=True):
        assert mine == pytest.approx(expected, abs=2e-6)
    assert ours.stats[0]["entropy"] == pytest.approx(theirs.stats[0]["entropy"], rel=1e-6)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("backend", "net", "changes"),
    [
        ("archon:t2c2", {}, {}),
        ("archon:d2p2", {}, {}),
        ("archon:d2t2e2", EXPERTS, {}),
        ("fsdp:d2", {}, {}),
        ("fsdp:d2", {}, {"lora": {"rank": 4, "alpha": 8}}),
        ("fsdp:d2", EXACT_ROUTERS, {}),
        ("fsdp:d2t2e2", EXACT_ROUTERS, {}),
    ],
)
def test_bfloat16_on_several_processes_is_as_near_to_float32_as_on_one(
    pool: Pool,
    write_net: WriteNet,
    group_rows: GroupRows,
    backend: str,
    net: dict[str, object],
    changes: dict[str, object],
) -> None:
    settings = {"max_tokens_per_mb": 64} | changes
    case = Case(backend, str(write_net(**net)), group_rows(groups=3), settings=settings)
    exact = alone(case)
    case = replace(case, settings=dict(case.settings) | {"dtype": "bfloat16"})
    ours, theirs = pool.run(case), alone(case)
    assert ours.replicas_equal
    for name, gradient in exact.gradients.items():
        assert apart(ours.gradients[name], gradient) <= 2 * apart(theirs.gradients[name], gradient) + 1e-3, name


@pytest.mark.heavy
def test_a_missing_sum_over_the_norms_of_heads_is_seen(pool: Pool, write_net: WriteNet, group_rows: GroupRows) -> None:
    case = Case("archon:t2", str(write_net()), group_rows(), fault="norms_of_heads_alone")
    ours, theirs = pool.run(case), alone(case)
    assert ours.losses[0] == pytest.approx(theirs.losses[0], abs=5e-6)  # the loss does not know it
    assert not ours.replicas_equal
    with pytest.raises(AssertionError):
        assert_twins(ours, theirs)


@pytest.mark.heavy
def test_a_cut_head_says_what_the_whole_one_says(pool: Pool) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = 3 * torch.randn(9, 8, generator=generator), 3 * torch.randn(61, 8, generator=generator)
    targets = torch.randint(61, (9,), generator=generator)
    expected = said(hidden, weight, targets, None)
    for logprobs, entropy, grad_hidden, grad_rows, first in pool.call(
        "archon:t4", said_in_parts, hidden, weight, targets
    ):
        torch.testing.assert_close(logprobs, expected[0], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(entropy, expected[1], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(grad_hidden, expected[2], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(grad_rows, expected[3][first : first + len(grad_rows)], atol=1e-6, rtol=1e-5)


def said(hidden: Tensor, weight: Tensor, targets: Tensor, part: Part | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    temperatures = torch.linspace(0, 1.5, len(targets))
    logprobs, entropy = token_logprobs(hidden, weight, targets, temperatures, part=part, chunk=4, keep_bytes=0)
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return logprobs.detach(), entropy, hidden.grad, weight.grad


def said_in_parts(world: World, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor | int, ...]:
    assert world.mesh is not None
    rows = tensor._rows(weight, world.mesh["t"])
    part = tensor.part_of(rows, world.mesh["t"])
    logprobs, entropy, grad_hidden, grad_rows = said(hidden, local(rows), targets, part)
    dist.all_reduce(grad_hidden, group=world.group("t"))
    return logprobs, entropy, grad_hidden, grad_rows, part.first


@pytest.mark.heavy
def test_a_rank_holds_its_share_and_not_a_view_of_the_whole(pool: Pool, write_net: WriteNet) -> None:
    folder = write_net()
    for held, viewed in pool.call("archon:t2", bytes_of, str(folder)):
        assert held == viewed


def bytes_of(world: World, folder: str) -> tuple[int, int]:
    """Of this rank's pieces, and of the memory that they keep alive."""
    net = load_archon(folder, world, dtype="float32")
    cut_tensor(net, world)
    net.fill(world.device)
    pieces = [local(p.detach()) for _, p in net.trained_parameters()]
    return sum(each.nbytes for each in pieces), sum(each.untyped_storage().nbytes() for each in pieces)


def optimizer(world: World, gradients: Sequence[tuple[nn.Parameter, Tensor]], clip: float) -> Optimizer:
    for p, grad in gradients:
        p.grad = grad
    named = ((f"p{number}", p) for number, (p, _) in enumerate(gradients))  # a generator: gone once it is read
    return Optimizer(named, OptimizerConfig(gradient_clipping=clip), total_steps=1, world=world)


@pytest.mark.heavy
def test_T085_a_norm_counts_what_several_ranks_hold_once(pool: Pool) -> None:
    for backend in ("archon:t1", "archon:t2"):
        assert pool.call(backend, norm_of_three_and_four) == pytest.approx([5.0] * int(backend[-1]))


def norm_of_three_and_four(world: World) -> float:
    """One parameter cut over t whose whole gradient has norm 3, one on all ranks with norm 4."""
    cut, copied = torch.full((4, 1), 1.5), torch.full((4,), 2.0)
    gradients = [(nn.Parameter(cut), cut), (nn.Parameter(copied), copied)]
    if world.mesh is not None:
        spread = distribute_tensor(cut, world.mesh["t"], [Shard(0)])
        gradients[0] = (nn.Parameter(spread), spread.clone())
    applied = optimizer(world, gradients, 1e9).step(0)
    assert applied is not None
    return applied.grad_norm


@pytest.mark.heavy
def test_T086_the_norm_is_the_same_on_any_number_of_ranks_and_is_clipped_as_one(pool: Pool) -> None:
    generator = torch.Generator().manual_seed(4)
    dense, experts = torch.randn(6, 5, generator=generator), torch.randn(4, 3, 2, generator=generator)
    whole = float(torch.cat([dense.flatten(), experts.flatten()]).norm())
    for backend in ("archon:d1", "archon:d2", "archon:d4"):
        for norm, clipped in pool.call(backend, clipped_norm, dense, experts):
            assert norm == pytest.approx(whole, rel=1e-5)
            assert clipped == pytest.approx(0.1, rel=1e-5)


def clipped_norm(world: World, dense: Tensor, experts: Tensor) -> tuple[float, float]:
    """The norm that a step reports, and that of what it applied. The dense gradient is cut over d, that of the experts over a mesh of two
    axes: two groups of experts, and of d4 two ranks that hold the same ones."""
    cut: list[Tensor] = [dense.clone(), experts.clone()]
    if world.mesh is not None:
        size = world.size("d")
        mesh = world.mesh["d"]._unflatten(0, (size // 2, 2), ("efsdp", "e"))
        cut = [
            distribute_tensor(dense, world.mesh["d"], [Shard(0)]),
            distribute_tensor(experts, mesh, [Replicate(), Shard(0)]),
        ]
    parameters = [nn.Parameter(each.clone()) for each in cut]
    learns = optimizer(world, list(zip(parameters, cut, strict=True)), 0.1)
    applied = learns.step(0)
    assert applied is not None
    squares = sum(local(grad).double().square().sum() / replicas(grad, world) for grad in cut)
    assert isinstance(squares, Tensor)
    return applied.grad_norm, float(world.sum(squares).sqrt())
