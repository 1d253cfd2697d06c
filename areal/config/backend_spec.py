"""Backend specs: one word for what runs and in how many processes, `archon:d4t2p1c1e1` or `native:d2`.

    spec = parse_backend("archon:d4t2")       # BackendSpec(name="archon", d=4, t=2, p=1, c=1, e=1)
    spec.size                                 # 8 processes; e splits experts inside them and adds none
    str(spec)                                 # "archon:d4t2p1c1e1"

d data, t tensor, p pipeline, c context, e expert parallel. For what generates, d counts servers. A dimension that is
not written is 1. Whether a name is built into this version is supported.py's knowledge. No torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from areal.base.errors import ConfigError

TrainBackend = Literal["fsdp", "archon"]
RolloutBackend = Literal["native", "scripted", "sglang", "vllm"]
Use = Literal["train", "rollout"]

NAMES: dict[Use, tuple[str, ...]] = {"train": get_args(TrainBackend), "rollout": get_args(RolloutBackend)}
DIMENSIONS: dict[str, str] = {
    "fsdp": "d",
    "archon": "dtpce",
    "native": "d",
    "scripted": "d",
    "sglang": "dtp",
    "vllm": "dtp",
}

_DIMENSION = re.compile(r"([a-z])([0-9]+)")


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A parsed spec. Every dimension is at least 1."""

    name: str
    d: int = 1
    t: int = 1
    p: int = 1
    c: int = 1
    e: int = 1

    @property
    def size(self) -> int:
        """Processes it takes: d * t * p * c."""
        return self.d * self.t * self.p * self.c

    def __str__(self) -> str:
        return f"{self.name}:" + "".join(f"{letter}{getattr(self, letter)}" for letter in DIMENSIONS[self.name])


def parse_backend(text: str, use: Use | None = None) -> BackendSpec:
    """Raises ConfigError listing what is known. use: refuse what only the other side knows."""
    known = NAMES[use] if use else tuple(DIMENSIONS)
    name, colon, dimensions = text.strip().partition(":")
    if name not in known:
        raise ConfigError(f"{text!r} is no backend; known here: {', '.join(f'{each}:d1' for each in known)}")
    if not colon:
        return BackendSpec(name)
    found = _DIMENSION.findall(dimensions)
    sizes = {letter: int(size) for letter, size in found}
    written = "".join(letter + size for letter, size in found)
    if not found or written != dimensions or len(sizes) != len(found) or 0 in sizes.values():
        raise ConfigError(f"{text!r}: after the colon stand sizes of at least 1, each letter once, as in {name}:d2")
    strange = [letter for letter, size in sizes.items() if letter not in DIMENSIONS[name] and size > 1]
    strange += [letter for letter in sizes if letter not in "dtpce"]
    if strange:
        raise ConfigError(
            f"{text!r}: {name} knows {', '.join(DIMENSIONS[name])} only, not {', '.join(dict.fromkeys(strange))}; "
            + ("archon: has all of d, t, p, c, e" if name == "fsdp" else "leave the others out")
        )
    return BackendSpec(name, **sizes)
