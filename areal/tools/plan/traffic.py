"""Bytes that a rank sends in one step, and how long the step takes.

    cost = step_cost(shape, spec, job, device, "full")
    cost.seconds, cost.exposed, cost.traffic["data"].bytes

An estimate for ranking, not a forecast: matrix products at half of the peak (what large ones reach), everything else at the speed
of the memory, collectives at 80 % of the links' rate. FSDP's gathers run beside compute, the others hold it up. Neighbour: memory.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal.config.backend_spec import BackendSpec
from areal.tools.plan.devices import Device
from areal.tools.plan.layout import Checkpointing, Job, exchanges_heads
from areal.tools.plan.memory import (
    Stage,
    kinds_of,
    layer_activations,
    mask_numbers,
    micro_batches,
    pieces_of,
    share_of,
    stages_of,
)
from areal.tools.plan.shape import Shape

PRODUCTS = 0.5
"""Part of the peak rate that matrix products reach."""
LINKS = 0.8
"""Part of the links' rate that collectives reach."""
HOST_LINK = 5e10
"""Bytes per second between a device and its host, one way: PCIe 5.0 x16."""
HOST_MEMORY = 5e10
"""Bytes per second of the host's memory, a device's share of it, while AdamW runs there."""
LATENCY = 2e-5
"""Seconds that one collective takes however small it is, times the logarithm of its ranks."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one dimension, per rank and step. bytes: sent. seconds: at the rate of the slowest link on their way, latency included."""

    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one optimizer step. seconds: all of it. compute: arithmetic and memory traffic. exposed: communication that compute does not hide.
    bubble: waiting for other stages. traffic: by dimension, the ones that are used. mfu: useful arithmetic over what the devices could do."""

    seconds: float
    compute: float
    exposed: float
    bubble: float
    optimizer: float
    micro_batches: int
    traffic: dict[str, Traffic]
    mfu: float


def step_cost(shape: Shape, spec: BackendSpec, job: Job, device: Device, checkpointing: Checkpointing) -> Cost:
    """One optimizer step of batch_tokens over all ranks."""
    count, stages = micro_batches(spec, job), kinds_of(stages_of(shape, spec, job))
    tokens = min(job.packed_tokens, max(job.sequence, -(-job.batch_tokens // (spec.d * count))))
    compute = max(_compute(shape, spec, job, device, checkpointing, tokens, stage) for stage in stages)
    data = max((_data(shape, spec, job, device, stage) for stage in stages), key=lambda each: each.seconds)
    sums = max((_replicas(shape, spec, job, device, stage) for stage in stages), key=lambda each: each.seconds)
    exposed = {
        "tensor": _tensor(shape, spec, job, device, checkpointing, tokens),
        "context": _context(shape, spec, job, device, checkpointing, tokens),
        "expert": _expert(shape, spec, job, device, checkpointing, tokens),
        "pipeline": _pipeline(shape, spec, job, device, tokens),
    }
    held_up = sum(each.seconds for each in exposed.values())
    share = max((share_of(shape, spec, stage, job.replicas) for stage in stages), key=lambda each: each.own)
    # Moments, masters, gradients and parameters are read and written once.
    trained = -(-shape.adapters(job.lora_rank) // pieces_of(spec, job.replicas)[0]) if job.lora_rank else share.own
    optimizer = trained * (28 if job.width == 4 else 36) / device.hbm
    if job.offload != "none" and device.name != "cpu":
        optimizer = trained * ((28 if job.width == 4 else 36) / HOST_MEMORY + 2 * job.width / HOST_LINK)
    if job.offload == "all" and device.name != "cpu":  # twice to the device, gradients back
        data = Traffic(data.bytes, data.seconds + (2 * share.own + trained) * job.width / HOST_LINK)
    waiting = max(0.0, data.seconds - compute)
    last = max(0.0, data.seconds + sums.seconds - compute) - waiting  # more than the others, for the sums over replicas
    each_mb = compute + held_up + waiting
    bubble = (spec.p - 1) * each_mb
    seconds = count * each_mb + last + bubble + optimizer
    useful = (2 if job.lora_rank else 3) * job.batch_tokens * _forward_flops(shape, job)
    return Cost(
        seconds=seconds,
        compute=count * compute,
        exposed=count * (held_up + waiting) + last,
        bubble=bubble,
        optimizer=optimizer,
        micro_batches=count,
        traffic={
            name: Traffic(times * each.bytes, times * each.seconds)
            for name, each, times in (
                ("data", data, count),
                ("replicas", sums, 1),
                *((name, each, count) for name, each in exposed.items()),
            )
            if each.bytes
        },
        mfu=useful / (seconds * spec.size * device.flops(job.dtype)),
    )


def _forward_flops(shape: Shape, job: Job) -> float:
    """Of one token: two for each parameter it goes through, and for each number of each key and value it looks at."""
    looked_at = mask_numbers(job, job.packed_tokens) / job.packed_tokens
    maps = shape.active_parameters - (0 if shape.tied else shape.table)
    return 2 * maps + 4 * shape.layers * shape.query_width * looked_at


def _compute(
    shape: Shape, spec: BackendSpec, job: Job, device: Device, checkpointing: Checkpointing, tokens: int, stage: Stage
) -> float:
    """Seconds of one micro-batch on one rank of the stage."""
    head = 2.0 * shape.table
    layers = (_forward_flops(shape, job) - head) * stage.layers / shape.layers
    again = 1 if checkpointing == "full" else 0
    passes = 2 if job.lora_rank else 3  # frozen weights have no gradient
    each = layers * (passes + again) + (passes + 1) * head * stage.last  # the head's chunks are computed twice
    flops = tokens * each / (spec.t * spec.c)
    kept = layer_activations(shape, spec, job, device, experts=shape.experts > 0) * stage.layers
    touched = (
        4 if checkpointing == "none" else 6
    )  # written, read back, and their gradients; twice written where computed again
    moved = touched * kept * tokens / job.packed_tokens
    return flops / (PRODUCTS * device.flops(job.dtype)) + moved / device.hbm


def _data(shape: Shape, spec: BackendSpec, job: Job, device: Device, stage: Stage) -> Traffic:
    """FSDP, per micro-batch: parameters gathered for the forward and again for the backward pass, gradients summed in float32 (those of adapters
    are too few to count)."""
    each = 2 * job.width + (0 if job.lora_rank else 4)
    dense, experts = _gathered_parameters(shape, spec, stage)
    pieces, copies = pieces_of(spec, job.replicas)
    calls = 3 * stage.layers
    found = _ring(dense * each, pieces, spec.t, device, calls=calls)
    more = _ring(experts * each, copies, spec.e * spec.et, device, calls=calls)
    return Traffic(found.bytes + more.bytes, found.seconds + more.seconds)


def _replicas(shape: Shape, spec: BackendSpec, job: Job, device: Device, stage: Stage) -> Traffic:
    """With the last micro-batch: each rank's pieces of the gradients summed over the replicas in float32, by scattering and gathering them."""
    if job.lora_rank:
        return Traffic(0, 0.0)
    dense, experts = _gathered_parameters(shape, spec, stage)
    pieces, copies = pieces_of(spec, job.replicas)
    calls, parts = 2 * stage.layers, spec.e * spec.et
    found = _ring(dense / pieces * 8, job.replicas, spec.t * pieces, device, calls=calls)
    more = _ring(experts / copies * 8, spec.stage_size // parts // copies, parts * copies, device, calls=calls)
    return Traffic(found.bytes + more.bytes, found.seconds + more.seconds)


def _gathered_parameters(shape: Shape, spec: BackendSpec, stage: Stage) -> tuple[int, int]:
    """Of a rank's tensor and expert share: outside of experts, and inside."""
    experts = stage.sparse * (shape.experts // spec.e) * shape.expert // spec.et
    return share_of(shape, spec, stage).whole - experts, experts


def _tensor(
    shape: Shape, spec: BackendSpec, job: Job, device: Device, checkpointing: Checkpointing, tokens: int
) -> Traffic:
    """Sequence parallel: before each of a layer's two halves the hidden states are gathered, after it summed and scattered; the same backward."""
    passes = 3 if checkpointing == "full" else 2
    calls = 4 * passes * _up(shape.layers, spec.p)
    one = tokens // spec.c * shape.hidden * job.width
    return _ring(calls * one, spec.t, 1, device, calls=calls)


def _context(
    shape: Shape, spec: BackendSpec, job: Job, device: Device, checkpointing: Checkpointing, tokens: int
) -> Traffic:
    """Per layer and pass: heads exchanged for tokens and back (queries, keys, values, outputs), or all keys and values gathered."""
    passes = 3 if checkpointing == "full" else 2
    calls = passes * _up(shape.layers, spec.p)
    each = tokens * 2 * shape.kv_width // spec.t * job.width
    if exchanges_heads(shape, spec):
        each = (each + tokens * 2 * shape.query_width // spec.t * job.width) // spec.c
        calls *= 2
        each //= 2
    return _ring(calls * each, spec.c, spec.t, device, calls=calls)


def _expert(
    shape: Shape, spec: BackendSpec, job: Job, device: Device, checkpointing: Checkpointing, tokens: int
) -> Traffic:
    """Two all-to-alls per layer and direction: every token to its experts, and back."""
    passes = 3 if checkpointing == "full" else 2
    calls = 2 * passes * _up(shape.expert_layers, spec.p)
    copies = tokens // (spec.c * spec.t) * shape.experts_per_token
    parts = spec.e * spec.et
    sent = calls * copies * spec.et * shape.hidden * job.width * (parts - 1) // parts
    if not sent:
        return Traffic(0, 0.0)
    # All-to-all takes the ports one by one: what leaves the node leaves through this rank's own.
    outside = max(0.0, 1 - device.node / parts)
    seconds = sent * ((1 - outside) / device.link + outside / device.network) / LINKS
    return Traffic(sent, seconds + calls * LATENCY * parts.bit_length())


def _pipeline(shape: Shape, spec: BackendSpec, job: Job, device: Device, tokens: int) -> Traffic:
    """Hidden states to the next stage, their gradients back."""
    if spec.p == 1:
        return Traffic(0, 0.0)
    sent = 2 * tokens // (spec.c * spec.t) * shape.hidden * job.width
    return Traffic(sent, sent / (LINKS * device.bus(2, spec.size // spec.p)) + 2 * LATENCY)


def _ring(bytes_: float, ranks: int, stride: int, device: Device, *, calls: int) -> Traffic:
    """A gather or a sum-and-scatter of so many bytes in all, in `calls` pieces, over ranks `stride` apart."""
    if ranks == 1 or not bytes_:
        return Traffic(0, 0.0)
    sent = int(bytes_ * (ranks - 1) / ranks)
    return Traffic(sent, sent / (LINKS * device.bus(ranks, stride)) + calls * LATENCY * ranks.bit_length())


def _up(number: int, by: int) -> int:
    return -(-number // by)
