"""An adapter beside frozen weights: its gradient, what it trains, what a checkpoint holds of it, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from areal.base.errors import ConfigError
from areal.engine.commands import Row
from areal.engine.engine import TrainEngine
from areal.engine.lora import AdaptedPolicy
from areal.engine.net import without_twins
from areal.models.adapter import Adapter, adapter_name, read_adapter

MakeEngine = Callable[..., TrainEngine]
GroupRows = Callable[..., list[Row]]

LORA = {"rank": 4, "alpha": 8}
SCALE = 2.0


def adapted(engine: TrainEngine, *, seed: int = 3) -> TrainEngine:
    """With a B that says something."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, tensor in engine.named_tensors():
            if ".lora_B." in name:
                tensor.normal_(std=0.1)
    return engine


def adapter_of(engine: TrainEngine) -> Adapter:
    return Adapter({name: tensor.clone() for name, tensor in engine.named_tensors()}, scale=SCALE)


def base_of(engine: TrainEngine) -> dict[str, Tensor]:
    named = without_twins(engine.policy.model)
    return {name: tensor.clone() for name, tensor in named if "lora_" not in name}


@pytest.fixture
def dense(make_engine: MakeEngine, tmp_path: Path) -> Iterator[Callable[[TrainEngine], TrainEngine]]:
    """The model that base and adapter make, all of it trained."""

    def merged(engine: TrainEngine) -> TrainEngine:
        engine.save(str(tmp_path / "merged"), 1, full=False)
        return make_engine(model_dir=str(tmp_path / "merged"))

    return merged


def test_the_gradients_of_a_and_b_follow_from_that_of_the_whole_weight(
    make_engine: MakeEngine, group_rows: GroupRows, dense: Callable[[TrainEngine], TrainEngine]
) -> None:
    """dA = s * B^T G and dB = s * G A^T, with G the gradient of the merged weight; log-probs are the merged model's. float32: 1e-5."""
    rows, engine = group_rows(groups=3), adapted(make_engine(lora=LORA))
    whole = dense(engine)
    for ours, theirs in zip(engine.score(rows), whole.score(rows), strict=True):
        torch.testing.assert_close(torch.from_numpy(ours), torch.from_numpy(theirs), atol=1e-5, rtol=0)
    grads: list[dict[str, Tensor]] = []
    for each in (engine, whole):
        step = each._optimizer.step
        each._optimizer.step = lambda number, each=each, step=step: (  # type: ignore[method-assign, misc]
            grads.append({name: p.grad.clone() for name, p in each.policy.trained_parameters()}),
            step(number),
        )[1]
        each.train_step(rows, 0, 0)
    own, dense_grads = grads
    pairs = adapter_of(adapted(make_engine(lora=LORA))).pairs
    assert len(pairs) == 14, "seven maps in each of two layers"
    assert own.keys() == {adapter_name(name.removesuffix(".weight"), half) for name in pairs for half in "AB"}
    for name, (a, b) in pairs.items():
        module, g = name.removesuffix(".weight"), dense_grads[name]
        for half, expected in (("A", SCALE * b.T @ g), ("B", SCALE * g @ a.T)):
            found = own[adapter_name(module, half)]
            assert (found - expected).norm() <= 1e-5 * expected.norm(), (module, half)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_but_the_adapter_is_trained_kept_or_moved(
    make_engine: MakeEngine, group_rows: GroupRows, dtype: str
) -> None:
    engine = make_engine(lora=LORA, dtype=dtype)
    before, adapter = base_of(engine), {name: tensor.clone() for name, tensor in engine.named_tensors()}
    stats = [engine.train_step(group_rows(seed=seed), seed, seed) for seed in range(2)]
    assert all(each["grad_norm"] > 0 for each in stats)
    assert all(torch.equal(tensor, before[name]) for name, tensor in base_of(engine).items())
    assert all(p.grad is None for p in engine.policy.parameters() if not p.requires_grad)
    moved = [name for name, tensor in engine.named_tensors() if not torch.equal(tensor, adapter[name])]
    assert sorted(moved) == sorted(adapter)
    assert {tensor.dtype for _, tensor in engine.named_tensors()} == {getattr(torch, dtype)}
    state = engine._optimizer.state_tensors()
    assert {name.split(".", 1)[1] for name in state} == adapter.keys()
    assert any(name.startswith("master.") for name in state) == (dtype == "bfloat16")


