"""`areal plan`: memory per rank, communication per step and a ranked list of layouts for a model on N devices.

    areal plan --model qwen3-235b-a22b --gpus 1024 --gpu h100
    areal plan --model ./my-model --gpus 8 --gpu a100 --sequence 32768 --tokens-per-mb 32768 --json
    areal plan --model qwen3-30b-a3b --layout archon:d4t2e8 --gpu h200           # this one alone
    areal plan --model smollm2-135m --gpus 2 --gpu cpu

Exit codes: 0 something fits, 1 nothing does (a sentence says what would), 2 a wrong command line or model. Nothing is loaded and nothing is
started; torch is not imported. docs/parallel_plan.md says what is assumed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import get_args

from rich.console import Console

from areal.base.errors import ArealError, ConfigError
from areal.config.backend_spec import MOST_PROCESSES, BackendSpec, parse_backend, wrong_replicas
from areal.config.engine import Dtype, Offload
from areal.tools.plan.devices import DEVICES, device_named
from areal.tools.plan.layout import Checkpointing, Job, reasons
from areal.tools.plan.presets import PRESETS
from areal.tools.plan.report import as_json, print_plan
from areal.tools.plan.search import Plan, plan_for, plan_of
from areal.tools.plan.shape import read_shape

WIDTH = 120


def main(argv: Sequence[str] | None = None) -> int:
    """See the module for the exit codes."""
    options = _parser().parse_args(argv)
    try:
        plan = _planned(options)
    except ArealError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        sys.stdout.write(as_json(plan, options.top))
    else:
        console = Console()
        console.width = max(console.width, WIDTH)
        print_plan(plan, options.top, console)
    return 1 if plan.advice else 0


def _planned(options: argparse.Namespace) -> Plan:
    job, shape = _job(options), read_shape(options.model)
    if options.layout is None:
        if options.gpus is None:
            raise ConfigError("--gpus N or --layout SPEC is needed: on how many devices, or in which layout?")
        if said := wrong_replicas(BackendSpec("fsdp", d=options.gpus), job.replicas):
            raise ConfigError(f"--gpus {options.gpus}: {said}")
        return plan_for(shape, options.gpus, device_named(options.gpu, options.gpus), job)
    spec = parse_backend(options.layout, "train")
    if wrong := reasons(spec, shape, job):
        raise ConfigError(f"--layout: {'; '.join(wrong)}")
    if options.gpus not in (None, spec.size):
        raise ConfigError(
            f"--layout {spec} takes {spec.size} devices, --gpus says {options.gpus}; leave one of them out"
        )
    return plan_of([spec], shape, device_named(options.gpu, spec.size), job)


def _job(options: argparse.Namespace) -> Job:
    for name, least, most in (
        ("gpus", 1, MOST_PROCESSES),
        ("tokens_per_mb", 64, 1 << 24),
        ("sequence", 2, 1 << 24),
        ("batch_tokens", 1, 1 << 34),
        ("lora_rank", 1, 1 << 16),
        ("replicas", 1, MOST_PROCESSES),
        ("top", 1, 10_000),
    ):
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: give a number from {least} to {most}")
    dtype = options.dtype or ("float32" if options.gpu == "cpu" else "bfloat16")
    sequence = options.sequence or options.tokens_per_mb
    return Job(
        options.tokens_per_mb,
        sequence,
        options.batch_tokens,
        dtype,
        options.checkpointing,
        options.lora_rank or 0,
        options.offload,
        options.replicas,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="areal plan",
        description="How a model can lie on N devices: memory per rank, communication per step, layouts ranked by estimated time.",
        epilog="Exit codes: 0 something fits, 1 nothing does, 2 a wrong command line or model.",
    )
    known = ", ".join(PRESETS)
    parser.add_argument("--model", required=True, help=f"a folder, a config.json, a bundled model, or one of: {known}")
    parser.add_argument("--gpus", type=int, metavar="N", help="devices that train")
    parser.add_argument("--layout", metavar="SPEC", help="judge this layout alone, as actor.backend names it")
    parser.add_argument(
        "--gpu", choices=sorted(DEVICES), default="h100", help="which (h100); cpu: ranks on this machine"
    )
    parser.add_argument("--tokens-per-mb", type=int, default=8192, metavar="N", help="actor.max_tokens_per_mb (8192)")
    parser.add_argument("--sequence", type=int, metavar="N", help="tokens of the longest row (as --tokens-per-mb)")
    parser.add_argument("--batch-tokens", type=int, default=1 << 20, metavar="N", help="tokens of a step (1048576)")
    parser.add_argument("--dtype", choices=get_args(Dtype), help="of parameters and compute (bfloat16; cpu: float32)")
    parser.add_argument(
        "--checkpointing", choices=get_args(Checkpointing), help="of activations (whatever is fastest of what fits)"
    )
    parser.add_argument(
        "--lora-rank", type=int, metavar="R", help="actor.lora.rank, on all linear maps (all is trained)"
    )
    parser.add_argument("--offload", choices=get_args(Offload), default="none", help="actor.offload (none)")
    parser.add_argument("--replicas", type=int, default=1, metavar="R", help="actor.replicas (1)")
    parser.add_argument("--top", type=int, default=5, metavar="K", help="layouts to list (5)")
    parser.add_argument("--json", action="store_true", help="the same as one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())
