"""The pipeline dimension: consecutive layers on different processes, micro-batches behind one another through them.

    passes = Pipelined(net, world)               # net: this rank's stages (archon.py)
    passes.train(packs, loss)                    # `loss` is called on the last stage alone

Torch's own pipeline schedules want micro-batches of one shape; packed rows have any length, so we carry out the same orders (schedule.py) ourselves: hidden states
go to the next stage and their gradients come back point to point, each way in a group of its own, so that neither direction waits for the
other's order. All ranks know all micro-batches, hence every shape. Tied embeddings stand on the first and on the last stage: their gradients are
added up at the end, so that both copies take the same step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from areal.engine.archon import ArchonNet, Stage
from areal.engine.batch import PackedBatch, empty_batch
from areal.engine.parallel.data import in_pieces, sum_over_replicas
from areal.engine.parallel.passes import Loss, complete_gradients
from areal.engine.parallel.schedule import Forward, schedule
from areal.engine.parallel.world import AXES, World, local


def wait_for(every: Iterable[dist.Work]) -> None:
    """Until each has reached its end. Who is found here waits for other ranks (performer.py)."""
    for work in every:
        work.wait()


class _Link:
    """To and from the neighbours in the ring of stages, one way."""

    def __init__(self, group: dist.ProcessGroup, source: int, target: int) -> None:
        """source, target: ranks within the group."""
        self._group = group
        self._source = source
        self._target = target
        self._leaving: list[tuple[dist.Work, Tensor]] = []

    def send(self, tensor: Tensor) -> None:
        """Goes on its way; `arrived` waits for it."""
        work = dist.isend(tensor, group=self._group, group_dst=self._target)
        assert work is not None
        self._leaving = [(one, held) for one, held in self._leaving if not one.is_completed()]
        self._leaving.append((work, tensor))

    def receive(self, like: Tensor) -> Tensor:
        dist.recv(like, group=self._group, group_src=self._source)
        return like

    def arrived(self) -> None:
        wait_for(work for work, _ in self._leaving)
        self._leaving.clear()


class Pipelined:
    """Implements passes.Passes for one rank of a pipeline."""

    def __init__(self, net: ArchonNet, world: World) -> None:
        self._net = net
        self._stages = net.own_stages()
        self._wrapped = [in_pieces(stage) for stage in self._stages]
        self._rank, self._ranks = world.index("p"), world.size("p")
        sizes = tuple(getattr(world.spec, axis) for axis in AXES)
        before, after = (self._rank - 1) % self._ranks, (self._rank + 1) % self._ranks
        forward = world.group("p")
        backward = init_device_mesh(world.device.type, sizes, mesh_dim_names=AXES).get_group("p")
        assert forward is not None
        self._ahead = _Link(forward, before, after)
        self._back = _Link(backward, after, before)
        self._ends = _ends_of_the_pipelines(world) if net.shared else None

    def train(self, packs: Sequence[PackedBatch], loss: Loss) -> None:
        packs = self._rounds(packs)
        inside: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        for step in schedule(self._ranks, len(self._stages), len(packs))[self._rank]:
            stage, packed = self._stages[step.chunk], packs[step.micro_batch]
            key = (step.chunk, step.micro_batch)
            if isinstance(step, Forward):
                arrived, left = self._forward(stage, packed)
                if isinstance(left, tuple):
                    left = loss(packed, *left)
                inside[key] = (arrived, left)
            else:
                arrived, left = inside.pop(key)
                sum_over_replicas(self._wrapped[step.chunk], now=step.micro_batch == len(packs) - 1)
                grad = None if stage.last else self._back.receive(torch.empty_like(left))
                torch.autograd.backward(left, grad)
                if arrived is not None:
                    assert arrived.grad is not None
                    self._back.send(arrived.grad)
        self._ahead.arrived()
        self._back.arrived()
        complete_gradients(self._net)
        self._add_up_copies()

    @torch.no_grad()
    def score(self, packs: Sequence[PackedBatch]) -> list[Tensor | None]:
        wanted, packs = len(packs), self._rounds(packs)
        outputs: list[Tensor | None] = [None] * len(packs)
        forwards = schedule(self._ranks, len(self._stages), len(packs))[self._rank]
        for step in (each for each in forwards if isinstance(each, Forward)):
            _, left = self._forward(self._stages[step.chunk], packs[step.micro_batch])
            if isinstance(left, tuple):
                outputs[step.micro_batch] = left[0]
        self._ahead.arrived()
        return outputs[:wanted]

    def _rounds(self, packs: Sequence[PackedBatch]) -> list[PackedBatch]:
        """On the device, and whole rounds of them where there are rounds."""
        missing = -len(packs) % self._ranks if len(self._stages) > 1 else 0
        return [packed.to(self._net.device) for packed in (*packs, *[empty_batch()] * missing)]

    def _forward(self, stage: Stage, packed: PackedBatch) -> tuple[Tensor | None, Tensor | tuple[Tensor, Tensor]]:
        arrived = None
        if not stage.first:
            arrived = self._ahead.receive(stage.place_for(packed)).requires_grad_(torch.is_grad_enabled())
        left: Tensor | tuple[Tensor, Tensor] = stage(packed, arrived)
        if isinstance(left, Tensor):
            self._ahead.send(left.detach().contiguous())
        return arrived, left

    def _add_up_copies(self) -> None:
        if self._ends is None:
            return
        for name, p in self._net.trained_parameters():
            if name in self._net.shared and p.grad is not None:
                dist.all_reduce(local(p.grad), group=self._ends)


def _ends_of_the_pipelines(world: World) -> dist.ProcessGroup | None:
    """The first and last rank of this rank's pipeline; None on those between. Every rank of the world calls it."""
    assert world.mesh is not None
    lines: Iterable[list[int]] = world.mesh.mesh.flatten(1).T.tolist()
    own = None
    for line in lines:
        group = dist.new_group([line[0], line[-1]])
        if world.rank in (line[0], line[-1]):
            own = group
    return own
