"""The state of every random generator that a rank's process has: torch (and its accelerators), numpy's and Python's global ones.

    seed_generators(1)
    tensors = random_state()             # "rng.torch", "rng.numpy", "rng.python", "rng.cuda.0", ...
    restore_random_state(tensors)

Byte tensors and nothing else, so that they stand in a safetensors file. Of a net on several ranks the leader's are kept, and all get them
back: nothing that training computes is drawn (there is no dropout, also none in adapters), so it does not matter which state a rank has. Sampling has no state to keep: every token's seed is a
function of task, attempt and position (docs/architecture.md, "Determinism"). Used by engine.py.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal.base.errors import ConfigError

PREFIX = "rng."


def seed_generators(seed: int) -> None:
    """All of them, so that two processes with the same work have the same state."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def random_state() -> dict[str, Tensor]:
    """Copies, named below PREFIX."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    states = {
        "torch": torch.get_rng_state(),
        "numpy": _pack([name, keys.tolist(), position, has_gauss, gauss]),  # type: ignore[union-attr]
        "python": _pack(random.getstate()),
    }
    if torch.cuda.is_available():
        states |= {f"cuda.{number}": state for number, state in enumerate(torch.cuda.get_rng_state_all())}
    return {PREFIX + kind: state for kind, state in states.items()}


def restore_random_state(tensors: Mapping[str, Tensor]) -> None:
    """What random_state gave, whatever else is in `tensors`. Raises ConfigError where a state is missing."""
    try:
        torch.set_rng_state(tensors[f"{PREFIX}torch"])
        name, keys, position, has_gauss, gauss = _unpack(tensors[f"{PREFIX}numpy"])
        version, internal, next_gauss = _unpack(tensors[f"{PREFIX}python"])
    except KeyError as error:
        raise ConfigError(
            f"the recovery state has no {error}; resume with the version of areal that wrote it"
        ) from None
    np.random.set_state((name, np.array(keys, np.uint32), position, has_gauss, gauss))
    random.setstate((version, tuple(internal), next_gauss))
    for number in range(torch.cuda.device_count()):
        if (state := tensors.get(f"{PREFIX}cuda.{number}")) is not None:
            torch.cuda.set_rng_state(state, number)


def _pack(state: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def _unpack(tensor: Tensor) -> list[Any]:
    unpacked: list[Any] = json.loads(tensor.numpy().tobytes())
    return unpacked
