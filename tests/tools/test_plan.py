"""`areal plan`: shapes against published counts, layouts against a naive search, and what the command says."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, get_args

import pytest

from areal.config.backend_spec import BackendSpec, parse_backend
from areal.config.engine import Dtype, LoraConfig, Offload
from areal.models.dense_config import read_config
from areal.tools.plan.__main__ import main
from areal.tools.plan.devices import DEVICES, device_named
from areal.tools.plan.layout import Checkpointing, Job, layouts, reasons
from areal.tools.plan.memory import rank_memory, share_of, stages_of
from areal.tools.plan.presets import PRESETS
from areal.tools.plan.search import plan_for
from areal.tools.plan.shape import Shape, read_shape, shape_of
from areal.tools.plan.traffic import step_cost

JOB = Job(tokens_per_mb=8192, sequence=4096, batch_tokens=1 << 20, dtype="bfloat16")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [
        ("smollm2-135m", 134_515_008, 134_515_008),
        ("qwen3-0.6b", 596_049_920, 596_049_920),
        ("qwen2.5-7b", 7_615_616_512, 7_615_616_512),
        ("qwen3-8b", 8_190_735_360, 8_190_735_360),
        ("llama-3.1-8b", 8_030_261_248, 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496, 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800, 405_853_388_800),
    ],
)
def test_parameters_are_those_of_the_published_checkpoints(name: str, parameters: int, active: int) -> None:
    shape = read_shape(name)
    assert (shape.parameters, shape.active_parameters) == (parameters, active)


@pytest.mark.parametrize(("name", "total", "active"), [("qwen3-30b-a3b", 30.5, 3.3), ("qwen3-235b-a22b", 235, 22)])
def test_experts_are_counted_as_the_model_cards_do(name: str, total: float, active: float) -> None:
    """The cards round down: 30.5B with 3.3B activated, 235B with 22B activated."""
    shape = read_shape(name)
    assert shape.parameters / 1e9 == pytest.approx(total, rel=0.002)
    assert shape.active_parameters / 1e9 == pytest.approx(active, rel=0.02)


def test_a_folder_a_file_and_a_preset_are_the_same_model(tmp_path: Path) -> None:
    raw = dict(PRESETS["qwen3-30b-a3b"]) | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    folder, file = read_shape(str(tmp_path)), read_shape(str(tmp_path / "config.json"))
    assert folder == file == replace(read_shape("qwen3-30b-a3b"), name=tmp_path.name)


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_those_that_the_nets_have(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PRESETS[name] | {"norm_topk_prob": True}))
    shapes = read_config(tmp_path).parameter_shapes()
    assert read_shape(name).parameters == sum(map(prod, shapes.values()))


def test_layers_without_experts_are_counted_apart() -> None:
    raw = dict(PRESETS["qwen3-30b-a3b"]) | {"mlp_only_layers": [1], "decoder_sparse_step": 2}
    assert shape_of(raw, "x", "x").expert_layers == 23
    renamed = {"num_local_experts" if key == "num_experts" else key: value for key, value in raw.items()}
    assert shape_of(renamed, "x", "x") == shape_of(raw, "x", "x")
    assert shape_of(dict(raw) | {"mlp_only_layers": [], "decoder_sparse_step": 1}, "x", "x").expert_layers == 48


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "holds a list"),
        ('{"model_type": "mamba"}', "known: llama, qwen2, qwen3, qwen3_moe"),
        ('{"model_type": "llama", "num_attention_heads": 0}', "num_attention_heads=0 is no whole number"),
        (json.dumps(dict(PRESETS["llama-3.1-8b"]) | {"vocab_size": "many"}), "vocab_size='many'"),
        (json.dumps(dict(PRESETS["llama-3.1-8b"]) | {"num_key_value_heads": 5}), "must be a multiple"),
    ],
)
def test_what_is_no_model_is_one_line(
    content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(content)
    assert main(["--model", str(tmp_path), "--gpus", "2"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "0"], "--gpus 0: give a number from 1"),
        (["--gpus", "2", "--batch-tokens", "0"], "--batch-tokens 0"),
        ([], "--gpus N or --layout SPEC is needed"),
        (["--layout", "archon:t2"], "t2 must divide its 9 query heads, 3 key heads and 1536 columns between the maps"),
        (["--layout", "archon:t2"], "t of 1 or 3 fits"),
        (["--layout", "archon:d2e2"], "e2 splits experts, and it has none; leave e out"),
        (["--layout", "archon:p31"], "p of up to 30 fits"),
        (["--layout", "fsdp:d2t3e3"], "along t and e is not planned; archon:d2t3 is"),
        (["--layout", "archon:d2097152"], "1048576 of one net is the most"),
        (["--layout", "fsdp:d2", "--gpus", "4"], "takes 2 devices, --gpus says 4"),
        (["--layout", "archon:(attn:d2|ffn:t2)"], "splits experts, and it has none"),
        (["--layout", "deep:d2"], "is no backend"),
    ],
)
def test_a_wrong_command_line_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "smollm2-135m", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line


def test_an_unknown_model_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "qwen3-31b", "--gpus", "8"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert all(name in line for name in PRESETS)


def naive_layouts(shape: Shape, gpus: int) -> set[tuple[int, ...]]:
    """(d, t, p, c, e), straight from what the words mean."""
    found = set()
    for d, t, p, c in product(range(1, gpus + 1), repeat=4):
        if (
            d * t * p * c != gpus
            or shape.heads % t
            or shape.kv_heads % t
            or (not shape.experts and shape.intermediate % t)
            or p > shape.layers
        ):
            continue
        for e in range(1, d * t * c + 1):
            if (d * t * c) % e == 0 and (e == 1 or (shape.experts and shape.experts % e == 0)):
                found.add((d, t, p, c, e))
    return found


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen3-30b-a3b", "llama-3.1-8b"])
@pytest.mark.parametrize("gpus", [1, 2, 6, 12])
def test_every_layout_is_listed_once_and_fits(name: str, gpus: int) -> None:
    shape = read_shape(name)
    specs = list(layouts(shape, gpus, JOB, node=8))
    assert {(s.d, s.t, s.p, s.c, s.e) for s in specs} == naive_layouts(shape, gpus)
    assert len(specs) == len(set(specs))
    assert [reasons(spec, shape) for spec in specs if reasons(spec, shape)] == []
    assert all(parse_backend(str(spec), "train") == spec for spec in specs)
    assert [str(spec) for spec in specs if spec.name == "fsdp"] == ([] if shape.experts else [f"fsdp:d{gpus}"])


@pytest.mark.parametrize("options", [[], ["--lora-rank", "16"]])
def test_fsdp_takes_experts_too(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "qwen3-30b-a3b", "--layout", "fsdp:d16", "--gpu", "h200", *options]) == 0
    assert "fsdp:d16" in capsys.readouterr().out


def test_experts_that_archon_does_not_compute_are_planned_for_fsdp() -> None:
    shape = shape_of(dict(PRESETS["qwen3-30b-a3b"]) | {"moe_intermediate_size": 764}, "x", "x")
    assert list(layouts(shape, 8, JOB, node=8)) == [BackendSpec("fsdp", d=8)]
    [wrong] = reasons(BackendSpec("archon", d=8), shape)
    assert "multiples of 8 are; fsdp:d8 fits" in wrong


def test_a_layout_that_does_not_fit_is_said_once() -> None:
    [wrong] = reasons(parse_backend("archon:(attn:p49d10|ffn:t5)"), read_shape("qwen3-30b-a3b"))
    assert wrong.count("p of up to 48 fits") == 1
    assert wrong.count("ffn:t of 1 or 2 fits") == 1


def test_a_stage_has_at_least_a_layer() -> None:
    assert max(spec.p for spec in layouts(read_shape("smollm2-135m"), 60, JOB, node=8)) == 30


def test_tensor_peers_stay_in_one_node() -> None:
    shape = read_shape("llama-3.1-405b")
    assert max(spec.t for spec in layouts(shape, 64, JOB, node=4)) == 4


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("gpus", [1, 2, 7, 13, 97, 1009])
def test_any_number_of_devices_has_a_plan(name: str, gpus: int) -> None:
    plan = plan_for(read_shape(name), gpus, device_named("h100", gpus), JOB)
    assert plan.ranked
    assert all(each.spec.size == gpus for each in plan.ranked)
    assert all(each.fits != bool(plan.advice) for each in plan.ranked)
    if plan.advice:
        assert plan.advice.startswith("what would fit: ")


@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-3.1-70b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("dtype", get_args(Dtype))
@pytest.mark.parametrize("checkpointing", get_args(Checkpointing))
def test_more_data_ranks_never_cost_a_rank_more(name: str, dtype: str, checkpointing: Any) -> None:
    """From two on: the first cut is what makes layers be gathered."""
    shape, job, device = read_shape(name), replace(JOB, dtype=dtype), device_named("h100", 1)
    for t, p in ((1, 1), (4, 1), (1, 2)):
        specs = [BackendSpec("archon", d=d, t=t, p=p) for d in (2, 4, 8, 64, 512)]
        totals = [rank_memory(shape, spec, job, device, checkpointing).total for spec in specs]
        assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_checkpointing_saves_memory_and_costs_time(name: str) -> None:
    shape, spec, device = read_shape(name), BackendSpec("archon", d=8), device_named("h100", 8)
    held = [rank_memory(shape, spec, JOB, device, each).activations for each in get_args(Checkpointing)]
    seconds = [step_cost(shape, spec, JOB, device, each).compute for each in get_args(Checkpointing)]
    assert held == sorted(held, reverse=True)
    assert seconds == sorted(seconds)
    assert held[2] < held[0] / 4


@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3.1-8b", "qwen3-30b-a3b"])
@pytest.mark.parametrize(
    "spec",
    ["archon:d1", "archon:d4", "archon:d2t1p2", "archon:d4t1p1c2e8", "archon:d4t1p2e4", "archon:(attn:d4t1|ffn:t2e2)"],
)
def test_all_ranks_together_hold_every_parameter(name: str, spec: str) -> None:
    shape, parsed = read_shape(name), parse_backend(spec)
    if reasons(parsed, shape):
        parsed = replace(parsed, e=1, et=1)
    held = sum(share_of(shape, parsed, stage).own for stage in stages_of(shape, parsed, JOB)) * parsed.d * parsed.c
    twice = shape.table if shape.tied and parsed.p > 1 else 0
    assert held == pytest.approx(shape.parameters + twice, rel=1e-4)
    assert held >= shape.parameters + twice


def test_the_engine_sees_the_same_model() -> None:
    shape = shape_of(dict(PRESETS["qwen3-30b-a3b"]) | {"mlp_only_layers": [0, 1, 2]}, "x", "x")
    config = shape.config
    assert sum(map(config.is_sparse, range(config.layers))) == shape.expert_layers == 45
    assert sum(map(prod, config.parameter_shapes().values())) == shape.parameters


def test_nothing_fits_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "llama-3.1-70b", "--gpus", "8", "--gpu", "a100"]) == 1
    said = capsys.readouterr().out
    assert "nothing fits: the layout that needs least" in said
    assert "what would fit: " in said
    wanted = int(said.split("what would fit: ")[1].split(" devices")[0].split()[-1])
    assert main(["--model", "llama-3.1-70b", "--gpus", str(wanted), "--gpu", "a100"]) == 0
    assert main(["--model", "llama-3.1-70b", "--gpus", str(wanted // 2), "--gpu", "a100"]) == 1


def test_smaller_micro_batches_are_proposed_where_they_help(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--model",
        "qwen3-8b",
        "--gpus",
        "8",
        "--sequence",
        "2048",
        "--checkpointing",
        "none",
        "--dtype",
        "float32",
    ]
    assert main([*words, "--tokens-per-mb", "65536"]) == 1
    said = capsys.readouterr().out
    assert "--checkpointing full (" in said
    assert "--tokens-per-mb" in said
    tokens = said.split("--tokens-per-mb ")[1].split()[0]
    assert main([*words, "--tokens-per-mb", tokens]) == 0


def test_json_holds_every_number_and_the_keys_to_copy(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "qwen3-235b-a22b", "--gpus", "1024", "--gpu", "h100", "--top", "3", "--json"]
    assert main(words) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] is True
    assert plan["layouts_considered"] < 2000  # each takes a tenth of a millisecond or so
    assert len(plan["ranked"]) == 3
    for each in plan["ranked"]:
        memory = dict(each["memory"])
        assert memory.pop("total") == sum(memory.values()) <= DEVICES["h100"].memory
        assert set(memory) >= {"weights", "gradients", "optimizer", "activations", "logits"}
        assert each["overrides"][0] == f"actor.backend={each['spec']}"
        assert parse_backend(each["spec"]).size == 1024
        assert each["step"]["traffic"]["data"]["bytes"] > 0
    seconds = [each["step"]["seconds"] for each in plan["ranked"]]
    assert seconds == sorted(seconds)


def test_tables_show_memory_traffic_and_the_line_to_copy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "qwen3-30b-a3b", "--layout", "archon:d4t2e8", "--gpu", "h200"]) == 0
    said = capsys.readouterr().out
    for word in ("weights", "gradients", "optimizer", "activations", "logits", "data", "tensor", "expert", "assumed: "):
        assert word in said
    assert "to copy: actor.backend=archon:d4t2p1c1e8 actor.dtype=bfloat16" in said


def test_the_moment_of_the_peak_is_said() -> None:
    """Activations where there are many; float32 gradients beside bfloat16 weights where there are few; a layer computed again between."""
    shape, device, spec = read_shape("llama-3.1-8b"), device_named("h100", 8), BackendSpec("fsdp", d=8)
    few, many = Job(256, 256, 1 << 16, "bfloat16"), Job(8192, 8192, 1 << 20, "bfloat16")
    alone = BackendSpec("fsdp")
    assert rank_memory(shape, spec, many, device, "none").moment == "after a forward pass"
    assert rank_memory(shape, spec, many, device, "full").moment == "while a layer is computed again"
    update = rank_memory(shape, alone, few, device, "full")
    assert update.moment == "at the optimizer's update"
    assert update.gradients == 4 * shape.parameters
    assert update.activations == update.logits == 0


def test_traffic_of_one_device_is_nothing_and_of_two_is_as_counted() -> None:
    shape, job = read_shape("llama-3.1-8b"), Job(4096, 4096, 16384, "bfloat16")
    device = device_named("h100", 2)
    assert step_cost(shape, BackendSpec("fsdp"), job, device, "none").traffic == {}
    two = step_cost(shape, BackendSpec("fsdp", d=2), job, device, "none")
    # Two micro-batches each: the half that the other has, as bf16 forward and backward, and its gradients as float32.
    assert two.micro_batches == 2
    assert two.traffic["data"].bytes == pytest.approx(2 * shape.parameters / 2 * (2 + 2 + 4), rel=1e-3)


def test_a_plan_needs_no_torch() -> None:
    program = (
        "import sys\nfrom areal.tools.plan.__main__ import main\n"
        "code = main(['--model', 'qwen3-235b-a22b', '--gpus', '64'])\n"
        "assert not [each for each in ('torch', 'transformers', 'matplotlib') if each in sys.modules]\nsys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "qwen3-235b-a22b: 235.1B parameters, 22.2B active" in done.stdout


def test_an_adapter_takes_what_its_net_has(tmp_path: Path) -> None:
    """Counted in a net of the engine; moments and gradients are those of the adapter alone."""
    from areal.engine.lora import load_adapted
    from areal.models.tiny import write_tiny

    write_tiny(tmp_path)
    policy = load_adapted(tmp_path, LoraConfig(rank=4), dtype="float32", seed=1)
    shape = read_shape(str(tmp_path))
    assert shape.adapters(4) == sum(p.numel() for _, p in policy.trained_parameters())
    memory = rank_memory(shape, BackendSpec("fsdp"), Job(64, 64, 64, "float32", lora_rank=4), DEVICES["h100"], "none")
    assert memory.gradients == 4 * shape.adapters(4)
    assert memory.optimizer == 8 * shape.adapters(4)
    assert memory.weights == 4 * (shape.parameters + shape.adapters(4))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [0, 16])
def test_what_leaves_the_device_is_in_the_hosts_memory(dtype: str, rank: int) -> None:
    shape, spec = read_shape("llama-3.1-8b"), BackendSpec("fsdp", d=8)
    jobs = {kind: Job(2048, 2048, 1 << 16, dtype, lora_rank=rank, offload=kind) for kind in get_args(Offload)}
    memory = {kind: rank_memory(shape, spec, job, DEVICES["h100"], "full") for kind, job in jobs.items()}
    cost = {kind: step_cost(shape, spec, job, DEVICES["h100"], "full") for kind, job in jobs.items()}
    assert memory["none"].host == 0
    assert memory["none"].total > memory["optimizer"].total > memory["all"].total
    assert memory["optimizer"].host > 0
    assert memory["none"].optimizer <= memory["optimizer"].host
    assert memory["all"].weights == memory["all"].gradients == memory["all"].optimizer == 0
    assert memory["none"].weights + memory["none"].optimizer <= memory["all"].host
    assert cost["none"].seconds < cost["optimizer"].seconds <= cost["all"].seconds
    on_cpu = [rank_memory(shape, spec, job, DEVICES["cpu"], "full") for job in jobs.values()]
    assert {each.host for each in on_cpu} == {0}
    assert all(each.total >= on_cpu[0].total for each in on_cpu), "host and device are one memory"


def test_adapters_and_offload_are_asked_for_by_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "qwen3-30b-a3b", "--gpus", "8", "--lora-rank", "16", "--offload", "optimizer", "--json"]
    main(words)
    plan = json.loads(capsys.readouterr().out)
    assert [each["spec"] for each in plan["ranked"]] == ["fsdp:d8"]
    assert plan["ranked"][0]["overrides"][-2:] == ["actor.lora.rank=16", "actor.offload=optimizer"]
    assert plan["ranked"][0]["memory"]["host"] > 0
    assert main(["--model", "llama-3.1-8b", "--layout", "archon:t8", "--lora-rank", "8"]) == 2
    assert "archon has no adapters; fsdp:d8 fits --lora-rank" in capsys.readouterr().err


def test_replicas_take_memory_and_spare_gathers(capsys: pytest.CaptureFixture[str]) -> None:
    shape, device = read_shape("llama-3.1-8b"), device_named("h100", 16)
    spec, job = BackendSpec("archon", d=8, t=2), Job(4096, 4096, 1 << 17, "bfloat16")
    once, cost = rank_memory(shape, spec, job, device, "full"), step_cost(shape, spec, job, device, "full")
    assert cost.micro_batches == 4
    for replicas in (2, 4, 8):
        held = replace(job, replicas=replicas)
        memory, traffic = rank_memory(shape, spec, held, device, "full"), step_cost(shape, spec, held, device, "full")
        assert memory.weights == pytest.approx(replicas * once.weights, rel=1e-6)
        assert memory.optimizer == pytest.approx(replicas * once.optimizer, rel=1e-6)
        # A ring over 8 / replicas ranks in every micro-batch, and once per step one over the replicas, there and back in float32.
        share, pieces = shape.parameters / 2, 8 // replicas
        data = traffic.traffic["data"].bytes if pieces > 1 else 0
        assert data == pytest.approx(4 * share * 8 * (1 - 1 / pieces), rel=1e-3)
        assert traffic.traffic["replicas"].bytes == pytest.approx(share / pieces * 8 * (1 - 1 / replicas), rel=1e-3)
        assert data + traffic.traffic["replicas"].bytes < cost.traffic["data"].bytes
    main(["--model", "llama-3.1-8b", "--gpus", "12", "--replicas", "6", "--json", "--top", "100"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["ranked"]
    assert all(parse_backend(each["spec"]).d % 6 == 0 for each in plan["ranked"])
    assert plan["ranked"][0]["overrides"][-1] == "actor.replicas=6"
    for words in (["--gpus", "12"], ["--layout", "fsdp:d12"]):
        assert main(["--model", "llama-3.1-8b", *words, "--replicas", "5"]) == 2
        assert (
            "replicas=5 must divide the d12 of fsdp:d12; replicas of 1, 2, 3, 4, 6 or 12 fits"
            in capsys.readouterr().err
        )


def test_experts_are_planned_as_often_as_e_allows() -> None:
    """On 8 ranks in 4 replicas, of two ranks each: where e is more than 2 no two ranks hold all experts between them."""
    shape, job = read_shape("qwen3-30b-a3b"), Job(4096, 4096, 1 << 17, "bfloat16", replicas=4)
    experts, owns = shape.expert_layers * shape.experts * shape.expert, {}
    for e in (1, 2, 4, 8):
        spec = BackendSpec("archon", d=8, e=e)
        [stage] = stages_of(shape, spec, job)
        owns[e] = share_of(shape, spec, stage, job.replicas).own
    dense = owns[8] - experts / 8
    assert dense == pytest.approx((shape.parameters - experts) / 2, rel=1e-3)
    for e, part in ((1, 1 / 2), (2, 1 / 2), (4, 1 / 4)):
        assert owns[e] == pytest.approx(dense + experts * part, rel=1e-6)
