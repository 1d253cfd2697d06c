"""One forward pass over a plan: its input tokens, and attention over rows and prompts.

    batch = Batch(plan, cache, config, device)
    hidden = net.forward(batch.ids, batch.positions, batch.attend)
    logits = net.logits(hidden[batch.sampling_rows])      # of batch.sampling, in that order

Tokens lie one behind the other without padding: decoding sequences first, bank by bank in the order of their rows, then the
chunks. Decoding attends once per bank over a plain slice of its storage; a chunk attends on its own (its work outweighs
the call). Neighbours: kv_cache.py, scheduler.py.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from areal.inference.native.kv_cache import Bank, KvCache, SequenceKv
from areal.inference.native.scheduler import Chunk, Plan, Sequence
from areal.models.dense_config import DenseConfig

_MASK_STEP = 8  # columns: kernels want aligned masks


class _Decode:
    """Rows first..last of one bank. Their tokens are the batch's at begin..end."""

    __slots__ = ("bank", "begin", "end", "first", "keys", "mask", "positions", "rows")

    def __init__(
        self, bank: Bank, rows: list[SequenceKv], begin: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        positions = [kv.length for kv in rows]
        self.bank = bank
        self.first = rows[0].row
        self.begin, self.end = begin, begin + len(rows)
        self.rows = torch.arange(self.first, self.first + len(rows), device=device)
        self.positions = torch.tensor(positions, device=device)
        self.keys = max(positions) + 1
        self.mask: Tensor | None = None
        if min(positions) != max(positions):
            self.keys = min(-(-self.keys // _MASK_STEP) * _MASK_STEP, bank.capacity)
            beyond = torch.arange(self.keys, device=device) > self.positions[:, None]
            self.mask = torch.zeros(beyond.shape, dtype=dtype, device=device).masked_fill_(beyond, -torch.inf)
            self.mask = self.mask[:, None, None, :]


class Batch:
    """See the module's docstring. Built inside inference_mode, used for one forward pass."""

    def __init__(
        self, plan: Plan, cache: KvCache, config: DenseConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        owner = {s.kv: s for s in plan.decode if s.kv is not None}
        for kv in owner:
            cache.make_room(kv)
        self._decodes: list[_Decode] = []
        self._chunks: list[tuple[Chunk, int, Tensor | None]] = []  # with where its tokens begin, and its mask
        self.sampling: list[Sequence] = []
        ids: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
        positions: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        self.tokens = 0
        for bank in cache.banks:
            rows = [kv for kv in bank.rows if kv in owner]
            if rows:
                self._decodes.append(_Decode(bank, rows, self.tokens, dtype, device))
                sequences = [owner[kv] for kv in rows]
                ids.append(np.array([s.tokens[s.length - 1] for s in sequences], np.int32))
                positions.append(np.array([s.length - 1 for s in sequences]))
                self.sampling += sequences
                self.tokens += len(rows)
        sampling_rows = list(range(self.tokens))
        for chunk in plan.chunks:
            self._chunks.append((chunk, self.tokens, _chunk_mask(chunk, dtype, device)))
            ids.append(chunk.sequence.tokens[chunk.start : chunk.end])
            positions.append(np.arange(chunk.start, chunk.end))
            self.tokens += chunk.end - chunk.start
            if chunk.last:
                self.sampling.append(chunk.sequence)
                sampling_rows.append(self.tokens - 1)
        self.ids = torch.from_numpy(np.concatenate(ids).astype(np.int64)).to(device)
        self.positions = torch.from_numpy(np.concatenate(positions)).to(device)
        self.sampling_rows = torch.tensor(sampling_rows, device=device)

    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """See models/dense.py: Attend."""
        if len(self._decodes) == 1 and not self._chunks:
            return self._decode(self._decodes[0], layer, q, kv)
        out = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
        for part in self._decodes:
            out[part.begin : part.end] = self._decode(part, layer, q[part.begin : part.end], kv[part.begin : part.end])
        for chunk, begin, mask in self._chunks:
            end = begin + chunk.end - chunk.start
            out[begin:end] = self._prefill(chunk, mask, layer, q[begin:end], kv[begin:end])
        return out

    def advance(self) -> None:
        """After the forward pass: the KV of every token in it is there."""
        for part in self._decodes:
            for kv in part.bank.rows[part.first : part.first + part.end - part.begin]:
                kv.length += 1
        for chunk, _, _ in self._chunks:
            assert chunk.sequence.kv is not None
            chunk.sequence.kv.length = chunk.end

    def _decode(self, part: _Decode, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        storage = part.bank.storage[layer]
        storage[part.rows, :, part.positions] = kv
        held = storage[part.first : part.first + len(q), :, : part.keys]
        kv_heads = self._config.kv_heads
        keys, values = held[:, :kv_heads], held[:, kv_heads:]
        if q.device.type == "cpu":  # its kernel reads grouped heads in place
            out = F.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=part.mask, enable_gqa=True)
        else:  # the heads of a group as query positions: every fused kernel takes that
            grouped = q.view(len(q), self._config.kv_heads, -1, self._config.head_dim)
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=part.mask)
        return out.reshape(len(q), -1)

    def _prefill(self, chunk: Chunk, mask: Tensor | None, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        assert chunk.sequence.kv is not None
        assert chunk.sequence.kv.own is not None
        held = chunk.sequence.kv.own[layer]
        held[:, chunk.start : chunk.end] = kv.transpose(0, 1)
        kv_heads = self._config.kv_heads
        keys, values = held[None, :kv_heads, : chunk.end], held[None, kv_heads:, : chunk.end]
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return out[0].transpose(0, 1).reshape(len(q), -1)


def _chunk_mask(chunk: Chunk, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """[end - start, end]: each token sees itself and all before. None where plain causality says the same."""
    if chunk.start == 0:
        return None
    columns = torch.arange(chunk.end, device=device)
    beyond = columns > torch.arange(chunk.start, chunk.end, device=device)[:, None]
    return torch.zeros(beyond.shape, dtype=dtype, device=device).masked_fill_(beyond, -torch.inf)
