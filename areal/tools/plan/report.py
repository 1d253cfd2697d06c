"""A plan for a person (tables) and for programs (JSON).

    print_plan(plan, top=5, console=Console())
    sys.stdout.write(as_json(plan, top=5))

The best layout comes with its memory and traffic in full and the lines to copy into a run's command; the others are one line each.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from areal.tools.plan.devices import GB, GIB
from areal.tools.plan.search import Candidate, Plan

ASSUMPTIONS = (
    "per rank, at the peak of a step of several micro-batches; AdamW in float32 (with float32 masters under bfloat16)",
    "FSDP over d and c, a layer gathered at a time; 1F1B holds p micro-batches on the first stage; sequence parallel under t; e over the ranks of "
    "d, c and t, tokens spread evenly over the experts",
    "attention in blocks of 256 queries with masks and repeated keys, rows of the longest length; log-probs in chunks",
    "seconds rank layouts, they forecast nothing: docs/parallel_plan.md",
)


def print_plan(plan: Plan, top: int, console: Console) -> None:
    """Everything that `areal plan` says, in tables."""
    console.print(_head(plan), highlight=False, soft_wrap=True)
    best = plan.ranked[0]
    if plan.advice:
        needed, there = _gib(best.memory.total), _gib(plan.device.memory)
        console.print(
            f"\nnothing fits: the layout that needs least, {best.spec} with {best.checkpointing} checkpointing, takes {needed} of {there} "
            f"GiB; {plan.advice}",
            highlight=False,
            soft_wrap=True,
        )
    fastest = "layouts that need least:" if plan.advice else "layouts that fit, fastest first:"
    sent = f"sent by a rank in a step of {best.cost.micro_batches} micro-batches:"
    for title, table in (
        (fastest, _ranking(plan, top)),
        (f"memory of a rank under {best.spec}, {best.memory.moment}:", _memory(plan, best)),
        (sent, _sent(best)),
    ):
        console.print(f"\n{title}", highlight=False, soft_wrap=True)
        console.print(table)
    if not plan.advice:
        console.print(f"\nto copy: {' '.join(overrides(plan, best))}", highlight=False, soft_wrap=True)
    console.print("\nassumed: " + "; ".join(ASSUMPTIONS), style="dim", highlight=False)


def as_json(plan: Plan, top: int) -> str:
    """The same as one object; bytes and seconds are plain numbers."""
    tree: dict[str, Any] = {
        "model": msgspec.to_builtins(plan.shape)
        | {"parameters": plan.shape.parameters, "active_parameters": plan.shape.active_parameters},
        "gpus": plan.gpus,
        "device": msgspec.to_builtins(plan.device),
        "job": msgspec.to_builtins(plan.job),
        "layouts_considered": plan.considered,
        "fits": not plan.advice,
        "advice": plan.advice,
        "ranked": [_candidate(plan, each) for each in plan.ranked[:top]],
        "assumptions": list(ASSUMPTIONS),
    }
    return json.dumps(tree, indent=2) + "\n"


def overrides(plan: Plan, candidate: Candidate) -> list[str]:
    """The keys that ask a run for this layout."""
    return [
        f"actor.backend={candidate.spec}",
        f"actor.dtype={plan.job.dtype}",
        f"actor.max_tokens_per_mb={plan.job.tokens_per_mb}",
        f"actor.gradient_checkpointing={candidate.checkpointing}",
        *([f"actor.lora.rank={plan.job.lora_rank}"] if plan.job.lora_rank else []),
        *([f"actor.offload={plan.job.offload}"] if plan.job.offload != "none" else []),
        *([f"actor.replicas={plan.job.replicas}"] if plan.job.replicas > 1 else []),
    ]


def _candidate(plan: Plan, candidate: Candidate) -> dict[str, Any]:
    memory = candidate.memory.rows() | {"total": candidate.memory.total, "host": candidate.memory.host}
    moment = candidate.memory.moment
    return {
        "spec": str(candidate.spec),
        "fits": candidate.fits,
        "checkpointing": candidate.checkpointing,
        "memory": memory,
        "peak": moment,
        "step": msgspec.to_builtins(candidate.cost),
        "overrides": overrides(plan, candidate),
    }


def _head(plan: Plan) -> str:
    shape, job = plan.shape, plan.job
    active = f", {shape.active_parameters / 1e9:.1f}B active" if shape.experts else ""
    return (
        f"{shape.name}: {_count(shape.parameters)} parameters{active}, on {plan.gpus} x {plan.device.name} of {_gib(plan.device.memory)} GiB; "
        f"{job.dtype}, {job.batch_tokens:,} tokens a step in micro-batches of {job.packed_tokens:,}, rows of up to {job.sequence:,}; "
        f"{plan.considered} layouts"
    )


def _ranking(plan: Plan, top: int) -> Table:
    table = Table()
    for name in ("", "layout", "checkpointing", "GiB/rank", "s/step", "compute", "exposed", "bubble", "sent GB", "MFU"):
        table.add_column(name, justify="left" if name in ("layout", "checkpointing") else "right", no_wrap=True)
    for number, each in enumerate(plan.ranked[:top], 1):
        cost = each.cost
        table.add_row(
            str(number),
            str(each.spec),
            each.checkpointing,
            _gib(each.memory.total),
            *(_seconds(value) for value in (cost.seconds, cost.compute, cost.exposed, cost.bubble)),
            f"{sum(part.bytes for part in cost.traffic.values()) / GB:.1f}",
            f"{cost.mfu:.0%}",
        )
    return table


def _memory(plan: Plan, best: Candidate) -> Table:
    table = Table()
    table.add_column("")
    table.add_column("GiB", justify="right")
    for name, value in best.memory.rows().items():
        table.add_row(name, f"{value / GIB:.2f}")
    table.add_section()
    table.add_row(f"total, of {_gib(plan.device.memory)}", f"{best.memory.total / GIB:.2f}")
    if best.memory.host:
        table.add_row("in the host's memory", f"{best.memory.host / GIB:.2f}")
    return table


def _sent(best: Candidate) -> Table:
    table = Table()
    for name in ("dimension", "GB", "s at link rate"):
        table.add_column(name, justify="left" if name == "dimension" else "right")
    for name, part in best.cost.traffic.items():
        table.add_row(name, f"{part.bytes / GB:.2f}", _seconds(part.seconds))
    if not best.cost.traffic:
        table.add_row("none", "0.00", "0.00")
    return table


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"


def _gib(value: int) -> str:
    return f"{value / GIB:.1f}"


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"
