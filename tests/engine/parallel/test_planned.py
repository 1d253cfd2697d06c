"""`fsdp:` along t and e: families that archon does not know train as one process does, and what cannot be cut is refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.base.errors import ConfigError
from areal.config.backend_spec import parse_backend
from areal.engine.commands import Row
from areal.engine.engine import TrainEngine
from areal.engine.model import PolicyNet, load_policy
from areal.engine.parallel.planned import cut_as_planned
from areal.engine.parallel.world import World, local, replicas
from areal.engine.settings import EngineSettings
from tests.engine.parallel.conftest import WriteNet
from tests.engine.parallel.pool import Case, Pool, alone
from tests.engine.parallel.twins import WEIGHTS, Apart, assert_twins

GroupRows = Callable[..., list[Row]]

NETS: dict[str, dict[str, Any]] = {
    "Gemma": {},  # of one weight at both ends
    "Phi": {},  # biases, also of the head
    "Phi3": {"pad_token_id": 44},  # fused maps, whose outputs are gathered; a row of the embedding that stays as it is
    "Qwen3": {},  # norms of single heads
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
    "Qwen2Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,  # of which t2 leaves rows that torch's grouped product does not take
        "shared_expert_intermediate_size": 16,
    },
}


@pytest.fixture(scope="module")
def net_of(write_net: WriteNet) -> Callable[[str], Path]:
    """The folder of a family's net, written once."""
    found: dict[str, Path] = {}

    def written(family: str) -> Path:
        if family not in found:
            found[family] = write_net(family, **NETS[family])
        return found[family]

    return written


@pytest.fixture(scope="module")
def expected(net_of: Callable[[str], Path]) -> Callable[..., Any]:
    """What one process makes of a case, computed once for each family."""
    found: dict[str, Any] = {}

    def of(family: str, case: Case) -> Any:
        key = f"{family} {sorted(case.settings.items())}"
        if key not in found:
            found[key] = alone(case)
        return found[key]

    return of


def case_of(backend: str, folder: Path, rows: list[Row], **settings: Any) -> Case:
    return Case(backend, str(folder), rows, settings={"max_tokens_per_mb": 64} | settings)


FAST = [("Gemma", "fsdp:t2"), ("Gemma", "fsdp:d2t2"), ("Mixtral", "fsdp:d2e2"), ("Qwen3", "fsdp:t2")]
HEAVY = [
    ("Phi", "fsdp:t2"),
    ("Phi", "fsdp:d2t2"),
    ("Phi3", "fsdp:d2t2"),
    ("Qwen3", "fsdp:d2t2"),
    ("Mixtral", "fsdp:t2"),
    ("Mixtral", "fsdp:d2t2"),
    ("Mixtral", "fsdp:t2e2"),
    ("Mixtral", "fsdp:d4e2"),
    ("Mixtral", "fsdp:d2t2e2"),
    ("Mixtral", "fsdp:d2t2e4"),
    ("Olmoe", "fsdp:d2t2e2"),
    ("Qwen2Moe", "fsdp:t2"),
    ("Qwen2Moe", "fsdp:d2t2e2"),
]


