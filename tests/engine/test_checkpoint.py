"""Checkpoints: what transformers loads, what resumes bit-equal, and what is refused."""

from __future__ import annotations

import pickle
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from areal.base.errors import CheckpointError, ConfigError
from areal.engine import checkpoint
from areal.engine.checkpoint_files import checkpoints, damage, looks_whole, read_mark
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
    assert torch.equal(reloaded.lm_head.weight, engine.policy.model.lm_head.weight)


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
    assert looks_whole(tmp_path / "step-2")
    job = tmp_path / "job.pickle"  # between two processes of this test; checkpoints hold none
    job.write_bytes(pickle.dumps((first.settings, str(tmp_path / "step-2"), batches[2:], str(tmp_path / "resumed"))))
    subprocess.run([sys.executable, "-c", RESUME, str(job)], check=True, timeout=500)
    facts, resumed = pickle.loads(job.read_bytes())
    assert facts == {"step": 2, "optimizer_steps": 2, "dtype": dtype}
    assert resumed == [(s["loss"], s["lr"], s["grad_norm"]) for s in stats[2:]]
    for file in ("model.safetensors", "recovery/pieces-0.safetensors"):
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
        "checkpoint.json", "config.json", "generation_config.json", "model.safetensors",
        "recovery/pieces-0.safetensors", "recovery/state.json", "tokenizer.json",
    ]  # fmt: skip
    marker = tmp_path / "marker"
    evil = pickle.dumps(Touch(str(marker)))
    for file in ("model.safetensors", "recovery/pieces-0.safetensors"):
        shutil.copytree(path, tmp_path / "bad")
        (tmp_path / "bad" / file).write_bytes(evil)
        with pytest.raises(CheckpointError, match=r"is damaged"):
            engine.restore(str(tmp_path / "bad"))
        shutil.rmtree(tmp_path / "bad")
    assert not marker.exists()


class Touch:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")


def test_a_failed_save_leaves_the_former_checkpoint(
    make_engine: MakeEngine, group_rows: GroupRows, tmp_path: Path
) -> None:
    engine = make_engine()
    path = tmp_path / "step"
    engine.save(str(path), 1, full=True)
    before = (path / "model.safetensors").read_bytes()
    engine.train_step(group_rows(), 0, 0)
    with (
        files_of_at_most(len(before) + 4096),
        pytest.raises(CheckpointError, match=f"{path} could not be written: File too large"),
    ):
        engine.save(str(path), 2, full=True)
    assert (path / "model.safetensors").read_bytes() == before
    assert [f.name for f in tmp_path.iterdir()] == ["step"]
    assert damage(path, recovery=True) is None
    engine.save(str(path), 2, full=True)
    assert (path / "model.safetensors").read_bytes() != before
    assert read_mark(path).step == 2
    assert [f.name for f in tmp_path.iterdir()] == ["step"]