def test_without_its_adapter_the_policy_is_the_model_that_it_began_with(
    make_engine: MakeEngine, group_rows: GroupRows
) -> None:
    rows = group_rows()
    engine, reference = adapted(make_engine(lora=LORA)), make_engine(role="frozen")
    at_first = engine.score(rows)
    assert all(
        (ours == theirs).all()
        for ours, theirs in zip(engine.score(rows, base=True), reference.score(rows), strict=True)
    )
    assert all((ours == theirs).all() for ours, theirs in zip(engine.score(rows), at_first, strict=True))
    assert any((ours != theirs).any() for ours, theirs in zip(at_first, reference.score(rows), strict=True))
    with pytest.raises(ConfigError, match="has no adapter that could be left out"):
        reference.score(rows, base=True)


def test_an_adapter_begins_with_the_seed_and_says_nothing_yet(make_engine: MakeEngine, group_rows: GroupRows) -> None:
    first, again, other = (make_engine(lora=LORA, seed=seed) for seed in (1, 1, 2))
    rows = group_rows()
    assert all((one == bare).all() for one, bare in zip(first.score(rows), make_engine().score(rows), strict=True))
    named = dict(again.named_tensors())
    assert all(torch.equal(tensor, named[name]) for name, tensor in first.named_tensors())
    differ = {name for name, tensor in other.named_tensors() if not torch.equal(tensor, named[name])}
    assert differ == {name for name in named if ".lora_A." in name}
    assert len({float(tensor[0, 0]) for name, tensor in named.items() if ".lora_A." in name}) == 14


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # in peft's own loading
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_people_get_a_model_that_transformers_loads_and_an_adapter_that_peft_loads(
    make_engine: MakeEngine, tiny_dir: Path, tmp_path: Path, dtype: str
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    engine = adapted(make_engine(lora=LORA, dtype=dtype))
    engine.save(str(tmp_path / "out"), 1, full=False)
    saved, base, adapter = load_file(tmp_path / "out" / "model.safetensors"), base_of(engine), adapter_of(engine)
    for name, tensor in saved.items():
        held = base.get(name, base.get(name.replace(".weight", ".base_layer.weight")))
        pair = adapter.pairs.get(name)
        expected = held if pair is None else held.float() + SCALE * (pair[1].float() @ pair[0].float())
        assert tensor.dtype == getattr(torch, dtype)
        torch.testing.assert_close(
            tensor, expected.to(tensor.dtype), atol=1e-7, rtol=1e-2 if dtype == "bfloat16" else 0
        )
    engine.policy.model.set_attn_implementation("sdpa")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        ours = engine.policy.model(ids).logits.float()
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=getattr(torch, dtype))
        begun = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=getattr(torch, dtype))
        theirs = PeftModel.from_pretrained(begun, str(tmp_path / "out" / "adapter"))
        bound = 1e-5 if dtype == "float32" else 0.1
        torch.testing.assert_close(merged(ids).logits.float(), ours, atol=bound, rtol=0)
        torch.testing.assert_close(theirs(ids).logits.float(), ours, atol=bound, rtol=0)


def test_T083_two_steps_then_another_engine_equal_four_steps(
    make_engine: MakeEngine, group_rows: GroupRows, tmp_path: Path
) -> None:
    """A recovery state holds the adapter and its moments, and nothing of the base."""
    batches = [group_rows(seed=seed) for seed in range(4)]
    straight = make_engine(lora=LORA)
    for number, rows in enumerate(batches[:2]):
        straight.train_step(rows, number, number)
    straight.save(str(tmp_path / "step"), 2, full=True, model=False)
    files = {str(path.relative_to(tmp_path / "step")) for path in (tmp_path / "step").rglob("*") if path.is_file()}
    assert files == {
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
        "checkpoint.json",
        "recovery/pieces-0.safetensors",
        "recovery/state.json",
    }
    resumed = make_engine(lora=LORA)
    assert resumed.restore(str(tmp_path / "step"))["step"] == 2
    stats = [
        [engine.train_step(rows, number, number) for number, rows in enumerate(batches[2:], 2)]
        for engine in (straight, resumed)
    ]
    assert [(s["loss"], s["grad_norm"]) for s in stats[0]] == [(s["loss"], s["grad_norm"]) for s in stats[1]]
    named = dict(resumed.named_tensors())
    assert all(torch.equal(tensor, named[name]) for name, tensor in straight.named_tensors())


