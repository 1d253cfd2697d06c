"""Whether a layout fits a model: each refusal names the numbers that would fit.

    check_fits(parse_backend("archon:d1t2"), read_config(folder))     # ConfigError: ... t of 1 or 3 fits
    check_layout(settings)                                            # the same of what a rank is told

No torch: what starts a run asks before any process does. Used by launch.py, by load.py before a net is loaded, and by the planner. The layouts
themselves: config/backend_spec.py.
"""

from __future__ import annotations

from math import gcd
from pathlib import Path

from areal.base.errors import ConfigError
from areal.config.backend_spec import BackendSpec, divisors, listed, parse_backend, wrong_replicas
from areal.config.engine import ContextKind
from areal.engine.settings import EngineSettings
from areal.models.dense_config import DenseConfig, read_config

_ALIGNED = 8
"""Numbers in 16 bytes, of bfloat16: rows of torch's grouped matmul begin at multiples of that."""


def check_fits(
    spec: BackendSpec,
    config: DenseConfig,
    *,
    context: ContextKind | None = None,
    sequence_parallel: bool = True,
    chunks: int = 1,
) -> None:
    """context, sequence_parallel, chunks: the actor's keys. Raises ConfigError with a clause for each dimension that does not fit."""
    reasons = [*_tensor(spec, config), *_context(spec, config, context)]
    reasons += [*_pipeline(spec, config, chunks), *_experts(spec, config)]
    if spec.t > 1 and config.experts and not sequence_parallel:
        reasons.append(
            f"t{spec.t} with experts needs actor.sequence_parallel=true: each rank of t routes its own tokens"
        )
    if reasons:
        raise ConfigError(f"{spec} does not fit this {config.family} model: " + "; ".join(reasons))


def check_layout(settings: EngineSettings) -> None:
    """Raises ConfigError where the layout does not fit the model of the folder. d of `fsdp` fits any; what t and e cut there, transformers' plan
    says (planned.py). replicas must fit both."""
    spec = parse_backend(settings.backend)
    if wrong := wrong_replicas(spec, settings.replicas):
        raise ConfigError(wrong)
    if spec.name == "archon":
        check_fits(
            spec,
            read_config(Path(settings.model_dir)),
            context=settings.context_parallel,
            sequence_parallel=settings.sequence_parallel,
            chunks=settings.pipeline_chunks,
        )


def context_kind(spec: BackendSpec, config: DenseConfig, context: ContextKind | None) -> ContextKind:
    """How tokens on several ranks of c attend: as asked, or what suits the heads."""
    return context or ("ulysses" if config.heads // spec.t % spec.c == 0 else "allgather")


def _tensor(spec: BackendSpec, config: DenseConfig) -> list[str]:
    common = gcd(config.heads, config.kv_heads)
    also = ""
    if not all(map(config.is_sparse, range(config.layers))):
        common = gcd(common, config.intermediate)
        also = f" and {config.intermediate} columns between the maps"
    sizes = [t for t in divisors(common) if -(-config.vocab_size // t) * (t - 1) < config.vocab_size]
    if spec.t in sizes:
        return []
    heads = f"{config.heads} query heads, {config.kv_heads} key heads"
    wrong = "must divide its " + heads + also
    if common % spec.t == 0:
        wrong = f"leaves a rank without any of its {config.vocab_size} tokens"
    return [f"t{spec.t} {wrong}; t of {listed(sizes)} fits"]


def _context(spec: BackendSpec, config: DenseConfig, context: ContextKind | None) -> list[str]:
    heads, uneven = divmod(config.heads, spec.t)
    if context != "ulysses" or uneven or heads % spec.c == 0:
        return []
    return [
        f"c{spec.c} with actor.context_parallel=ulysses must divide the {heads} query heads of a t rank; c of "
        f"{listed(divisors(heads))} fits, or actor.context_parallel=allgather"
    ]


def _pipeline(spec: BackendSpec, config: DenseConfig, chunks: int) -> list[str]:
    if spec.p == 1 or spec.p * chunks <= config.layers:
        return []
    stages = f"p{spec.p}" if chunks == 1 else f"p{spec.p} with actor.pipeline_chunks={chunks}"
    most = config.layers // chunks
    fits = f"p of up to {most} fits"
    if most < 2 and chunks > 1:
        fits = f"with actor.pipeline_chunks=1 p of up to {config.layers} fits"
    return [f"{stages} makes {spec.p * chunks} stages of its {config.layers} layers, and each needs one; {fits}"]


def _experts(spec: BackendSpec, config: DenseConfig) -> list[str]:
    if not config.experts:
        return [f"e{spec.e} splits experts, and it has none; leave e out"] if spec.e * spec.et > 1 else []
    reasons, columns = [], config.moe_intermediate
    cuts = [n for n in divisors(gcd(columns, spec.stage_size // spec.e)) if columns // n % _ALIGNED == 0]
    if config.hidden % _ALIGNED or not cuts:
        reasons.append(
            f"experts that are {config.hidden} by {columns} numbers are not computed, multiples of {_ALIGNED} are; "
            f"fsdp:d{spec.size} fits"
        )
    elif spec.et not in cuts:
        reasons.append(
            f"ffn:t{spec.et} must cut the {columns} columns of an expert into multiples of {_ALIGNED}; ffn:t of {listed(cuts)} fits"
        )
    if config.experts % spec.e:
        ranks = spec.stage_size // spec.et
        sizes = divisors(gcd(config.experts, ranks))
        reasons.append(
            f"e{spec.e} must divide its {config.experts} experts, and {ranks} of a stage's processes; e of {listed(sizes)} fits"
        )
    return reasons
