"""Nets whose experts lie otherwise in memory than on disk: checkpoints have the tensors of a model folder, and a run goes on from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from areal.base.errors import ConfigError
from areal.engine.commands import Row
from areal.engine.engine import TrainEngine
from areal.models.dense_config import read_config


@pytest.mark.parametrize("backend", ["archon:d1", "fsdp:d1"])
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(
    backend: str,
    tmp_path: Path,
    moe_dir: Path,
    make_engine: Callable[..., TrainEngine],
    group_rows: Callable[..., list[Row]],
) -> None:
    rows = group_rows(groups=2)
    first = make_engine(model_dir=str(moe_dir), backend=backend)
    first.train_step(rows, 0, 0)
    first.save(str(tmp_path / "saved"), 1, full=True)
    on_disk = load_file(tmp_path / "saved" / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in on_disk.items()} == read_config(moe_dir).parameter_shapes()

    second = make_engine(model_dir=str(moe_dir), backend=backend)
    second.restore(str(tmp_path / "saved"))
    for engine in (first, second):
        engine.train_step(rows, 1, 1)
    once, again = dict(first.named_tensors()), dict(second.named_tensors())
    assert once.keys() == again.keys() == on_disk.keys()
    assert all(torch.equal(once[name], again[name]) for name in once)
    assert not all(torch.equal(once[name], on_disk[name]) for name in once)


@pytest.mark.parametrize(
    ("saved", "resumed", "said"),
    [
        ({"backend": "fsdp:d1"}, {}, r"gate_up_proj', .* the other of fsdp: and archon:.*; set actor.backend back"),
        ({}, {"backend": "fsdp:d1"}, r"gate_proj', .* the other of fsdp: and archon:.*; set actor.backend back"),
        ({}, {"moe_bias_rate": 0.1}, r"under another actor.moe_bias_rate .*e_score_correction_bias' is in only one"),
        ({"moe_bias_rate": 0.1}, {}, r"under another actor.moe_bias_rate .*e_score_correction_bias' is in only one"),
    ],
)
def test_what_was_saved_by_a_net_of_another_make_says_which(
    tmp_path: Path,
    moe_dir: Path,
    make_engine: Callable[..., TrainEngine],
    group_rows: Callable[..., list[Row]],
    saved: dict[str, object],
    resumed: dict[str, object],
    said: str,
) -> None:
    ours = {"model_dir": str(moe_dir), "backend": "archon:d1"}
    first = make_engine(**ours | saved)
    first.train_step(group_rows(groups=1), 0, 0)
    first.save(str(tmp_path / "saved"), 1, full=True)
    second = make_engine(**ours | resumed)
    with pytest.raises(ConfigError, match=said):
        second.restore(str(tmp_path / "saved"))