@pytest.mark.parametrize(
    ("family", "backend"), [*FAST, *(pytest.param(*one, marks=pytest.mark.heavy) for one in HEAVY)]
)
def test_a_family_that_is_cut_by_its_plan_trains_as_one_process(
    pool: Pool,
    net_of: Callable[[str], Path],
    expected: Callable[..., Any],
    group_rows: GroupRows,
    family: str,
    backend: str,
) -> None:
    case = case_of(backend, net_of(family), group_rows(groups=3))
    ours, theirs = pool.run(case), expected(family, case)
    assert_twins(ours, theirs)
    for mine, said in zip(ours.scores, theirs.scores, strict=True):
        assert mine == pytest.approx(said, abs=1e-5)
    assert max(ours.local_bytes) < 0.8 * theirs.local_bytes[0]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("backend", "settings"),
    [
        ("fsdp:d2t2e2", {"gradient_checkpointing": "full"}),
        ("fsdp:d2t2", {"gradient_checkpointing": "selective"}),
        ("fsdp:d2t2e2", {"offload": "all"}),
        ("fsdp:t2", {"offload": "optimizer"}),
        ("fsdp:d2t2", {"role": "critic"}),
        ("fsdp:t2e2", {"role": "critic"}),
        ("fsdp:d2t2", {"replicas": 2}),
        ("fsdp:d4e2", {"replicas": 2}),
        ("fsdp:d2t2e2", {"replicas": 2}),
        ("fsdp:d2t2", {"algorithm": "gspo", "mini_batch_size": 4}),
    ],
)
def test_whatever_else_a_net_is_trained_with(
    pool: Pool, net_of: Callable[[str], Path], group_rows: GroupRows, backend: str, settings: dict[str, Any]
) -> None:
    folder, rows = net_of("Mixtral"), group_rows(groups=3)
    without = {
        name: value for name, value in settings.items() if name not in ("offload", "gradient_checkpointing", "replicas")
    }
    ours = pool.run(case_of(backend, folder, rows, **settings))
    theirs = alone(case_of(backend, folder, rows, **without))
    assert_twins(ours, theirs, weights=5e-5 if settings.get("role") == "critic" else WEIGHTS)  # its head begins at 0


@pytest.mark.heavy
def test_a_rank_without_rows_takes_part(pool: Pool, net_of: Callable[[str], Path], group_rows: GroupRows) -> None:
    case = case_of("fsdp:d2t2e2", net_of("Mixtral"), group_rows(groups=1)[:1])
    assert_twins(pool.run(case), alone(case))


@pytest.mark.parametrize(
    ("family", "backend", "fault"),
    [
        ("Qwen3", "fsdp:t2", "planned_heads_alone"),
        ("Gemma", "fsdp:t2", "planned_sum_left_out"),
        pytest.param("Mixtral", "fsdp:d2t2e2", "planned_experts_averaged", marks=pytest.mark.heavy),
        ("Mixtral", "fsdp:d2e2", "planned_no_way_back"),
    ],
)
def test_a_fault_makes_the_twins_differ(
    pool: Pool,
    net_of: Callable[[str], Path],
    expected: Callable[..., Any],
    group_rows: GroupRows,
    family: str,
    backend: str,
    fault: str,
) -> None:
    case = case_of(backend, net_of(family), group_rows(groups=3))
    broken = Case(backend, case.model_dir, case.rows, settings=case.settings, fault=fault)
    apart = Apart.of(pool.run(broken), expected(family, case))
    assert apart.gradient > 1e-2, apart


def held(world: World, model_dir: str) -> dict[str, tuple[list[int], int]]:
    """Of each parameter the shape of what this rank holds, and how many ranks hold the same."""
    facts = {"backend": str(world.spec), "model_dir": model_dir, "algorithm": "grpo", "threads": 1, "total_steps": 9}
    engine = TrainEngine.load(EngineSettings.model_validate(facts), world)
    return {name: (list(local(p).shape), replicas(p, world)) for name, p in engine.policy.trained_parameters()}


def test_a_rank_holds_its_part_of_heads_vocabulary_and_experts(pool: Pool, net_of: Callable[[str], Path]) -> None:
    first = pool.call("fsdp:d2t2e2", held, str(net_of("Mixtral")))[0]
    assert first["model.embed_tokens.weight"] == ([16, 32], 1)  # 61 tokens over t, and that over d
    assert first["model.layers.0.self_attn.q_proj.weight"] == ([8, 32], 1)
    assert first["model.layers.0.self_attn.o_proj.weight"] == ([16, 16], 1)
    assert first["model.layers.0.mlp.experts.gate_up_proj"] == ([1, 96, 32], 1)
    assert first["model.layers.0.input_layernorm.weight"] == ([16], 2)


