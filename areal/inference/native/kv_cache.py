"""Where keys and values of running sequences lie: rows of a few tensors, so that attention needs no gathering.

    kv = cache.new(prompt_tokens)                  # one sequence's own tensor, filled by chunked prefill
    cache.start_decoding(sequence_kv)              # into a row of the bank of its size class
    cache.free(sequence_kv)

A bank holds rows of one capacity (128, 256, 512, ... tokens). Its decoding sequences always occupy rows 0..n-1, so one
decode step attends over a plain slice, padded by less than twice. A sequence that outgrows its row moves to the next bank, a finished one is
replaced by the last row: copies that cost a thousandth of computing the same tokens. Everything in here belongs to one
weight version; `reset` forgets it all (settled 7). Neighbour: prefix_cache.py, what outlives a request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal.models.dense_config import DenseConfig

_SMALLEST_ROW = 128  # tokens
_FEWEST_ROWS = 4


class SequenceKv:
    """The KV of one sequence: its own tensor while it prefills, a row of a bank while it decodes."""

    __slots__ = ("bank", "length", "own", "row")

    def __init__(self, own: Tensor) -> None:
        self.own: Tensor | None = own  # [layers, 2 * kv_heads, prompt tokens, head_dim]
        self.bank: Bank | None = None
        self.row = -1
        self.length = 0  # tokens whose KV is there

    def view(self) -> Tensor:
        """[layers, 2 * kv_heads, >= length, head_dim]"""
        if self.own is not None:
            return self.own
        assert self.bank is not None
        return self.bank.storage[:, self.row]


class Bank:
    """Rows of `capacity` tokens. storage [layers, rows, 2 * kv_heads, capacity, head_dim]; rows 0..len(rows)-1 are used.

    Storage begins as zeros: what lies beyond a row's length is masked, but a NaN there would survive the mask."""

    def __init__(self, cache: KvCache, capacity: int) -> None:
        self._cache = cache
        self.capacity = capacity
        self.rows: list[SequenceKv] = []
        self.storage = cache.zeros(0, capacity)

    def add(self, kv: SequenceKv) -> None:
        """Copy `kv` into the next row and let go of where it was."""
        row = len(self.rows)
        if row == self.storage.shape[1]:
            self._resize(max(_FEWEST_ROWS, 2 * row))
        self.storage[:, row, :, : kv.length] = kv.view()[:, :, : kv.length]
        if kv.bank is not None:
            kv.bank.remove(kv)
        kv.own, kv.bank, kv.row = None, self, row
        self.rows.append(kv)

    def remove(self, kv: SequenceKv) -> None:
        """Free a row: the last one takes its place."""
        last = self.rows.pop()
        if last is not kv:
            self.storage[:, kv.row, :, : last.length] = self.storage[:, last.row, :, : last.length]
            self.rows[kv.row] = last
            last.row = kv.row
        kv.bank, kv.row = None, -1
        if len(self.rows) <= self.storage.shape[1] // 4:
            self._resize(2 * len(self.rows))

    def scrub(self, kv: SequenceKv) -> None:
        """Zero a row that holds NaN, so that they cannot reach the row's next owner through a mask."""
        self.storage[:, kv.row].zero_()

    def _resize(self, rows: int) -> None:
        smaller = self.storage
        self.storage = self._cache.zeros(rows, self.capacity)
        used = len(self.rows)
        longest = max((kv.length for kv in self.rows), default=0)
        self.storage[:, :used, :, :longest] = smaller[:, :used, :, :longest]


class KvCache:
    """All banks. Budgeting is the scheduler's. One owner, the engine's thread."""

    def __init__(self, config: DenseConfig, *, max_context: int, dtype: torch.dtype, device: torch.device) -> None:
        self._layers, self._kv_rows, self._head_dim = config.layers, 2 * config.kv_heads, config.head_dim
        self._max_context = max_context
        self._dtype = dtype
        self._device = device
        self._banks: dict[int, Bank] = {}

    @property
    def banks(self) -> list[Bank]:
        """Those with decoding sequences, smallest rows first."""
        return [bank for _, bank in sorted(self._banks.items()) if bank.rows]

    def new(self, tokens: int) -> SequenceKv:
        """Room for a sequence of `tokens` tokens about to be prefilled."""
        shape = (self._layers, self._kv_rows, tokens, self._head_dim)
        return SequenceKv(torch.empty(shape, dtype=self._dtype, device=self._device))

    def start_decoding(self, kv: SequenceKv) -> None:
        """Give a prefilled sequence a row that has room for at least one more token."""
        self._bank(kv.length + 1).add(kv)

    def make_room(self, kv: SequenceKv) -> None:
        """Before a decode step: move a full row to the next larger bank."""
        assert kv.bank is not None
        if kv.length == kv.bank.capacity:
            self._bank(kv.length + 1).add(kv)

    def free(self, kv: SequenceKv, *, poisoned: bool = False) -> None:
        """Let go of a sequence's KV. poisoned: it holds NaN."""
        kv.own = None
        if kv.bank is not None:
            if poisoned:
                kv.bank.scrub(kv)
            kv.bank.remove(kv)

    def reset(self) -> None:
        """Forget everything, at a swap of the weights. SequenceKv handed out before are void; their memory is free at once."""
        for bank in self._banks.values():
            for kv in bank.rows:
                kv.bank = None  # else only the cycle collector would free the two, some swaps later
        self._banks.clear()

    def zeros(self, rows: int, capacity: int) -> Tensor:
        """Storage of a bank. On the CPU untouched zeros cost no memory."""
        shape = (self._layers, rows, self._kv_rows, capacity, self._head_dim)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def _bank(self, tokens: int) -> Bank:
        capacity = _SMALLEST_ROW
        while capacity < tokens:
            capacity *= 2
        capacity = min(capacity, -(-self._max_context // 8) * 8)  # whole groups of 8: kernels want aligned masks
        if capacity not in self._banks:
            self._banks[capacity] = Bank(self, capacity)
        return self._banks[capacity]
