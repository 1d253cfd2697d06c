"""Layouts that do not fit a model are refused with the numbers that would."""

from __future__ import annotations

from dataclasses import replace

import pytest

from areal.base.errors import ConfigError
from areal.config.backend_spec import parse_backend
from areal.engine.parallel.dims import check_fits, check_layout, context_kind
from areal.engine.settings import EngineSettings
from areal.models.dense_config import DenseConfig, Rope

SMOLLM2 = DenseConfig(
    family="llama",
    vocab_size=49152,
    hidden=576,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate=1536,
    norm_eps=1e-5,
    qkv_bias=False,
    o_bias=False,
    qk_norm=False,
    tied=True,
    rope=Rope(),
    max_positions=8192,
)


@pytest.mark.parametrize("backend", ["fsdp:d8", "archon:d1", "archon:t3", "archon:d2t3p2c3", "archon:c2"])
def test_what_fits_is_let_through(backend: str) -> None:
    check_fits(parse_backend(backend), SMOLLM2)


@pytest.mark.parametrize("t", [2, 6, 9])
def test_tensor_sizes_that_fit_the_heads_are_named(t: int) -> None:
    refusal = (
        rf"archon:d1t{t}p1c1e1 does not fit this llama model: t{t} .* 9 query heads, 3 key heads .*; t of 1 or 3 fits"
    )
    with pytest.raises(ConfigError, match=refusal):
        check_fits(parse_backend(f"archon:t{t}"), SMOLLM2)


def test_the_width_between_the_maps_counts_unless_all_of_them_are_sparse() -> None:
    narrow = replace(SMOLLM2, heads=8, kv_heads=8, intermediate=6)
    with pytest.raises(ConfigError, match="6 columns between the maps; t of 1 or 2 fits"):
        check_fits(parse_backend("archon:t4"), narrow)
    check_fits(parse_backend("archon:t4"), replace(narrow, experts=4))


def test_a_vocabulary_need_not_be_divisible_but_go_round() -> None:
    eight = replace(SMOLLM2, heads=8, kv_heads=8)
    check_fits(parse_backend("archon:t4"), replace(eight, vocab_size=61))
    with pytest.raises(ConfigError, match="t4 leaves a rank without any of its 9 tokens; t of 1 or 2 fits"):
        check_fits(parse_backend("archon:t4"), replace(eight, vocab_size=9))
    with pytest.raises(ConfigError, match=r"t5 must divide .*; t of 1 or 2 fits"):
        check_fits(parse_backend("archon:t5"), replace(eight, vocab_size=9))


@pytest.mark.parametrize("backend", ["fsdp:d6", "archon:d6t2"])
def test_replicas_divide_d(backend: str) -> None:
    facts = {"backend": backend, "model_dir": "", "algorithm": "grpo", "threads": 1, "total_steps": 1}
    with pytest.raises(
        ConfigError, match=rf"replicas=4 must divide the d6 of {backend}.*; replicas of 1, 2, 3 or 6 fits"
    ):
        check_layout(EngineSettings.model_validate(facts | {"replicas": 4}))
    check_layout(EngineSettings.model_validate(facts | {"backend": "fsdp:d6", "replicas": 3}))


def test_ulysses_needs_heads_for_every_rank() -> None:
    check_fits(parse_backend("archon:t3c3"), SMOLLM2, context="ulysses")
    check_fits(parse_backend("archon:c2"), SMOLLM2, context="allgather")
    with pytest.raises(
        ConfigError, match=r"c2 with .*ulysses must divide the 3 query heads of a t rank; c of 1 or 3 fits"
    ):
        check_fits(parse_backend("archon:t3c2"), SMOLLM2, context="ulysses")
    with pytest.raises(ConfigError, match=r"t of 1 or 3 fits$"):  # of so many heads on a rank nothing can be said
        check_fits(parse_backend("archon:t2c3"), SMOLLM2, context="ulysses")


