"""Packing: rows of any length become micro-batches without padding, and a shared prefix is computed once.

    rows = loss_weights(rows, "token_mean")
    for packed in pack(rows, max_tokens=4096): ...

The rows of a micro-batch form a forest: every distinct prefix is one node (one forwarded token) with its depth as position.
Samples of one group share their prompt, turns of one session their history, so each is forwarded once; rows that share nothing
become plain packed sequences. A token sees its ancestors and itself only. A node that several rows go on from predicts
several next tokens: predictions are (source node, target id) pairs, one per trained token of each row.

Attention runs over blocks of queries, each against just the keys that one of its queries may see (model.py): cost
follows the forest, not the square of the micro-batch. What comes after a row's last prediction is not forwarded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal.base.errors import TrainingError
from areal.base.types import FloatArray
from areal.engine.rows import RowArrays

BLOCK = 256
"""Most queries of one attention block; a compromise of mask size and number of kernel calls, measured on 2 cores."""

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Queries start:end of the packed tokens and the keys they may see.

    keys: a slice where contiguous, else indices [k]. mask: bool [end - start, k], True = may see."""

    start: int
    end: int
    keys: slice | Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One micro-batch: n forwarded tokens (ids, positions: int64 [n]) and m predictions (all [m]).

    source: packed token that predicts. target: id predicted. row, position: which trained token this is, in the rows given to
    `pack`. interaction: a number shared by the tokens of one sampled answer. The rest are that token's own numbers; None where
    its rows have none. shared_by [n]: how many rows go through each forwarded token, 0 for one that no row needs. row_tokens: tokens of its rows if each were forwarded by itself."""

    ids: Tensor
    positions: Tensor
    blocks: tuple[QueryBlock, ...]
    shared_by: Tensor
    source: Tensor
    target: Tensor
    row: Indices
    position: Indices
    temperature: Tensor
    behaviour: Tensor
    advantages: Tensor
    weight: Tensor
    interaction: Tensor
    version: Tensor
    proximal: Tensor | None
    reference: Tensor | None
    teacher: Tensor | None
    row_tokens: int

    def to(self, device: torch.device) -> PackedBatch:
        """The same on another device."""
        blocks = tuple(
            replace(b, mask=b.mask.to(device), keys=b.keys if isinstance(b.keys, slice) else b.keys.to(device))
            for b in self.blocks
        )
        moved: dict[str, Any] = {
            name: getattr(self, name).to(device)
            for name in self.__dataclass_fields__
            if isinstance(getattr(self, name), Tensor)
        }
        return replace(self, blocks=blocks, **moved)


def loss_weights(rows: Sequence[RowArrays], aggregation: str, *, fixed_length: int = 0) -> list[RowArrays]:
    """The rows of one optimizer step, each with `weight` [n]: 0 where not trained.

    token_mean: every trained token weighs the same. sequence_mean: every session (`sequence`) weighs the same, its trained tokens
    share that; in both the sum over all rows is 1. fixed_length: every token weighs 1 / (sessions * fixed_length), whatever
    the lengths are. The denominator covers the whole optimizer step, so neither micro-batches nor the number of rows a session
    was split into changes anything. Raises TrainingError if there is no trained token."""
    tokens: Counter[int] = Counter()
    for row in rows:
        tokens[row.sequence] += int(row.trained.sum())
    total = sum(tokens.values())
    if total == 0:
        raise TrainingError("this optimizer step has no trained token; check the masks of its sessions")
    sequences = sum(count > 0 for count in tokens.values())
    denominators: dict[str, Callable[[RowArrays], int]] = {
        "token_mean": lambda _: total,
        "sequence_mean": lambda row: sequences * max(1, tokens[row.sequence]),
        "fixed_length": lambda _: sequences * fixed_length,
    }
    denominator = denominators[aggregation]
    return [replace(row, weight=(row.trained / denominator(row)).astype(np.float32)) for row in rows]


def pack(rows: Sequence[RowArrays], *, max_tokens: int, share_prefixes: bool = True) -> Iterator[PackedBatch]:
    """Micro-batches of at most max_tokens forwarded tokens (a longer row gets one of its own); rows without a trained
    token are left out. share_prefixes False: every row by itself, for comparison."""
    numbered = [(number, row) for number, row in enumerate(rows) if row.trained.any()]
    # Big-endian bytes order like the ids: rows with a common prefix become neighbours, a prefix before its extensions.
    numbered.sort(key=lambda item: (_inputs(item[1]).astype(">u4").tobytes(), item[0]))
    forest = _Forest()
    for number, row in numbered:
        shared = forest.shared_with_last(row) if share_prefixes else 0
        if forest.size and forest.size + len(_inputs(row)) - shared > max_tokens:
            yield forest.packed()
            forest, shared = _Forest(), 0
        forest.add(number, row, shared)
    if forest.rows:
        yield forest.packed()


def row_tokens(rows: Sequence[RowArrays]) -> int:
    """Tokens of the rows that are trained on, as far as they are forwarded and each by itself: however they are packed."""
    return sum(len(_inputs(row)) for row in rows if row.trained.any())


def empty_batch() -> PackedBatch:
    """A micro-batch that predicts nothing: one token goes through the net, so that a process without rows takes part in what all do together."""
    none = torch.zeros(0)
    return PackedBatch(
        ids=torch.zeros(1, dtype=torch.long),
        positions=torch.zeros(1, dtype=torch.long),
        blocks=(QueryBlock(0, 1, slice(0, 1), torch.ones(1, 1, dtype=torch.bool)),),
        shared_by=torch.zeros(1),
        source=none.long(),
        target=none.long(),
        row=np.zeros(0, np.int64),
        position=np.zeros(0, np.int64),
        temperature=none,
        behaviour=none,
        advantages=none,
        weight=none,
        interaction=none.long(),
        version=none.long(),
        proximal=none,
        reference=none,
        teacher=none,
        row_tokens=0,
    )


def _inputs(row: RowArrays) -> npt.NDArray[np.int32]:
    """What has to be forwarded: everything before the last trained token."""
    return row.ids[: len(row.ids) - int(row.trained[::-1].argmax()) - 1]


class _Forest:
    """Builds one PackedBatch from rows in lexicographic order: then the last row has the longest prefix in common."""

    def __init__(self) -> None:
        self.size = 0
        self.rows: list[tuple[int, RowArrays]] = []
        self.paths: list[Indices] = []  # per row: packed index of each of its input tokens
        self.shared: list[int] = []  # per row: how many of them it found there

    def shared_with_last(self, row: RowArrays) -> int:
        if not self.rows:
            return 0
        ours, last = _inputs(row), _inputs(self.rows[-1][1])
        length = min(len(ours), len(last))
        differs = np.flatnonzero(ours[:length] != last[:length])
        return int(differs[0]) if len(differs) else length

    def add(self, number: int, row: RowArrays, shared: int) -> None:
        new = len(_inputs(row)) - shared
        before = self.paths[-1][:shared] if shared else np.zeros(0, dtype=np.int64)
        self.paths.append(np.concatenate([before, np.arange(self.size, self.size + new)]))
        self.rows.append((number, row))
        self.shared.append(shared)
        self.size += new

    def packed(self) -> PackedBatch:
        ids = np.concatenate([_inputs(row)[s:] for (_, row), s in zip(self.rows, self.shared, strict=True)])
        depths = np.concatenate([np.arange(s, len(p)) for p, s in zip(self.paths, self.shared, strict=True)])
        at = [np.flatnonzero(row.trained) for _, row in self.rows]

        def gathered(values: Sequence[npt.NDArray[Any]], dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(np.concatenate([v[t] for v, t in zip(values, at, strict=True)])).to(dtype)

        def optional(values: Sequence[FloatArray | None]) -> Tensor | None:
            given = [each for each in values if each is not None]
            return gathered(given, torch.float32) if len(given) == len(values) else None

        rows = [row for _, row in self.rows]
        counts = [len(t) for t in at]
        answers = [np.zeros(len(row.ids), np.int64) if row.interactions is None else row.interactions for row in rows]
        return PackedBatch(
            ids=torch.from_numpy(ids).long(),
            positions=torch.from_numpy(depths).long(),
            blocks=tuple(self._blocks()),
            shared_by=torch.from_numpy(np.bincount(np.concatenate(self.paths), minlength=self.size)).float(),
            source=torch.from_numpy(np.concatenate([p[t - 1] for p, t in zip(self.paths, at, strict=True)])),
            target=gathered([row.ids for row in rows], torch.long),
            row=np.repeat([number for number, _ in self.rows], counts),
            position=np.concatenate(at),
            temperature=gathered([row.temperatures for row in rows], torch.float32),
            behaviour=gathered([row.logprobs for row in rows], torch.float32),
            advantages=gathered([row.advantages for row in rows], torch.float32),
            weight=gathered(
                [np.zeros(len(row.ids)) if row.weight is None else row.weight for row in rows], torch.float32
            ),
            interaction=torch.from_numpy(np.repeat(np.arange(len(rows)), counts) << 32) + gathered(answers, torch.long),
            version=gathered([row.versions for row in rows], torch.long),
            proximal=optional([row.proximal for row in rows]),
            reference=optional([row.reference for row in rows]),
            teacher=optional([row.teacher for row in rows]),
            row_tokens=sum(len(path) for path in self.paths),
        )

    def _blocks(self) -> Iterator[QueryBlock]:
        pieces: list[tuple[Indices, int, int]] = []  # (path, first and last depth of its queries)
        queries = 0
        for path, shared in zip(self.paths, self.shared, strict=True):
            for first in range(shared, len(path), BLOCK):
                last = min(first + BLOCK, len(path))
                if queries and queries + last - first > BLOCK:
                    yield _block(pieces)
                    pieces, queries = [], 0
                pieces.append((path, first, last))
                queries += last - first
        if pieces:
            yield _block(pieces)


def _block(pieces: Sequence[tuple[Indices, int, int]]) -> QueryBlock:
    start = int(pieces[0][0][pieces[0][1]])
    keys = np.unique(np.concatenate([path[:last] for path, _, last in pieces]))
    queries = sum(last - first for _, first, last in pieces)
    mask = np.zeros((queries, len(keys)), dtype=np.bool_)
    done = 0
    for path, first, last in pieces:
        visible = np.arange(last)[None, :] <= np.arange(first, last)[:, None]
        mask[done : done + last - first, np.searchsorted(keys, path[:last])] = visible
        done += last - first
    contiguous = int(keys[-1]) - int(keys[0]) + 1 == len(keys)
    where = slice(int(keys[0]), int(keys[-1]) + 1) if contiguous else torch.from_numpy(keys)
    return QueryBlock(start, start + queries, where, torch.from_numpy(mask))
