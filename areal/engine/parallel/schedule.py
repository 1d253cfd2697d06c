"""Who does what when in a pipeline: 1F1B, and interleaved where a process has several stages (arXiv:2104.04473).

    orders = schedule(ranks=4, chunks=1, micro_batches=8)     # per rank: Forward and Backward in the order they are done

Stage k of ranks * chunks lies on rank k mod ranks, as its chunk k div ranks. A rank goes forward until those behind it have work, then takes turns, so
that at most about ranks * chunks micro-batches' activations are kept, however many there are. Every rank derives the same table. With several
stages per rank micro-batches come in rounds of `ranks`. Pure; pipeline.py carries it out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from areal.base.errors import ShapeError


@dataclass(frozen=True, slots=True)
class Forward:
    """Of one micro-batch through one of this rank's stages."""

    chunk: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Backward:
    chunk: int
    micro_batch: int


Step = Forward | Backward


def schedule(ranks: int, chunks: int, micro_batches: int) -> list[list[Step]]:
    """One order per rank. Raises ShapeError for a broken round: then ranks would wait for each other; fill it up with empty micro-batches."""
    if chunks > 1 and micro_batches % ranks:
        raise ShapeError(f"{micro_batches} micro-batches do not make whole rounds of {ranks}; add empty ones")
    return [_order(rank, ranks, chunks, micro_batches) for rank in range(ranks)]


def _order(rank: int, ranks: int, chunks: int, micro_batches: int) -> list[Step]:
    forwards = [Forward(*each) for each in _rounds(ranks, range(chunks), micro_batches)]
    backwards = [Backward(*each) for each in _rounds(ranks, range(chunks - 1, -1, -1), micro_batches)]
    ahead = ranks - rank - 1 if chunks == 1 else 2 * (ranks - rank - 1) + (chunks - 1) * ranks
    ahead = min(ahead, len(forwards))
    order: list[Step] = list(forwards[:ahead])
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - ahead :]


def _rounds(ranks: int, chunks: range, micro_batches: int) -> Iterator[tuple[int, int]]:
    """`ranks` micro-batches go through one chunk, then through the next, and so on."""
    for first in range(0, micro_batches, ranks):
        for chunk in chunks:
            for micro_batch in range(first, min(first + ranks, micro_batches)):
                yield chunk, micro_batch


def stage_layers(layers: int, stages: int) -> list[range]:
    """Which layers each stage has: all within one of each other, the first and the last among the smaller, for they have the vocabulary too."""
    extra = layers % stages
    from_the_middle = sorted(range(stages), key=lambda stage: (abs(2 * stage - (stages - 1)), stage))
    larger = set(from_the_middle[:extra])
    ends = [0]
    for stage in range(stages):
        ends.append(ends[-1] + layers // stages + (stage in larger))
    return [range(start, end) for start, end in pairwise(ends)]
