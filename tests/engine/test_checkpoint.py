"""Checkpoints: what transformers loads, what resumes bit-equal, and what is refused."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from areal.base.errors import ConfigError
from areal.engine import checkpoint
from areal.engine.checkpoint_files import is_complete
from areal.engine.commands import Row
from areal.engine.engine import TrainEngine

MakeEngine = Callable[..., TrainEngine]
GroupRows = Callable[..., list[Row]]


def test_T082_a_tied_head_is_written_once_and_reloads_to_the_same_logits(
    make_engine: MakeEngine, group_rows: GroupRows, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    engine = make_engine()
    engine.train_step(group_rows(), 0, 0)
    engine.save(str(tmp_path / "out"), 1, full=False)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert len({"lm_head.weight", "model.embed_tokens.weight"} & names) == 1
    assert names == {name for name, _ in engine.named_tensors()}
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert reloaded.lm_head.weight.data_ptr() == reloaded.model.embed_tokens.weight.data_ptr()
    engine.policy.model.set_attn_implementation("sdpa")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(reloaded(ids).logits, engine.policy.model(ids).logits, atol=1e-6, rtol=0)


def test_T082_an_untied_head_is_written_too(tiny_dir: Path, make_engine: MakeEngine, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config.from_pretrained(tiny_dir, tie_word_embeddings=False)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "untied")
    engine = make_engine(model_dir=str(tmp_path / "untied"))
    engine.save(str(tmp_path / "out"), 0, full=False)
    names = {name for name, _ in engine.named_tensors()}
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= names
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(reloaded.lm_head.weight, engine.policy.head.weight)


RESUME = """
import sys, pickle, hashlib, torch
from areal.engine.engine import TrainEngine
settings, path, batches, out = pickle.load(open(sys.argv[1], "rb"))
engine = TrainEngine.load(settings)
facts = engine.restore(path)
stats = [engine.train_step(rows, facts["step"] + k, facts["step"] + k) for k, rows in enumerate(batches)]
engine.save(out, 4, full=True)
pickle.dump((facts, [(s["loss"], s["lr"], s["grad_norm"]) for s in stats]), open(sys.argv[1], "wb"))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_T083_two_steps_then_a_new_process_equal_four_steps(
    make_engine: MakeEngine, group_rows: GroupRows, tmp_path: Path, dtype: str
) -> None:
    batches = [group_rows(seed=seed) for seed in range(4)]
    changes = {
        "dtype": dtype,
        "optimizer": {"lr": 1e-3, "lr_scheduler_type": "cosine", "warmup_steps": 1, "weight_decay": 0.1},
    }
    straight = make_engine(**changes)
    stats = [straight.train_step(rows, step, step) for step, rows in enumerate(batches)]
    straight.save(str(tmp_path / "straight"), 4, full=True)
    first = make_engine(**changes)
    for step in range(2):
        first.train_step(batches[step], step, step)
    first.save(str(tmp_path / "step-2"), 2, full=True)
    assert is_complete(tmp_path / "step-2")
    job = tmp_path / "job.pickle"  # between two processes of this test; checkpoints hold none
    job.write_bytes(pickle.dumps((first.settings, str(tmp_path / "step-2"), batches[2:], str(tmp_path / "resumed"))))
    subprocess.run([sys.executable, "-c", RESUME, str(job)], check=True, timeout=120)
    facts, resumed = pickle.loads(job.read_bytes())
    assert facts == {"step": 2, "optimizer_steps": 2}
    assert resumed == [(s["loss"], s["lr"], s["grad_norm"]) for s in stats[2:]]
    for file in ("model.safetensors", "recovery/optimizer.safetensors"):
        ours, theirs = load_file(tmp_path / "resumed" / file), load_file(tmp_path / "straight" / file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_T110_a_checkpoint_holds_no_pickle_and_a_pickled_one_is_not_opened(
    make_engine: MakeEngine, group_rows: GroupRows, tmp_path: Path
) -> None:
    engine = make_engine()
    engine.train_step(group_rows(), 0, 0)
    path = tmp_path / "step"
    engine.save(str(path), 1, full=True)
    files = sorted(str(f.relative_to(path)) for f in path.rglob("*") if f.is_file())
    assert files == [
        "config.json", "generation_config.json", "model.safetensors", "recovery/optimizer.safetensors",
        "recovery/state.json", "tokenizer.json",
    ]  # fmt: skip
    marker = tmp_path / "marker"
    evil = pickle.dumps(Touch(str(marker)))
    for file in ("model.safetensors", "recovery/optimizer.safetensors"):
        shutil.copytree(path, tmp_path / "bad")
        (tmp_path / "bad" / file).write_bytes(evil)
        with pytest.raises(ConfigError, match=r"is damaged"):
            engine.restore(str(tmp_path / "bad"))
        shutil.rmtree(tmp_path / "bad")
    assert not marker.exists()


class Touch:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")


def test_a_failed_save_leaves_the_former_checkpoint(
    make_engine: MakeEngine, group_rows: GroupRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    path = tmp_path / "step"
    engine.save(str(path), 1, full=True)
    before = (path / "model.safetensors").read_bytes()
    engine.train_step(group_rows(), 0, 0)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            engine.save(str(path), 2, full=True)
    assert (path / "model.safetensors").read_bytes() == before
    assert [f.name for f in tmp_path.iterdir()] == ["step"]
    engine.save(str(path), 2, full=True)
    assert (path / "model.safetensors").read_bytes() != before
    assert json.loads((path / "recovery" / "state.json").read_text())["step"] == 2
    assert [f.name for f in tmp_path.iterdir()] == ["step"]


def test_checkpoints_of_other_models_are_refused_before_anything_changes(
    make_engine: MakeEngine, group_rows: GroupRows, tmp_path: Path
) -> None:
    engine = make_engine()
    engine.save(str(tmp_path / "weights-only"), 1, full=False)
    with pytest.raises(ConfigError, match="has no recovery state"):
        engine.restore(str(tmp_path / "weights-only"))
    tensors = load_file(tmp_path / "weights-only" / "model.safetensors")
    before = {name: tensor.clone() for name, tensor in engine.named_tensors()}
    (tmp_path / "cut").mkdir()
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name][:3]}, tmp_path / "cut" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"down_proj\.weight has shape \(3, 48\), not \(32, 48\)"):
        engine.restore(str(tmp_path / "cut"))
    del tensors[name]
    save_file(tensors, tmp_path / "cut" / "model.safetensors")
    with pytest.raises(ConfigError, match="is in only one of both"):
        engine.restore(str(tmp_path / "cut"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.named_tensors())