def test_ulysses_is_taken_where_it_fits() -> None:
    assert context_kind(parse_backend("archon:c3"), SMOLLM2, None) == "ulysses"
    assert context_kind(parse_backend("archon:c2"), SMOLLM2, None) == "allgather"
    assert context_kind(parse_backend("archon:c3"), SMOLLM2, "allgather") == "allgather"


@pytest.mark.parametrize(
    ("layout", "changes", "reason"),
    [
        (
            "archon:(attn:d2|ffn:t2)",
            {"moe_intermediate": 24},
            r"ffn:t2 must cut the 24 columns of an expert into multiples of 8; ffn:t of 1 fits",
        ),
        ("archon:(attn:d12|ffn:t4e3)", {"experts": 9, "moe_intermediate": 48}, r"ffn:t of 1 or 2 fits"),
        ("archon:(attn:d12|ffn:t3e4)", {"moe_intermediate": 40}, r"ffn:t of 1 fits"),
        (
            "archon:d2",
            {"moe_intermediate": 20},
            r"576 by 20 numbers are not computed, multiples of 8 are; fsdp:d2 fits",
        ),
        ("archon:d2e2", {"hidden": 572}, r"572 by 16 numbers are not computed, multiples of 8 are; fsdp:d2 fits"),
    ],
)
def test_experts_that_cannot_be_cut_so_are_refused(layout: str, changes: dict[str, int], reason: str) -> None:
    sparse = replace(SMOLLM2, **{"experts": 8, "experts_per_token": 2, "moe_intermediate": 16} | changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=reason):
        check_fits(parse_backend(layout), sparse)
    check_fits(parse_backend("archon:(attn:d12|ffn:t2e2)"), replace(sparse, experts=8, moe_intermediate=16, hidden=576))


def test_experts_under_t_need_sequence_parallel() -> None:
    with pytest.raises(ConfigError, match=r"t3 with experts needs actor.sequence_parallel=true"):
        check_fits(parse_backend("archon:t3"), replace(SMOLLM2, experts=4), sequence_parallel=False)


def test_a_pipeline_needs_a_layer_for_each_stage() -> None:
    check_fits(parse_backend("archon:p30"), SMOLLM2)
    with pytest.raises(
        ConfigError, match="p31 makes 31 stages of its 30 layers, and each needs one; p of up to 30 fits"
    ):
        check_fits(parse_backend("archon:p31"), SMOLLM2)
    with pytest.raises(ConfigError, match=r"p8 with actor.pipeline_chunks=4 makes 32 stages .* p of up to 7 fits"):
        check_fits(parse_backend("archon:p8"), SMOLLM2, chunks=4)
    with pytest.raises(ConfigError, match="2 stages of its 1 layers, and each needs one; p of up to 1 fits"):
        check_fits(parse_backend("archon:p2"), replace(SMOLLM2, layers=1))
    with pytest.raises(
        ConfigError, match=r"4 stages of its 3 layers, .*; with actor.pipeline_chunks=1 p of up to 3 fits"
    ):
        check_fits(parse_backend("archon:p2"), replace(SMOLLM2, layers=3), chunks=2)


def test_experts_are_split_where_there_are_some() -> None:
    with pytest.raises(ConfigError, match="e2 splits experts, and it has none; leave e out"):
        check_fits(parse_backend("archon:d2e2"), SMOLLM2)
    sparse = replace(SMOLLM2, experts=6, experts_per_token=2, moe_intermediate=24)
    check_fits(parse_backend("archon:d6e3"), sparse)
    with pytest.raises(
        ConfigError, match="e4 must divide its 6 experts, and 4 of a stage's processes; e of 1 or 2 fits"
    ):
        check_fits(parse_backend("archon:d4e4"), sparse)
    with pytest.raises(ConfigError, match="and 4 of a stage's processes; e of 1 or 2 fits"):
        check_fits(parse_backend("archon:(attn:d12|ffn:t3e4)"), sparse)