def test_what_it_was_not_trained_as_it_is_not_gone_on_with(
    make_engine: MakeEngine, tiny_dir: Path, tmp_path: Path
) -> None:
    make_engine(lora=LORA).save(str(tmp_path / "lora"), 1, full=True)
    make_engine().save(str(tmp_path / "whole"), 1, full=True)
    shutil.copytree(tiny_dir, tmp_path / "other")
    weights = load_file(tmp_path / "other" / "model.safetensors")
    save_file(
        {name: t + 1e-3 for name, t in weights.items()}, tmp_path / "other" / "model.safetensors", {"format": "pt"}
    )
    for checkpoint, changes, says in (
        ("lora", {"lora": LORA | {"rank": 8}}, "rank 4, and actor.lora now says 8"),
        ("lora", {"lora": LORA | {"alpha": 4}}, "alpha 8, and actor.lora now says 4"),
        ("lora", {"lora": LORA | {"target_modules": "q_proj"}}, r"\['down_proj', .*now says \['q_proj'\]"),
        ("lora", {"lora": LORA, "model_dir": str(tmp_path / "other")}, "holds an adapter of other weights"),
        ("lora", {}, "was trained with actor.lora"),
        ("whole", {"lora": LORA}, "was trained without actor.lora"),
    ):
        with pytest.raises(ConfigError, match=says):
            make_engine(**changes).restore(str(tmp_path / checkpoint))


def test_maps_that_cannot_have_an_adapter_are_refused_by_name(make_engine: MakeEngine, moe_dir: Path) -> None:
    known = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    for wanted in ("lm_head", "embed_tokens", "q_proj,query"):
        with pytest.raises(ConfigError, match=f"no linear map .*they have {known}"):
            make_engine(lora=LORA | {"target_modules": wanted})
    with pytest.raises(ConfigError, match="they have k_proj, o_proj, q_proj, v_proj"):
        make_engine(model_dir=str(moe_dir), lora=LORA | {"target_modules": "gate_proj"})
    for changes, who in (({"backend": "archon:d1"}, "archon:d1"), ({"role": "critic"}, "a critic")):
        with pytest.raises(ConfigError, match=f"{who} has no adapter; use fsdp: for the actor"):
            make_engine(lora=LORA, **changes)
    two = make_engine(lora=LORA | {"target_modules": " v_proj, q_proj"})
    assert {name.split(".")[-3] for name, _ in two.named_tensors()} == {"q_proj", "v_proj"}


def test_a_map_that_the_model_goes_past_is_found_at_load(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    def past(self: Qwen3MLP, x: Tensor) -> Tensor:
        gate = torch.nn.functional.linear(x, self.gate_proj.weight)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))

    monkeypatch.setattr(Qwen3MLP, "forward", past)
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM does not go through .*gate_proj\.lora_B\.weight"):
        make_engine(lora=LORA)


def test_experts_stay_as_they_are_and_attention_learns(
    make_engine: MakeEngine, group_rows: GroupRows, moe_dir: Path, tmp_path: Path
) -> None:
    engine = adapted(make_engine(model_dir=str(moe_dir), lora=LORA))
    assert isinstance(engine.policy, AdaptedPolicy)
    assert engine.train_step(group_rows(), 0, 0)["grad_norm"] > 0
    engine.save(str(tmp_path / "out"), 1, full=False)
    begun, saved = load_file(moe_dir / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == begun.keys()
    changed = {name for name in saved if not torch.equal(saved[name], begun[name])}
    assert changed == read_adapter(tmp_path / "out" / "adapter").pairs.keys()
    assert {name.split(".")[-2] for name in changed} == {"k_proj", "o_proj", "q_proj", "v_proj"}
