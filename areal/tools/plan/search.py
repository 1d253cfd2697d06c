"""All layouts of N devices, ranked: those that fit first, by the estimated time of a step; and what would fit where nothing does.

    plan = plan_for(shape, gpus=64, device=DEVICES["h100"], job=job)
    plan.ranked[0].spec, plan.advice

Used by __main__.py. Neighbours: layout.py (which there are), memory.py, traffic.py (what each costs).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from areal.config.backend_spec import BackendSpec
from areal.tools.plan.devices import Device
from areal.tools.plan.layout import Checkpointing, Job, layouts
from areal.tools.plan.memory import Memory, rank_memory
from areal.tools.plan.shape import Shape
from areal.tools.plan.traffic import Cost, step_cost

CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")
"""What actor.gradient_checkpointing can say, the fastest first."""
MOST_GPUS = 1 << 14


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout with the cheapest checkpointing that lets it fit, or full where none does."""

    spec: BackendSpec
    checkpointing: Checkpointing
    memory: Memory
    cost: Cost
    fits: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """ranked: what fits, fastest first; where nothing does the three that need least. advice: then a sentence with what would fit."""

    shape: Shape
    device: Device
    gpus: int
    job: Job
    ranked: tuple[Candidate, ...]
    considered: int
    advice: str = ""


def plan_for(shape: Shape, gpus: int, device: Device, job: Job) -> Plan:
    """Every layout of `gpus` devices, judged."""
    return plan_of(layouts(shape, gpus, job, node=device.node), shape, device, job)


def plan_of(specs: Iterable[BackendSpec], shape: Shape, device: Device, job: Job) -> Plan:
    """These layouts, at least one and all of one size, judged. They must fit the shape (layout.py: reasons)."""
    found = [_judge(shape, spec, job, device) for spec in specs]
    gpus = found[0].spec.size
    fitting = sorted((each for each in found if each.fits), key=lambda each: each.cost.seconds)
    if fitting:
        return Plan(shape, device, gpus, job, tuple(fitting), len(found))
    closest = sorted(found, key=lambda each: (each.memory.total, each.cost.seconds))[:3]
    return Plan(shape, device, gpus, job, tuple(closest), len(found), _advice(shape, gpus, device, job))


def _judge(shape: Shape, spec: BackendSpec, job: Job, device: Device) -> Candidate:
    choices = CHECKPOINTING if job.checkpointing is None else (job.checkpointing,)
    judged = []
    for checkpointing in choices:
        memory = rank_memory(shape, spec, job, device, checkpointing)
        fits = memory.total <= device.memory
        judged.append(Candidate(spec, checkpointing, memory, step_cost(shape, spec, job, device, checkpointing), fits))
    fitting = [each for each in judged if each.fits]
    if fitting:
        return min(fitting, key=lambda each: each.cost.seconds)
    return min(judged, key=lambda each: each.memory.total)


def _fitting(shape: Shape, gpus: int, device: Device, job: Job) -> BackendSpec | None:
    """The fastest layout that fits."""
    found = [_judge(shape, spec, job, device) for spec in layouts(shape, gpus, job, node=device.node)]
    fitting = [each for each in found if each.fits]
    return min(fitting, key=lambda each: each.cost.seconds).spec if fitting else None


def _advice(shape: Shape, gpus: int, device: Device, job: Job) -> str:
    ways = [f"{what} ({spec})" for what, changed in _smaller(job) if (spec := _fitting(shape, gpus, device, changed))]
    if device.name != "cpu":
        more = 1 << gpus.bit_length()
        while more <= MOST_GPUS and not ways[3:]:
            if spec := _fitting(shape, more, device, job):
                ways.append(f"{more} devices ({spec})")
                break
            more *= 2
    if not ways:
        return "nothing that was tried fits: neither smaller micro-batches, nor full checkpointing, nor more devices"
    return "what would fit: " + ", or ".join(ways)


def _smaller(job: Job) -> Iterator[tuple[str, Job]]:
    """Jobs that need less on the same devices, with the option that asks for them."""
    if job.checkpointing not in (None, "full"):
        yield "--checkpointing full", replace(job, checkpointing="full")
    if job.replicas > 1:
        yield "--replicas 1", replace(job, replicas=1)
    if job.dtype == "float32":
        yield "--dtype bfloat16", replace(job, dtype="bfloat16")
    tokens = job.packed_tokens // 2
    while tokens >= max(256, job.sequence):
        yield f"--tokens-per-mb {tokens}", replace(job, tokens_per_mb=tokens)
        tokens //= 2