def test_T081_where_the_new_one_cannot_take_the_name_the_former_one_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "mine").touch()
    with pytest.raises(FileNotFoundError):
        checkpoint.put_in_place(tmp_path / "gone", tmp_path / "step")
    assert [file.name for file in tmp_path.rglob("*")] == ["step", "mine"]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The kernel refuses to write beyond, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_checkpoints_of_other_models_are_refused_before_anything_changes(
    make_engine: MakeEngine, tiny_dir: Path, tmp_path: Path
) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    engine = make_engine()
    engine.save(str(tmp_path / "weights-only"), 1, full=False)
    with pytest.raises(ConfigError, match="has no recovery state"):
        engine.restore(str(tmp_path / "weights-only"))
    before = {name: tensor.clone() for name, tensor in engine.named_tensors()}
    for change, says in (
        ({"intermediate_size": 64}, r"mlp\.down_proj\.weight has shape \(32, 64\), not \(32, 48\)|mlp\.gate_proj"),
        ({"vocab_size": 77}, r"embed_tokens\.weight has shape \(77, 32\), not \(61, 32\)"),
        ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, "is in only one of both"),
    ):
        Qwen3ForCausalLM(Qwen3Config.from_pretrained(tiny_dir, **change)).save_pretrained(tmp_path / "other")
        other = make_engine(model_dir=str(tmp_path / "other"))
        other.save(str(tmp_path / "step"), 1, full=True)
        with pytest.raises(ConfigError, match=rf"belongs to another model: .*({says})"):
            engine.restore(str(tmp_path / "step"))
        shutil.rmtree(tmp_path / "other")
    make_engine(dtype="bfloat16").save(str(tmp_path / "step"), 1, full=True)
    with pytest.raises(ConfigError, match="was trained in bfloat16, and this run's dtype is float32"):
        engine.restore(str(tmp_path / "step"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.named_tensors())


def test_T081_whatever_is_cut_lost_or_altered_is_seen_and_named(
    make_engine: MakeEngine, group_rows: GroupRows, tmp_path: Path
) -> None:
    engine = make_engine()
    engine.train_step(group_rows(), 0, 0)
    engine.save(str(tmp_path / "step"), 1, full=True)
    good = {str(file.relative_to(tmp_path / "step")): file for file in (tmp_path / "step").rglob("*.*")}
    assert damage(tmp_path / "step", recovery=True) is None
    assert set(read_mark(tmp_path / "step").files) == good.keys() - {"checkpoint.json"}
    bad, seen = tmp_path / "bad", 0
    for name, file in good.items():
        whole = file.read_bytes()
        for broken in (whole[: len(whole) // 2], flipped(whole, len(whole) // 2), flipped(whole, len(whole) - 2), None):
            shutil.copytree(tmp_path / "step", bad)
            (bad / name).unlink() if broken is None else (bad / name).write_bytes(broken)
            found = damage(bad, recovery=True)
            assert found is not None, name
            assert Path(name).name in found
            seen += 1
            shutil.rmtree(bad)
    assert seen == 28
    weights = dict(engine.named_tensors())
    before = {name: tensor.clone() for name, tensor in weights.items()}
    shutil.copytree(tmp_path / "step", bad)
    (bad / "model.safetensors").write_bytes(flipped((bad / "model.safetensors").read_bytes(), -300))
    with pytest.raises(CheckpointError, match=r"is damaged: model\.safetensors holds another .*resume from an earlier"):
        engine.restore(str(bad))
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights.items())


def test_T081_pieces_without_a_mark_are_no_checkpoint(
    make_engine: MakeEngine, group_rows: GroupRows, tmp_path: Path
) -> None:
    """What is left where a process ends after all pieces are on disk: not found, not taken, and written over."""
    engine, path = make_engine(), tmp_path / "step-000001"
    engine.train_step(group_rows(), 0, 0)
    checkpoint.begin(path)
    files = checkpoint.write_own(path, 0, engine.hold(1, full=True))
    left = tmp_path / ".step-000001.partial"
    assert (left / "recovery/pieces-0.safetensors").stat().st_size == files["recovery/pieces-0.safetensors"].bytes
    assert checkpoints(tmp_path) == []
    with pytest.raises(CheckpointError, match="is no complete checkpoint"):
        engine.restore(str(left))
    engine.save(str(path), 1, full=True)
    assert damage(path, recovery=True) is None
    assert [found.path for found in checkpoints(tmp_path)] == [path]
    assert not left.exists()


def flipped(data: bytes, at: int) -> bytes:
    """One bit of it."""
    changed = bytearray(data)
    changed[at] ^= 4
    return bytes(changed)


def test_what_is_held_is_the_state_as_it_was_however_training_goes_on(
    make_engine: MakeEngine, group_rows: GroupRows, tmp_path: Path
) -> None:
    """Also for what no step changes in place today: every byte of the net, the moments and the generators is overwritten."""
    engine = make_engine(dtype="bfloat16")  # with masters
    engine.train_step(group_rows(), 0, 0)
    engine.save(str(tmp_path / "then"), 1, full=True)
    held = engine.hold(1, full=True)
    engine.train_step(group_rows(seed=1), 1, 1)
    with torch.no_grad():
        for tensor in (*dict(engine.named_tensors()).values(), *engine._optimizer.state_tensors().values()):
            tensor.fill_(7)
    torch.manual_seed(99), np.random.seed(99), random.seed(99)
    checkpoint.write(tmp_path / "later", held, engine.settings.model_dir, step=1)
    assert read_mark(tmp_path / "later").files == read_mark(tmp_path / "then").files


def test_T083_every_generator_goes_on_where_it_was(
    make_engine: MakeEngine, group_rows: GroupRows, tmp_path: Path
) -> None:
    engine = make_engine()
    engine.train_step(group_rows(), 0, 0)
    draw = lambda: (torch.rand(3).tolist(), np.random.normal(size=3).tolist(), random.gauss(0, 1), random.random())  # noqa: E731
    draw()  # an odd number of normal draws: one is kept for later, in numpy and in Python
    engine.save(str(tmp_path / "step"), 1, full=True)
    straight = [draw() for _ in range(2)]
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    engine.restore(str(tmp_path / "step"))
    assert [draw() for _ in range(2)] == straight
