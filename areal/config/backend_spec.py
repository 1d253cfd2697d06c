"""Backend specs: one word for what runs and in how many processes, `archon:d4t2p1c1e1` or `native:d2`.

    spec = parse_backend("archon:d4t2")       # BackendSpec(name="archon", d=4, t=2, p=1, c=1, e=1)
    spec.size                                 # 8 processes; e splits experts inside them and adds none
    str(spec)                                 # "archon:d4t2p1c1e1"
    parse_backend("archon:(attn:d4p2t2c2|ffn:d2p2t4e2)")     # experts by dimensions of their own: e=2, and et=4 pieces of each

d data, t tensor, p pipeline, c context, e expert parallel. For what generates, d counts servers. A dimension that is
not written is 1. Experts have the processes of a pipeline stage, d * t * c, to themselves a second time: e groups of them in et pieces, the
rest share the same ones; in two halves `ffn` says so, and its d and p may be left out. Whether a name is built into this version is supported.py's knowledge. No torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import isqrt
from typing import Literal, get_args

from areal.base.errors import ConfigError

TrainBackend = Literal["fsdp", "archon"]
RolloutBackend = Literal["native", "scripted", "sglang", "vllm"]
Use = Literal["train", "rollout"]

NAMES: dict[Use, tuple[str, ...]] = {"train": get_args(TrainBackend), "rollout": get_args(RolloutBackend)}
DIMENSIONS: dict[str, str] = {
    "fsdp": "dte",
    "archon": "dtpce",
    "native": "d",
    "scripted": "d",
    "sglang": "dtp",
    "vllm": "dtp",
}

MOST_PROCESSES = 1 << 20
"""Of one net."""

_DIMENSION = re.compile(r"([a-z])([0-9]{1,9})")
_HALVES = re.compile(r"\(attn:(.*)\|ffn:(.*)\)")


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A parsed spec. Every dimension is at least 1."""

    name: str
    d: int = 1
    t: int = 1
    p: int = 1
    c: int = 1
    e: int = 1
    et: int = 1

    @property
    def size(self) -> int:
        """Processes it takes: d * t * p * c."""
        return self.stage_size * self.p

    @property
    def stage_size(self) -> int:
        """Processes of one pipeline stage."""
        return self.d * self.t * self.c

    def __str__(self) -> str:
        if self.et > 1:
            data = self.stage_size // (self.et * self.e)
            attention, experts = f"d{self.d}t{self.t}p{self.p}c{self.c}", f"d{data}t{self.et}p{self.p}e{self.e}"
            return f"{self.name}:(attn:{attention}|ffn:{experts})"
        sizes = {letter: getattr(self, letter) for letter in DIMENSIONS[self.name]}
        if self.name == "fsdp":
            sizes = {letter: size for letter, size in sizes.items() if letter == "d" or size > 1}
        return f"{self.name}:" + "".join(f"{letter}{size}" for letter, size in sizes.items())


def parse_backend(text: str, use: Use | None = None) -> BackendSpec:
    """Raises ConfigError listing what is known. use: refuse what only the other side knows."""
    known = NAMES[use] if use else tuple(DIMENSIONS)
    name, colon, dimensions = text.strip().partition(":")
    if name not in known:
        raise ConfigError(f"{text!r} is no backend; known here: {', '.join(f'{each}:d1' for each in known)}")
    if not colon:
        return BackendSpec(name)
    if halves := _HALVES.fullmatch(dimensions):
        return _in_halves(text, name, halves[1], halves[2])
    spec = _bounded(text, BackendSpec(name, **_sizes(text, name, dimensions, DIMENSIONS[name])))
    whole = spec.t if name == "fsdp" else 1  # transformers' exchange of tokens: the ranks of t share them
    fits = [e for e in divisors(spec.stage_size) if e % whole == 0 or e == 1]
    if spec.e not in fits:
        also = f", and under fsdp: be a multiple of t{whole}" if spec.stage_size % spec.e == 0 else ""
        raise ConfigError(
            f"{text!r}: e{spec.e} must divide the d * t * c = {spec.stage_size} processes of a stage, which share its experts{also}; e of "
            f"{listed(fits)} fits"
        )
    return spec


def _in_halves(text: str, name: str, attention: str, experts: str) -> BackendSpec:
    """(attn:...|ffn:...). The second half's d follows from the rest, its p is the first's."""
    if name != "archon":
        raise ConfigError(f"{text!r}: only archon has experts by dimensions of their own; write {name}:{attention}")
    first = _bounded(text, BackendSpec(name, **_sizes(text, name, attention, "dtpc")))
    second = _sizes(text, name, experts, "dtpe")
    cuts, parts = second.get("t", 1), second.get("e", 1)
    data, left = divmod(first.stage_size, cuts * parts)
    if second.get("p", first.p) != first.p or left or second.get("d", data) != data:
        fits = f"t * e of {listed(divisors(first.stage_size))}" if left else f"ffn:d{data}t{cuts}p{first.p}e{parts}"
        raise ConfigError(
            f"{text!r}: both halves are the same {first.size} processes, p{first.p} stages of {first.stage_size}, so ffn's p is {first.p} and "
            f"its d * t * e {first.stage_size}; {fits} fits"
        )
    return replace(first, e=parts, et=cuts)


def wrong_replicas(spec: BackendSpec, replicas: int) -> str:
    """Why a net cannot be held whole so many times, with the numbers that fit; empty where it can."""
    if spec.d % replicas == 0:
        return ""
    return f"replicas={replicas} must divide the d{spec.d} of {spec}; replicas of {listed(divisors(spec.d))} fits"


def divisors(number: int) -> list[int]:
    """In ascending order."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def listed(numbers: list[int]) -> str:
    """As in `1, 2 or 4`."""
    *before, last = map(str, numbers)
    return f"{', '.join(before)} or {last}" if before else last


def _bounded(text: str, spec: BackendSpec) -> BackendSpec:
    if spec.size > MOST_PROCESSES:
        raise ConfigError(f"{text!r} takes {spec.size} processes; {MOST_PROCESSES} of one net is the most")
    return spec


def _sizes(text: str, name: str, dimensions: str, known: str) -> dict[str, int]:
    """The sizes that are written. Raises ConfigError for a letter that is not known, unless its size is 1."""
    found = _DIMENSION.findall(dimensions)
    sizes = {letter: int(size) for letter, size in found}
    written = "".join(letter + size for letter, size in found)
    if not found or written != dimensions or len(sizes) != len(found) or 0 in sizes.values():
        raise ConfigError(f"{text!r}: after the colon stand sizes of at least 1, each letter once, as in {name}:d2")
    strange = [letter for letter, size in sizes.items() if letter not in known and size > 1]
    strange += [letter for letter in sizes if letter not in "dtpce"]
    if strange:
        raise ConfigError(
            f"{text!r}: {name} knows {', '.join(known)} only, not {', '.join(dict.fromkeys(strange))}; "
            + ("archon: has all of d, t, p, c, e" if name == "fsdp" else "leave the others out")
        )
    return sizes
