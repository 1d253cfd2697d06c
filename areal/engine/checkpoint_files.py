"""Whether a checkpoint folder is whole, told from its files alone: no torch, nothing loaded.

    is_complete(Path("checkpoints/step-000120"))
    critic_beside(Path("checkpoints/step-000120"))         # checkpoints/critic-000120, where a critic is trained too

A safetensors file states its own length in its header, so a file that was cut (a kill, a full disk, a copy that broke off)
is seen without reading its data. Used by rollout/snapshots.py before a resume and before pruning, and by nets.py.
"""

from __future__ import annotations

import json
from pathlib import Path

_LONGEST_HEADER = 100 * 2**20


def is_complete(folder: Path) -> bool:
    """Weights, optimizer state and its facts are there, each as long as it says it is."""
    return (
        (folder / "config.json").is_file()
        and _whole(folder / "model.safetensors")
        and _whole(folder / "recovery" / "optimizer.safetensors")
        and _is_json(folder / "recovery" / "state.json")
    )


def critic_beside(folder: Path) -> Path:
    """Where the critic that belongs to a policy's checkpoint lies."""
    return folder.with_name(f"critic-{folder.name.rpartition('-')[2]}")


def _whole(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LONGEST_HEADER:
                return False
            header = json.loads(file.read(length))
    except (OSError, ValueError):
        return False
    data = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    return path.stat().st_size == 8 + length + data


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return True
