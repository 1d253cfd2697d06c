"""The numbers of one training step, summed over its micro-batches.

    stats = StepStats(current_version=3, rows=64, trained_tokens=900)
    stats.add_micro_batch(packed, inputs, loss, loss_stats, at_start); stats.add_update(grad_norm)
    stats.result(seconds=0.4, lr=1e-6)                    # commands.Stepped

loss and the losses' own stats are weighted sums over each mini-batch, averaged over the mini-batches; names that end in `_max` are
maxima, in `_min` minima. Used by engine.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean

import msgspec
from torch import Tensor

from areal.algorithms import LossInputs
from areal.engine.batch import PackedBatch
from areal.engine.parallel.world import World

ALWAYS = ("loss", "entropy", "clip_ratio", "dual_clip_ratio", "approx_kl", "behave_weight_mean", "rejected_ratio")
"""There in every step, 0 where the algorithm knows no such thing; others come with what they count (ref_kl)."""


class _Seen(msgspec.Struct, frozen=True, array_like=True):
    """What one rank saw."""

    sums: dict[str, float]
    maxima: dict[str, float]
    counts: tuple[int, int, int]
    gap_sum: float


_decoder = msgspec.msgpack.Decoder(_Seen)


class StepStats:
    """One training step; see the module's docstring."""

    def __init__(self, current_version: int, rows: int, trained_tokens: int) -> None:
        self.current_version = current_version
        self.rows = rows
        self.trained_tokens = trained_tokens
        self.updated_rows = 0
        self.computed_tokens = 0
        self.screened_tokens = 0
        self.weight_total = 1.0  # of the mini-batch at hand: stats are means even where the loss's weights are not
        self._row_tokens = 0
        self.updates = 0
        self._grad_norm = 0.0
        self._balance: dict[str, list[float]] = defaultdict(list)
        self._sums: dict[str, Tensor | float] = {}
        self._maxima: dict[str, float] = defaultdict(float)
        self._gap_sum = 0.0
        self._gap_tokens = 0

    def add_micro_batch(
        self,
        packed: PackedBatch,
        inputs: LossInputs,
        loss: Tensor,
        loss_stats: dict[str, Tensor],
        at_start: Tensor | None,
    ) -> None:
        """at_start [m]: log-probs under the weights at the start of the step, where they are known."""
        self.computed_tokens += len(packed.ids)
        self._row_tokens += packed.row_tokens
        self._add("loss", loss)
        for name, value in loss_stats.items():
            if name.endswith("_max"):
                self._maxima[name] = max(self._maxima[name], float(value))
            else:
                self._add(name, value / self.weight_total)
        if at_start is None:
            return
        gap = (at_start - inputs.behaviour).abs()[packed.version == self.current_version]
        if len(gap):
            self._maxima["logprob_gap_max"] = max(self._maxima["logprob_gap_max"], float(gap.max()))
            self._gap_sum += float(gap.sum())
            self._gap_tokens += len(gap)

    def _add(self, name: str, value: Tensor) -> None:
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def add_update(self, grad_norm: float, balance: Mapping[str, float]) -> None:
        """balance: of the experts, the same on every rank (balance.py)."""
        self.updates += 1
        self._grad_norm = max(self._grad_norm, grad_norm)
        for name, value in balance.items():
            self._balance[name].append(value)

    def gather(self, world: World) -> None:
        """Add what the other ranks saw of the batch; the same on all of them afterwards. Only what `world.counts` may have been added."""
        own = _Seen(
            sums={name: float(total) for name, total in self._sums.items()},
            maxima=dict(self._maxima),
            counts=(self.computed_tokens, self._row_tokens, self._gap_tokens),
            gap_sum=self._gap_sum,
        )
        every = [_decoder.decode(message) for message in world.gather(msgspec.msgpack.encode(own))]
        names = dict.fromkeys(name for each in every for name in each.sums)
        self._sums = {name: math.fsum(each.sums.get(name, 0.0) for each in every) for name in names}
        self._maxima = defaultdict(
            float, {name: max(each.maxima.get(name, 0.0) for each in every) for each in every for name in each.maxima}
        )
        self.computed_tokens, self._row_tokens, self._gap_tokens = (
            sum(column) for column in zip(*(each.counts for each in every), strict=True)
        )
        self._gap_sum = math.fsum(each.gap_sum for each in every)

    def result(self, *, seconds: float, lr: float) -> dict[str, float]:
        means = dict.fromkeys(ALWAYS, 0.0)
        means |= {name: float(total) / max(1, self.updates) for name, total in self._sums.items()}
        for name, values in self._balance.items():
            combine = max if name.endswith("_max") else min if name.endswith("_min") else fmean
            means[name] = combine(values)
        return means | {
            "behave_weight_max": self._maxima["behave_weight_max"],
            "grad_norm": self._grad_norm,
            "lr": lr,
            "updates": float(self.updates),
            "rows": float(self.rows),
            "skipped_rows": float(self.rows - self.updated_rows),
            "trained_tokens": float(self.trained_tokens),
            "computed_tokens": float(self.computed_tokens),
            "row_tokens": float(self._row_tokens),
            "screened_tokens": float(self.screened_tokens),
            "logprob_gap_max": self._maxima["logprob_gap_max"],
            "logprob_gap_mean": self._gap_sum / max(1, self._gap_tokens),
            "logprob_gap_tokens": float(self._gap_tokens),
            "seconds": seconds,
        }
