"""Whole tensors from any cut, on the leader alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from areal.base.errors import ShapeError
from areal.engine.commands import Row
from areal.engine.parallel import gather
from areal.engine.parallel.gather import cut_as, whole
from areal.engine.parallel.world import World, local
from tests.engine.parallel.pool import Pool

GroupRows = Callable[..., list[Row]]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4) as pool:
        yield pool


def _cuts(world: World) -> dict[str, torch.Tensor]:
    """On 4 ranks, what the leader got of tensors in cuts of every kind, minus what they are; and the leader's names, in order."""
    assert world.mesh is not None
    mesh = world.mesh["d", "t"]
    torch.manual_seed(3)
    full = {
        "rows": torch.randn(10, 3),
        "few_rows": torch.randn(3, 5),  # some ranks have none
        "both": torch.randn(5, 7).bfloat16(),
        "copies": torch.randn(4, 4),
        "plain": torch.arange(6),
        "scalar": torch.tensor(2.5),
        "flags": torch.tensor([True, False, True]),
    }
    flat = init_device_mesh(world.device.type, (4,))
    own: dict[str, torch.Tensor] = {
        "rows": distribute_tensor(full["rows"], mesh, [Replicate(), Shard(0)]),
        "few_rows": distribute_tensor(full["few_rows"], flat, [Shard(0)]),
        "both": distribute_tensor(full["both"], mesh, [Shard(1), Shard(0)]),
        "copies": distribute_tensor(full["copies"], mesh, [Replicate(), Replicate()]),
        "plain": full["plain"],
        "scalar": full["scalar"],
        "flags": full["flags"],
    }
    linear = torch.nn.Linear(3, 8, bias=False)
    full["strided"] = linear.weight.detach().clone()
    parallelize_module(linear, mesh["t"], ColwiseParallel())
    fully_shard(linear, mesh=mesh["d"])
    own["strided"] = linear.weight.detach()
    assert isinstance(own["strided"], DTensor)
    for name, tensor in own.items():
        assert torch.equal(local(cut_as(local(tensor).clone(), tensor)), local(tensor)), name
    if world.rank == 3:  # as of another stage of a pipeline
        full["elsewhere"] = own["elsewhere"] = torch.full((2, 2), 7.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "BUCKET_BYTES", 64)  # several buckets, and tensors that are larger than one
        found = {name: tensor.cpu() for name, tensor in whole(own.items(), world)}
    assert world.leader or not found
    return {name: tensor.double() - full[name].double() for name, tensor in found.items() if name in full} | {
        name: tensor.double() - 7.0 for name, tensor in found.items() if name not in full
    }


@pytest.mark.heavy
def test_whole_tensors_come_from_every_kind_of_cut(pool: Pool) -> None:
    apart_by = pool.call("archon:d2t2", _cuts)[0]
    assert list(apart_by) == ["rows", "few_rows", "both", "copies", "plain", "scalar", "flags", "strided", "elsewhere"]
    assert all(not difference.any() for difference in apart_by.values())


def _lost(world: World) -> None:
    assert world.mesh is not None
    cut = distribute_tensor(torch.zeros(4, 2), world.mesh["d"], [Shard(0)])
    with pytest.raises(ShapeError, match="the ranks do not hold weight exactly once between them"):
        list(whole([("weight", cut)] if world.leader else [], world))
    partial = DTensor.from_local(torch.zeros(2), world.mesh["d"], [dist.tensor.Partial()], run_check=False)
    with pytest.raises(ShapeError, match="sum is a sum that was never finished"):
        list(whole([("sum", partial)], world))


def test_a_tensor_that_is_not_there_once_is_refused_on_every_rank(pool: Pool) -> None:
    pool.call("archon:d2", _lost)
