"""Backend specs: parsed, formatted back, and a wrong one says what is known."""

from __future__ import annotations

import pytest

from areal.base.errors import ConfigError
from areal.config.backend_spec import DIMENSIONS, MOST_PROCESSES, NAMES, BackendSpec, divisors, parse_backend


@pytest.mark.parametrize(
    ("text", "spec", "size", "canonical"),
    [
        ("fsdp:d1", BackendSpec("fsdp"), 1, "fsdp:d1"),
        ("fsdp", BackendSpec("fsdp"), 1, "fsdp:d1"),
        ("fsdp:t2", BackendSpec("fsdp", t=2), 2, "fsdp:d1t2"),
        ("fsdp:d2t2e4", BackendSpec("fsdp", 2, 2, e=4), 4, "fsdp:d2t2e4"),
        ("fsdp:d2t1e1", BackendSpec("fsdp", 2), 2, "fsdp:d2"),
        ("archon:d4t2p1c1e1", BackendSpec("archon", 4, 2), 8, "archon:d4t2p1c1e1"),
        ("archon:e2c2p2t2d2", BackendSpec("archon", 2, 2, 2, 2, 2), 16, "archon:d2t2p2c2e2"),
        (
            "archon:(attn:d4p2t2c2|ffn:d2p2t4e2)",
            BackendSpec("archon", 4, 2, 2, 2, 2, 4),
            32,
            "archon:(attn:d4t2p2c2|ffn:d2t4p2e2)",
        ),
        ("archon:(attn:d4t2|ffn:e4)", BackendSpec("archon", 4, 2, e=4), 8, "archon:d4t2p1c1e4"),
        ("archon:(attn:p2t2|ffn:t2)", BackendSpec("archon", 1, 2, 2, et=2), 4, "archon:(attn:d1t2p2c1|ffn:d1t2p2e1)"),
        ("native:d2", BackendSpec("native", 2), 2, "native:d2"),
        ("native:d2t1", BackendSpec("native", 2), 2, "native:d2"),
        ("sglang:d2t4", BackendSpec("sglang", 2, 4), 8, "sglang:d2t4p1"),
    ],
)
def test_specs_are_parsed_and_formatted(text: str, spec: BackendSpec, size: int, canonical: str) -> None:
    assert parse_backend(text) == spec
    assert parse_backend(text).size == size
    assert str(spec) == canonical
    assert parse_backend(str(spec)) == spec


@pytest.mark.parametrize(
    "text", ["", ":d1", "fsdp:", "fsdp:d", "fsdp:d0", "fsdp:d1d2", "fsdp:d1x", "fsdp:q2", "fsdp:p2", "hf:d1"]
)
def test_a_wrong_spec_is_a_sentence(text: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        parse_backend(text)
    assert repr(text) in str(wrong.value)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("archon:d2t2e3", "e of 1, 2 or 4 fits"),
        ("archon:e2", "e of 1 fits"),
        ("fsdp:d4e3", "e of 1, 2 or 4 fits"),
        ("fsdp:d3t2e4", "e of 1, 2 or 6 fits"),
        ("fsdp:d2t4e2", "and under fsdp: be a multiple of t4; e of 1, 4 or 8 fits"),
        ("fsdp:d2c2", "fsdp knows d, t, e only, not c; archon: has all"),
        ("archon:(attn:d4p2t2c2|ffn:d4p2t4e2)", "ffn:d2t4p2e2 fits"),
        ("archon:(attn:d4p2|ffn:d2p1e2)", "ffn:d2t1p2e2 fits"),
        ("archon:(attn:d2t2|ffn:t3e2)", "t \\* e of 1, 2 or 4 fits"),
        ("archon:(attn:d2e2|ffn:e2)", "knows d, t, p, c only, not e"),
        ("archon:(attn:d2|ffn:c2)", "knows d, t, p, e only, not c"),
        ("fsdp:(attn:d2|ffn:d2)", "write fsdp:d2"),
        ("archon:(attn:d2)", "after the colon"),
    ],
)
def test_experts_that_do_not_fit_are_refused_with_what_would(text: str, fits: str) -> None:
    with pytest.raises(ConfigError, match=fits):
        parse_backend(text)


@pytest.mark.parametrize(
    "text",
    [
        "archon:d999999999e7",
        "archon:d1048577",
        "archon:t2p2c524288",
        "archon:(attn:d999999999|ffn:e7)",
        "fsdp:d2000000",
    ],
)
def test_more_processes_than_there_can_be_are_refused_at_once(text: str) -> None:
    with pytest.raises(ConfigError, match=f"takes [0-9]+ processes; {MOST_PROCESSES} of one net is the most"):
        parse_backend(text)
    with pytest.raises(ConfigError, match="after the colon stand sizes"):
        parse_backend("fsdp:d" + "9" * 5000)


def test_divisors_are_all_of_them() -> None:
    for number in range(1, 200):
        assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


def test_a_name_of_the_other_side_lists_what_is_known_here() -> None:
    with pytest.raises(ConfigError, match="fsdp:d1, archon:d1"):
        parse_backend("native:d1", "train")
    with pytest.raises(ConfigError, match="native:d1, scripted:d1"):
        parse_backend("fsdp:d1", "rollout")
    assert set(DIMENSIONS) == {name for names in NAMES.values() for name in names}
