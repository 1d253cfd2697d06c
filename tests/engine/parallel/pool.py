"""A pool of processes that are the ranks of one net after another, so that a table of layouts costs one start.

    with Pool(4) as pool:
        result = pool.run(Case(backend="archon:d2t2", model_dir=..., rows=rows))    # Result of the leader; raises what any rank raised
        result = alone(case)                                                        # the same in this process

Each case: load, one step whose gradients are kept, then more optimizer steps; what comes back is loss and stats of each step, whole
gradients and whole weights. Processes meet through a file; commands go through pipes; gloo only. `python -m tests.engine.parallel.pool` is a rank.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.config.backend_spec import parse_backend
from areal.engine.commands import Row
from areal.engine.engine import TrainEngine
from areal.engine.parallel.gather import whole
from areal.engine.parallel.world import World
from areal.engine.settings import EngineSettings

LR = 1e-4
TIMEOUT_S = 120


@dataclass(frozen=True)
class Case:
    """What every rank does. settings: changes to the engine's. fault: broken on purpose before the first step, by name of FAULTS."""

    backend: str
    model_dir: str
    rows: Sequence[Row]
    steps: int = 3
    settings: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""


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


def run_case(case: Case, rank: int) -> Result:
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
    world = World.join(spec, rank)
    engine = TrainEngine.load(settings, world)
    if case.fault:
        FAULTS[case.fault](engine)
    scores = [values.tolist() for values in engine.score(case.rows)]
    gradients: dict[str, Tensor] = {}
    step = engine._optimizer.step
    engine._optimizer.step = lambda number: _keeping(gradients, engine, step, number)  # type: ignore[method-assign]
    stats = [engine.train_step(case.rows, number, number) for number in range(case.steps)]
    weights = {name: tensor.clone() for name, tensor in engine.named_tensors()}
    own = sum(p.numel() * p.element_size() for _, p in _local(engine))
    every = [int(each) for each in world.gather(str(own).encode())]
    return Result([each["loss"] for each in stats], stats, scores, gradients, weights, every)


def _keeping(gradients: dict[str, Tensor], engine: TrainEngine, step: Any, number: int) -> Any:
    """The optimizer's step, after the first gradient was copied out, whole and before it is clipped."""
    if not gradients:
        grads = [
            (name, p.grad)
            for name, p in engine.policy.trained_parameters()
            if p.grad is not None and engine.policy.shared.get(name, name) == name
        ]
        gradients.update((name, grad.clone()) for name, grad in whole(grads, engine.world))
    return step(number)


def _local(engine: TrainEngine) -> list[tuple[str, Tensor]]:
    from areal.engine.parallel.world import local

    return [(name, local(p.detach())) for name, p in engine.policy.trained_parameters()]


def alone(case: Case) -> Result:
    """The same with one process, on the same engine (fsdp or archon)."""
    name = parse_backend(case.backend).name
    return run_case(Case(f"{name}:d1", case.model_dir, case.rows, case.steps, case.settings), 0)


def _tied_ends_apart(engine: TrainEngine) -> None:
    engine._passes._ends = None  # type: ignore[attr-defined]


FAULTS: dict[str, Any] = {"tied_ends_apart": _tied_ends_apart}
"""name -> what to break in an engine; each must make the twins differ. Dimensions add theirs."""


class Pool(AbstractContextManager["Pool"]):
    """`size` processes, started once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._folder = tempfile.TemporaryDirectory(prefix="areal-pool-")

    def __enter__(self) -> Pool:
        context = multiprocessing.get_context("spawn")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs, self._folder.name), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        return self

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
        size = parse_backend(case.backend).size
        assert size <= self.size, f"{case.backend} needs {size} processes, the pool has {self.size}"
        number = _next_meeting()
        for pipe in self._pipes[:size]:
            pipe.send((number, size, case))
        answers = [pipe.recv() for pipe in self._pipes[:size]]
        for rank, answer in enumerate(answers):
            if isinstance(answer, str):
                raise RuntimeError(f"rank {rank} of {case.backend}: {answer}")
        result: Result = answers[0]
        return result


_meetings = iter(range(1 << 30))


def _next_meeting() -> int:
    return next(_meetings)


def _serve(rank: int, pipe: Connection, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    while True:
        try:
            number, size, case = pipe.recv()
        except EOFError:
            return
        try:
            store = dist.FileStore(str(Path(folder) / str(number)), size)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S)
            )
            result = run_case(case, rank)
            pipe.send(result if rank == 0 else None)
        except Exception:
            pipe.send(traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
