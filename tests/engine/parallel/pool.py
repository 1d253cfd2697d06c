"""A pool of processes that are the ranks of one net after another, so that a table of layouts costs one start.

    with Pool(4) as pool:
        result = pool.run(Case(backend="archon:d2t2", model_dir=..., rows=rows))    # Result of the leader; raises what any rank raised
        result = alone(case)                                                        # the same in this process
        pool.call("archon:t2", check, argument)                                     # [check(world, argument)] of all ranks

Each case: load, one step whose gradients are kept, then more optimizer steps; what comes back is loss and stats of each step, whole
gradients and whole weights, on the CPU. Processes meet through a file; commands go through pipes. With `--device cuda` each rank has a GPU of its own
and NCCL (`use_device`); a case of more ranks than there are GPUs is skipped with that reason.
"""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from areal.base.errors import TrainingError
from areal.config.backend_spec import parse_backend
from areal.engine.archon import ArchonNet
from areal.engine.commands import Row
from areal.engine.engine import TrainEngine
from areal.engine.parallel.data import in_pieces
from areal.engine.parallel.gather import whole
from areal.engine.parallel.world import World, local
from areal.engine.settings import EngineSettings
from tests.engine.parallel.expert_faults import EXPERT_FAULTS
from tests.engine.parallel.planned_faults import PLANNED_FAULTS

LR = 1e-4
TIMEOUT_S = 450
"""Of a meeting and of each exchange: the slowest start of eight processes on a busy machine took a minute; pytest ends a test at 600."""
CPU = torch.device("cpu")

_device = "cpu"


def use_device(kind: str) -> None:
    """Where the nets of pools made from now on lie, and those of `alone`: "cpu" or "cuda"."""
    global _device
    _device = kind


def device_of(kind: str, rank: int) -> torch.device:
    return CPU if kind == "cpu" else torch.device(kind, rank)


@dataclass(frozen=True)
class Case:
    """What every rank does. settings: changes to the engine's. fault: broken on purpose before the first step, by name of FAULTS.
    restored_from: a checkpoint to go on from; saved_to: one to write after the last step."""

    backend: str
    model_dir: str
    rows: Sequence[Row]
    steps: int = 3
    settings: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""
    restored_from: str = ""
    saved_to: str = ""


@dataclass(frozen=True)
class Result:
    """losses, norms: of each step. gradients: of the first step. weights: after the last. local_bytes: of parameters on each rank.
    replicas_equal: whether processes that hold the same piece of a parameter hold the same bits after the last step."""

    losses: list[float]
    stats: list[dict[str, float]]
    scores: list[list[float]]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    local_bytes: list[int]
    replicas_equal: bool


def run_case(case: Case, rank: int, device: torch.device = CPU) -> Result:
    """On one rank of the default process group, or alone where the layout has one process."""
    spec = parse_backend(case.backend)
    changes: dict[str, Any] = {"optimizer": {"lr": LR, "gradient_clipping": 1e9}} | dict(case.settings)
    settings = EngineSettings.model_validate(
        {
            "backend": case.backend,
            "model_dir": case.model_dir,
            "algorithm": "grpo",
            "threads": 1,
            "total_steps": 100,
            **changes,
        }
    )
    world = World.join(spec, rank, device, meshed=settings.offload == "all")
    engine = TrainEngine.load(settings, world)
    if case.fault:
        FAULTS[case.fault](engine)
    done = int(engine.restore(case.restored_from)["step"]) if case.restored_from else 0
    scores = [values.tolist() for values in engine.score(case.rows)]
    gradients: dict[str, Tensor] = {}
    step = engine._optimizer.step
    engine._optimizer.step = lambda number: _keeping(gradients, engine, step, number)  # type: ignore[method-assign]
    stats = [engine.train_step(case.rows, number, number) for number in range(done, done + case.steps)]
    if case.saved_to:
        engine.save(case.saved_to, done + case.steps, full=True)
    weights = {name: tensor.to(CPU, copy=True) for name, tensor in engine.named_tensors()}
    own = sum(p.numel() * p.element_size() for _, p in _local(engine))
    every = [int(each) for each in world.gather(str(own).encode())]
    losses = [each["loss"] for each in stats]
    return Result(losses, stats, scores, gradients, weights, every, _replicas_equal(engine))


