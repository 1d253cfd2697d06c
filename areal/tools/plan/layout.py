"""Layouts: which sizes of d, t, p, c and e a model can be cut into, and all that N devices allow.

    reasons(spec, shape)                        # [] or one sentence for each number that does not fit
    for spec in layouts(shape, gpus=64, job=job): ...

e splits experts over the ranks that d, c and t span, and adds no process. Tensor parallelism stays inside a node. Where d alone is used, a model
without experts gets `fsdp:`, for it takes any Hugging Face causal LM; one with experts gets `archon:`, which sends tokens to them and keeps them even, and
`fsdp:` on request, as are experts in pieces (`ffn:t`). The spec is that of `actor.backend` (config/backend_spec.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Literal

from areal.base.errors import ConfigError
from areal.config.backend_spec import BackendSpec, divisors, wrong_replicas
from areal.config.engine import Offload
from areal.engine.parallel.dims import check_fits, context_kind
from areal.tools.plan.shape import Shape

Checkpointing = Literal["none", "selective", "full"]
LEAST_TOKENS = 64
"""Tokens of a micro-batch below which one is not cut over c."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained with. tokens_per_mb: forwarded tokens of a micro-batch; sequence: of the longest row; batch_tokens: of an optimizer step.
    checkpointing None: whatever is fastest of what fits. lora_rank: of adapters on all linear maps but experts, 0 where all is trained. replicas: how
    often the net is held whole."""

    tokens_per_mb: int
    sequence: int
    batch_tokens: int
    dtype: str
    checkpointing: Checkpointing | None = None
    lora_rank: int = 0
    offload: Offload = "none"
    replicas: int = 1

    @property
    def width(self) -> int:
        """Bytes of a number of parameters and activations."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def packed_tokens(self) -> int:
        """Tokens of the largest micro-batch: a longer row gets one of its own."""
        return max(self.tokens_per_mb, self.sequence)


def tensor_sizes(shape: Shape) -> list[int]:
    """Sizes of t that fit (engine/parallel/dims.py)."""
    return [t for t in divisors(shape.kv_heads) if not _cut_wrongly(BackendSpec("archon", t=t), shape)]


def reasons(spec: BackendSpec, shape: Shape, job: Job | None = None) -> list[str]:
    """What does not fit, each with the numbers that would."""
    wrong = _cut_wrongly(spec, shape)
    if job is not None and job.lora_rank and spec.name != "fsdp":
        wrong.append(f"{spec.name} has no adapters; fsdp:d{spec.size} fits --lora-rank")
    if job is not None and (said := wrong_replicas(spec, job.replicas)):
        wrong.append(said)
    return wrong


def expert_sizes(shape: Shape, ranks: int) -> list[int]:
    """Sizes of e: they divide the experts, and the ranks of d, c and t."""
    return divisors(gcd(shape.experts, ranks)) if shape.experts else [1]


def layouts(shape: Shape, gpus: int, job: Job, *, node: int) -> Iterator[BackendSpec]:
    """Every layout of just so many devices whose d the job's replicas divide. node: devices of one, which t never exceeds."""
    sizes = tensor_sizes(shape)
    if (not shape.experts or job.lora_rank or not sizes) and gpus % job.replicas == 0:
        yield BackendSpec("fsdp", d=gpus)
    if job.lora_rank:
        return
    for t in sizes:
        if gpus % t or t > node:
            continue
        for p in divisors(gpus // t):
            if p > shape.layers:
                break
            for c in divisors(gpus // (t * p)):
                if c > 1 and job.packed_tokens // c < LEAST_TOKENS:
                    break
                d = gpus // (t * p * c)
                if d % job.replicas:
                    continue
                for e in expert_sizes(shape, d * c * t):
                    if (t, p, c) != (1, 1, 1) or shape.experts:
                        yield BackendSpec("archon", d=d, t=t, p=p, c=c, e=e)


def exchanges_heads(shape: Shape, spec: BackendSpec) -> bool:
    """Whether ranks of c exchange heads for tokens (Ulysses), else each gathers all keys and values: what the engine takes by itself."""
    return context_kind(spec, shape.config, None) == "ulysses"


def _cut_wrongly(spec: BackendSpec, shape: Shape) -> list[str]:
    if spec.name == "fsdp":
        planned = f"archon:d{spec.d}t{spec.t}" + (f"e{spec.e}" if shape.experts else "")
        said = f"{spec}: what a family of transformers costs along t and e is not planned; {planned} is"
        return [said] if spec.t * spec.e > 1 else []
    try:
        check_fits(spec, shape.config)
    except ConfigError as error:
        return [str(error)]
    return []
