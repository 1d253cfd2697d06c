"""What each net's ranks are told of their layout, and which nets need ranks of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from areal.cluster.local import LocalScheduler
from areal.cluster.run_folder import RunFolder
from areal.config.load import resolve
from areal.launch import Launch
from areal.models.tiny import write_tiny

LORA = ["actor.lora.rank=4", "actor.backend=fsdp:d2"]


async def nets_of(tmp_path: Path, *overrides: str) -> dict[str, dict[str, Any]]:
    model = tmp_path / "model"
    if not model.exists():
        write_tiny(model)
    config = resolve(None, ["rollout.agent.mode=online", f"actor.path={model}", *overrides]).config
    folder = RunFolder.of(str(tmp_path), "e", "t", None, None)
    launch = Launch(config, folder, LocalScheduler(tmp_path), cast(Any, None), model, "r", "sqlite://")
    return await launch._nets()


async def test_each_net_is_held_as_often_as_its_own_section_says(tmp_path: Path) -> None:
    ours = ["actor.backend=archon:d4t2", "actor.replicas=2", "critic.backend=fsdp:d4", "critic.replicas=4"]
    others = ["ref.backend=fsdp:d2", "ref.replicas=2", "teacher.backend=fsdp:d2"]
    nets = await nets_of(tmp_path, *ours, *others)
    assert {name: each["replicas"] for name, each in nets.items()} == {
        "policy": 2,
        "critic": 4,
        "reference": 2,
        "teacher": 1,
    }


@pytest.mark.parametrize(
    ("said", "own"),
    [([], False), (["ref.replicas=2", "actor.replicas=2"], False), (["ref.backend=fsdp:d2", "ref.replicas=2"], True)],
)
async def test_a_reference_that_is_to_lie_otherwise_has_ranks_of_its_own(
    tmp_path: Path, said: list[str], own: bool
) -> None:
    nets = await nets_of(tmp_path, *LORA, f"ref.path={tmp_path / 'model'}", *said)
    assert ("reference" in nets) is own