def cut(backend: str, folder: Path) -> PolicyNet:
    """What the first rank has of it; nothing is sent, for the group's other ranks are not there."""
    spec = parse_backend(backend)
    world = World(spec, 0, torch.distributed.device_mesh.DeviceMesh("cpu", torch.arange(1)))
    net = load_policy(folder, dtype="float32", world=world)
    cut_as_planned(net, world)
    return net


@pytest.fixture(scope="module")
def group() -> Any:
    World.alone_in_a_group(parse_backend("fsdp:d1"))


@pytest.mark.parametrize(
    ("family", "config", "backend", "reason"),
    [
        ("Gemma", {}, "fsdp:t4", r"t4 must divide its 4 query heads and 2 key heads; t of 1 or 2 fits$"),
        ("Phi", {"heads": 6, "kv_heads": 6, "hidden_size": 48}, "fsdp:t4", r"t4 must divide its 6 query heads .*; t of 1, 2, 3 or 6 fits$"),
        ("Gemma", {"intermediate_size": 6, "kv_heads": 4}, "fsdp:t4", r"t4 must divide the 6 of .*mlp\.\w+_proj\.weight; t of 1 or 2 fits$"),
        ("Gemma", {"vocab_size": 9, "heads": 4, "kv_heads": 4}, "fsdp:t4", r"t4 leaves a rank without any of its 9 tokens; t of 1 or 2 fits$"),
        ("Gemma", {}, "fsdp:d2e2", r"has no plan by which layers of GemmaForCausalLM are cut along e; leave e out, fsdp:d2 fits$"),
        ("StableLm", {}, "fsdp:d2t2", r"has no plan by which layers of StableLmForCausalLM are cut along t; leave t out, fsdp:d4 fits$"),
        ("Mixtral", {"num_local_experts": 6}, "fsdp:d4e4", r"e4 must divide its 6 experts; e of 1 or 2 fits$"),
        ("DeepseekV2", {"kv_heads": 4, "first_k_dense_replace": 1}, "fsdp:t2", r"kv_a_proj_with_mqa.* along t by 'mla_kv_a_proj'.*; leave t out, fsdp:d2 fits$"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused_with_what_fits(
    group: None, write_net: WriteNet, family: str, config: dict[str, Any], backend: str, reason: str
) -> None:
    folder = write_net(family, **NETS.get(family, {}) | config)
    with pytest.raises(ConfigError, match=reason):
        cut(backend, folder)


def refused(world: World, model_dir: str) -> str:
    facts = {"backend": str(world.spec), "model_dir": model_dir, "algorithm": "grpo", "threads": 1, "total_steps": 9}
    with pytest.raises(ConfigError) as caught:
        TrainEngine.load(EngineSettings.model_validate(facts), world)
    return str(caught.value)


def test_a_plan_that_forgets_a_norm_of_heads_is_refused(pool: Pool, write_net: WriteNet) -> None:
    first, second = pool.call("fsdp:t2", refused, str(write_net("Phi", qk_layernorm=True)))
    assert first == second
    assert "PhiForCausalLM: transformers' plan for t leaves the gradient of" in first
    assert "_layernorm.weight in parts on its ranks; fsdp:d2 fits" in first


def test_an_adapter_is_not_cut_so(group: None, net_of: Callable[[str], Path]) -> None:
    from areal.config.engine import LoraConfig
    from areal.engine.lora import load_adapted

    spec = parse_backend("fsdp:t2")
    world = World(spec, 0, torch.distributed.device_mesh.DeviceMesh("cpu", torch.arange(1)))
    net = load_adapted(net_of("Qwen3"), LoraConfig(rank=2), dtype="float32", seed=1, world=world)
    with pytest.raises(ConfigError, match="adapters are not cut along t and e; fsdp:d2 fits"):
        cut_as_planned(net, world)