def _keeping(gradients: dict[str, Tensor], engine: TrainEngine, step: Any, number: int) -> Any:
    """The optimizer's step, after the first gradient was copied out, whole and before it is clipped."""
    if engine._optimizer.steps == 0:
        grads = [
            (name, p.grad)
            for name, p in engine.policy.trained_parameters()
            if p.grad is not None and engine.policy.shared.get(name, name) == name
        ]
        gradients.update((name, grad.to(CPU, copy=True)) for name, grad in whole(grads, engine.world))
    return step(number)


def _replicas_equal(engine: TrainEngine) -> bool:
    """Whether all pieces of one name and place have the same bits."""
    own = []
    for name, p in engine.policy.trained_parameters():
        place: list[str] = []
        if isinstance(p, DTensor):
            where = zip(p.device_mesh.mesh_dim_names, p.device_mesh.get_coordinate(), p.placements, strict=True)
            place = [f"{axis}{index}" for axis, index, how in where if not how.is_replicate()]
        bits = hashlib.sha256(local(p.detach()).contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()
        own.append(" ".join([bits, name, *place]))
    pieces = {line for message in engine.world.gather("\n".join(own).encode()) for line in message.decode().split("\n")}
    return len({piece.split(" ", 1)[1] for piece in pieces}) == len(pieces)


def _local(engine: TrainEngine) -> list[tuple[str, Tensor]]:
    return [(name, local(p.detach())) for name, p in engine.policy.trained_parameters()]


def refusal(world: World, case: Case) -> str:
    """What this rank says of a case that cannot be trained; for Pool.call."""
    try:
        run_case(case, world.rank, world.device)
    except TrainingError as error:
        return str(error)
    return ""


def alone(case: Case, kind: str | None = None) -> Result:
    """The same with one process, on the same engine (fsdp or archon). kind: of device, if not that of the pools."""
    name = parse_backend(case.backend).name
    return run_case(replace(case, backend=f"{name}:d1", fault=""), 0, device_of(kind or _device, 0))


def _tied_ends_apart(engine: TrainEngine) -> None:
    engine._passes._ends = None  # type: ignore[attr-defined]


def _norms_of_heads_alone(engine: TrainEngine) -> None:
    """Each rank of t keeps what it knows of the gradients of the norms of queries and keys."""
    for stage in cast(ArchonNet, engine.policy).own_stages():
        for block in stage.decoder.blocks():
            for norm in (block.self_attn.q_norm, block.self_attn.k_norm):
                assert norm is not None
                norm.weight.register_post_accumulate_grad_hook(_claim_complete)


def _claim_complete(p: Tensor) -> None:
    assert isinstance(p.grad, DTensor)
    p.grad = DTensor.from_local(p.grad.to_local(), p.grad.device_mesh, [Replicate()])


def _keys_of_others_alone(engine: TrainEngine) -> None:
    """No rank of c is told what the others' queries say of its keys and values."""
    for stage in cast(ArchonNet, engine.policy).own_stages():
        tokens = stage.tokens
        tokens.gathered = partial(_without_others, tokens.gathered, engine.world.index("c"))  # type: ignore[method-assign]


def _without_others(gathered: Callable[[Tensor], Tensor], index: int, x: Tensor) -> Tensor:
    pieces = list(gathered(x.detach()).split(len(x)))
    pieces[index] = x
    return torch.cat(pieces)


def _an_adapter_of_its_own(engine: TrainEngine) -> None:
    """A rank draws its part of A otherwise than the others."""
    for name, tensor in engine.policy.named_tensors():
        if engine.world.rank and ".lora_A." in name:
            local(tensor).mul_(1.5)


def _replicas_apart(engine: TrainEngine) -> None:
    """Gradients are summed within each replica, and then over that one alone."""
    groups = [dist.new_group([rank]) for rank in range(engine.world.spec.size)]
    for module in in_pieces(engine.policy):
        for each in module._get_fsdp_state()._fsdp_param_groups:
            each.mesh_info.replicate_process_group = groups[engine.world.rank]


FAULTS: dict[str, Callable[[TrainEngine], None]] = {
    "tied_ends_apart": _tied_ends_apart,
    "norms_of_heads_alone": _norms_of_heads_alone,
    "keys_of_others_alone": _keys_of_others_alone,
    "an_adapter_of_its_own": _an_adapter_of_its_own,
    "replicas_apart": _replicas_apart,
    **EXPERT_FAULTS,
    **PLANNED_FAULTS,
}
"""name -> what to break in an engine; each must make the twins differ. Dimensions add theirs."""


class Pool(AbstractContextManager["Pool"]):
    """Up to `size` processes, each started when it is first needed."""

    def __init__(self, size: int, timeout_s: float = TIMEOUT_S) -> None:
        self.size = size
        self.device = _device
        self._timeout_s = timeout_s
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._folder = tempfile.TemporaryDirectory(prefix="areal-pool-")

    def _grow(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(len(self._pipes), size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, theirs, self._folder.name, self._timeout_s, self.device), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __exit__(self, *exc: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def run(self, case: Case) -> Result:
        """Raises RuntimeError with the traceback of a rank that failed. Cases of fewer processes than the pool use its first ones."""
        result: Result = self._everywhere(case.backend, partial(run_case, case))[0]
        return result

    def call(self, backend: str, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """function(world, *arguments) of each rank, in rank order; it is importable. Raises as `run` does."""
        return self._everywhere(backend, partial(_in_world, function, backend, arguments))

    def _everywhere(self, backend: str, work: Callable[[int, torch.device], Any]) -> list[Any]:
        size = parse_backend(backend).size
        assert size <= self.size, f"{backend} needs {size} processes, the pool has {self.size}"
        if self.device != "cpu" and size > torch.cuda.device_count():
            pytest.skip(
                f"{backend} needs {size} GPUs, NCCL takes one rank on each, and there are {torch.cuda.device_count()}"
            )
        self._grow(size)
        number = _next_meeting()
        for pipe in self._pipes[:size]:
            pipe.send((number, size, work))
        answers = [pipe.recv() for pipe in self._pipes[:size]]
        raised = [(rank, answer.said) for rank, answer in enumerate(answers) if isinstance(answer, _Raised)]
        for rank, said in sorted(
            raised, key=lambda each: "closed by peer" in each[1]
        ):  # first who did not just lose another
            raise RuntimeError(f"rank {rank} of {backend}: {said}")
        return answers


@dataclass(frozen=True)
class _Raised:
    said: str


def _in_world(
    function: Callable[..., Any], backend: str, arguments: Sequence[Any], rank: int, device: torch.device
) -> Any:
    return function(World.join(parse_backend(backend), rank, device), *arguments)


_meetings = iter(range(1 << 30))


def _next_meeting() -> int:
    return next(_meetings)


def _serve(rank: int, pipe: Connection, folder: str, timeout_s: float, kind: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    device = device_of(kind, rank)
    if kind == "cuda":
        torch.cuda.set_device(device)
    while True:
        try:
            number, size, work = pipe.recv()
        except EOFError:
            return
        try:
            store = dist.FileStore(str(Path(folder) / str(number)), size)
            store.set_timeout(timedelta(seconds=timeout_s))
            dist.init_process_group(
                "gloo" if kind == "cpu" else "nccl",
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
            )
            result = work(rank, device)
            store.set(f"done-{rank}", "")
            store.wait([f"done-{each}" for each in range(size)])  # a link closed early cuts off what others still read
            pipe.send(None if rank and isinstance(result, Result) else result)  # all have the same
        except Exception:
            pipe.send(_Raised(traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            gc.collect()  # nets lie in cycles and hold their groups, each of which has threads that wake up a hundred times a second
            _clear_sharding_prop_cache()  # what it remembers names groups of this meeting, and the next has others of the same names
