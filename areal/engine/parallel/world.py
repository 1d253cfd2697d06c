"""The processes of one net, and this one's place among them.

    world = World.alone()                                       # one process: every collective is the identity
    world = World.join(parse_backend("archon:d2t2"), rank=3)    # after torch.distributed.init_process_group
    world.index("d"), world.size("d"), world.group("d")         # place and peers along one dimension

Ranks lie in the order p, d, c, t: tensor peers are neighbours, pipeline stages far apart. Experts (e) split what d and c (and t) already span and
have no axis of their own. What ranks tell each other beside tensors is bytes, never pickled objects. A rank `counts` if what it
computed belongs in a sum over the batch: along t and c all compute the same loss, and of a pipeline only the last stage has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from areal.config.backend_spec import BackendSpec

CPU = torch.device("cpu")
AXES = ("p", "d", "c", "t")
Axis = Literal["p", "d", "c", "t"]


@dataclass(frozen=True, slots=True)
class World:
    """spec: the layout. rank: among all its processes. mesh: None where there is one process. device: of parameters and compute."""

    spec: BackendSpec
    rank: int = 0
    mesh: DeviceMesh | None = None
    device: torch.device = CPU

    @classmethod
    def alone(cls, device: torch.device | None = None) -> Self:
        return cls(BackendSpec("fsdp"), device=device or CPU)

    @classmethod
    def alone_in_a_group(cls, spec: BackendSpec, device: torch.device | None = None) -> Self:
        """One process with a mesh of 1; the default group is made here unless there is one."""
        if not dist.is_initialized():
            backend = "gloo" if device is None or device.type == "cpu" else "nccl"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        return cls.join(spec, 0, device, meshed=True)

    @classmethod
    def join(cls, spec: BackendSpec, rank: int, device: torch.device | None = None, *, meshed: bool = False) -> Self:
        """Every process of the default group calls it; their number is spec.size. meshed: where that is 1 there is a mesh of 1 all the same, for
        what goes by it (offload)."""
        device = device or CPU
        mesh = None
        if spec.size > 1 or meshed:
            mesh = init_device_mesh(device.type, tuple(getattr(spec, axis) for axis in AXES), mesh_dim_names=AXES)
        return cls(spec, rank, mesh, device)

    def size(self, axis: Axis) -> int:
        """How many processes lie along it."""
        size: int = getattr(self.spec, axis)
        return size

    def index(self, axis: Axis) -> int:
        """Which of them this one is."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(axis)

    def group(self, axis: Axis) -> dist.ProcessGroup | None:
        """Its peers along it; None where it has none."""
        return None if self.mesh is None or self.size(axis) == 1 else self.mesh.get_group(axis)

    @property
    def leader(self) -> bool:
        """The one that the controller talks to."""
        return self.rank == 0

    @property
    def last_stage(self) -> bool:
        return self.index("p") == self.size("p") - 1

    @property
    def counts(self) -> bool:
        """Whether this rank's losses and stats belong in a sum over all ranks."""
        return self.index("t") == 0 and self.index("c") == 0 and self.last_stage

    def sum(self, values: Tensor) -> Tensor:
        """Over all ranks, the same on all, in place; `values` is all zeros where nothing is to be added."""
        if self.mesh is not None:
            dist.all_reduce(values)
        return values

    def gather(self, message: bytes) -> list[bytes]:
        """Everybody's message, in rank order, on every rank."""
        if self.mesh is None:
            return [message]
        sizes = self._gathered(torch.tensor([len(message)]))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else 0
        texts = self._gathered(padded)
        return [bytes(text[: int(size)].tolist()) for text, size in zip(texts, sizes, strict=True)]

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        tensor = self._moved(tensor)
        every = [torch.empty_like(tensor) for _ in range(self.spec.size)]
        dist.all_gather(every, tensor)
        return [each.cpu() for each in every]

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)


def local(tensor: Any) -> Tensor:
    """What this process holds of a tensor that may be distributed, without a copy."""
    held: Tensor = tensor.to_local() if isinstance(tensor, _distributed()) else tensor
    return held


def replicas(tensor: Any, world: World) -> int:
    """How many processes hold the same numbers as this one does of a parameter. All ranks of its pipeline stage hold some of it."""
    shards = 1
    if isinstance(tensor, _distributed()):
        for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
            shards *= 1 if placement.is_replicate() else size  # torch's strided shard says that it is no shard
    return world.spec.size // world.size("p") // shards


def _distributed() -> type[Any]:
    from torch.distributed.tensor import DTensor

    return DTensor
