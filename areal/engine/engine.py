"""The training engine of one rank: rows in, one training step on the policy, stats out.

    engine = TrainEngine.load(settings)
    stats = engine.train_step(rows, step=3, current_version=3)
    for name, tensor in engine.named_tensors(): ...            # for the weights source
    engine.save(path, step=3, full=True); engine.restore(path)

A step is one or more optimizer mini-batches (whole sessions), each packed into micro-batches (batch.py) whose losses add up. The proximal
policy is the one at the start of the step: with a single mini-batch its log-probs are those of the same forward pass, detached; with
several they are computed once, before the first update. A mini-batch in which every advantage is 0 has nothing to say: no optimizer
step, weights and moments stay as they are. Single-threaded; worker.py is its process.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from areal.algorithms import ALGORITHMS, LossInputs, LossSettings
from areal.base.errors import ConfigError, TrainingError
from areal.base.types import FloatArray
from areal.engine import checkpoint
from areal.engine.batch import PackedBatch, loss_weights, pack
from areal.engine.commands import Row
from areal.engine.model import PolicyNet, load_policy
from areal.engine.optimizer import Optimizer
from areal.engine.rows import RowArrays, decode_row
from areal.engine.settings import EngineSettings


class TrainEngine:
    """One policy, its optimizer and its algorithm. Not thread-safe: one command at a time."""

    def __init__(self, policy: PolicyNet, settings: EngineSettings) -> None:
        if settings.algorithm not in ALGORITHMS:
            raise ConfigError(f"no algorithm {settings.algorithm!r}; known: {', '.join(sorted(ALGORITHMS))}")
        self.policy = policy
        self.settings = settings
        self._algorithm = ALGORITHMS[settings.algorithm]
        self._loss_settings = LossSettings(
            eps_clip=settings.eps_clip,
            eps_clip_higher=settings.eps_clip if settings.eps_clip_higher is None else settings.eps_clip_higher,
            c_clip=settings.c_clip,
            use_decoupled_loss=settings.use_decoupled_loss,
            behave_imp_weight_cap=settings.behave_imp_weight_cap,
        )
        self._optimizer = Optimizer(policy.named_parameters(), settings.optimizer, total_steps=settings.total_steps)

    @classmethod
    def load(cls, settings: EngineSettings) -> Self:
        """Sets this process's torch threads, seed and determinism, then loads the model."""
        torch.set_num_threads(settings.threads)
        torch.manual_seed(settings.seed)
        torch.use_deterministic_algorithms(settings.deterministic)
        policy = load_policy(
            settings.model_dir, dtype=settings.dtype, gradient_checkpointing=settings.gradient_checkpointing
        )
        return cls(policy, settings)

    @torch.no_grad()
    def score(self, rows: Sequence[Row]) -> list[FloatArray]:
        """The current policy's log-probs, one array [n] per row, 0 where not trained."""
        return self._score(self._decoded(rows))

    def train_step(self, rows: Sequence[Row], step: int, current_version: int) -> dict[str, float]:
        """Train on these rows; returns the stats (commands.Stepped). current_version: label of the weights at the start.

        Raises TrainingError naming the session whose numbers are not finite; the mini-batch at fault is not applied."""
        started = time.monotonic()
        arrays = self._decoded(rows)
        mini_batches = [loss_weights(part, self.settings.loss_aggregation) for part in self._mini_batches(arrays)]
        stats = _StepStats(current_version, len(arrays), sum(int(row.trained.sum()) for row in arrays))
        kept = [[row for row in part if not self._skippable(row)] for part in mini_batches]
        if len(kept) > 1:
            kept = self._with_proximal(kept, stats)
        for part in kept:
            self._mini_batch(part, step, stats)
        return stats.result(seconds=time.monotonic() - started, lr=self._optimizer.lr(step))

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Current weights in Hugging Face names, tied ones once, not copied."""
        return self.policy.named_tensors()

    def save(self, path: str, step: int, *, full: bool) -> None:
        """Write a checkpoint folder, complete or not at all; full: with what `restore` needs to go on bit-equal."""
        recovery = None
        if full:
            tensors = self._optimizer.state_tensors() | {"rng.torch": torch.get_rng_state()}
            recovery = checkpoint.Recovery(tensors, {"step": step, "optimizer_steps": self._optimizer.steps})
        checkpoint.save(path, self.policy, self.settings.model_dir, recovery)

    @torch.no_grad()
    def restore(self, path: str) -> dict[str, Any]:
        """Take weights and state from a full checkpoint; returns its facts (`step`, `optimizer_steps`)."""
        recovery = checkpoint.load(path, self.policy)
        if recovery is None:
            raise ConfigError(f"{path} has no recovery state; resume from a checkpoint that was saved with it")
        tensors = dict(recovery.tensors)
        torch.set_rng_state(tensors.pop("rng.torch"))
        self._optimizer.load_state_tensors(tensors, steps=int(recovery.facts["optimizer_steps"]))
        return dict(recovery.facts)

    def _decoded(self, rows: Sequence[Row]) -> list[RowArrays]:
        vocabulary = self.policy.head.weight.shape[0]
        arrays = [decode_row(row) for row in rows]
        for row in arrays:
            strange = row.ids[(row.ids < 0) | (row.ids >= vocabulary)]
            if len(strange):
                raise TrainingError(
                    f"session {row.session_id}: token id {int(strange[0])} is none of the model's {vocabulary} tokens; what "
                    "generates must have the vocabulary of actor.path (a scripted backend: settings.vocabulary)"
                )
        return arrays

    def _skippable(self, row: RowArrays) -> bool:
        return not row.trained.any() or (self._algorithm.drop_zero and not row.advantages[row.trained].any())

    def _mini_batches(self, rows: Sequence[RowArrays]) -> list[list[RowArrays]]:
        """Whole sessions, mini_batch_size at a time, in batch order."""
        sequences = list(dict.fromkeys(row.sequence for row in rows if row.trained.any()))
        size = self.settings.mini_batch_size or max(1, len(sequences))
        parts = [set(sequences[start : start + size]) for start in range(0, len(sequences), size)]
        if not parts:
            raise TrainingError("the batch has no trained token; check the masks of its sessions")
        return [[row for row in rows if row.sequence in part] for part in parts]

    def _packs(self, rows: Sequence[RowArrays]) -> Iterator[PackedBatch]:
        return pack(rows, max_tokens=self.settings.max_tokens_per_mb)

    def _score(self, rows: Sequence[RowArrays]) -> list[FloatArray]:
        scored = [np.zeros(len(row.ids), dtype=np.float32) for row in rows]
        for packed in self._packs(rows):
            logprobs, _ = self.policy.logprobs(packed)
            values = logprobs.cpu().numpy()
            for number in np.unique(packed.row):
                own = packed.row == number
                scored[number][packed.position[own]] = values[own]
        return scored

    def _with_proximal(self, parts: list[list[RowArrays]], stats: _StepStats) -> list[list[RowArrays]]:
        with torch.no_grad():
            rows = [row for part in parts for row in part]
            missing = [row for row in rows if row.proximal is None]
            stats.computed_tokens += sum(len(packed.ids) for packed in self._packs(missing))
            fresh = iter(self._score(missing))
        return [
            [row if row.proximal is not None else replace(row, proximal=next(fresh)) for row in part] for part in parts
        ]

    def _mini_batch(self, rows: Sequence[RowArrays], step: int, stats: _StepStats) -> None:
        if not any(row.advantages[row.trained].any() for row in rows):
            return
        stats.updated_rows += len(rows)
        try:
            for packed in self._packs(rows):
                self._micro_batch(packed, rows, stats)
        except BaseException:
            self._optimizer.zero_grad()
            raise
        applied = self._optimizer.step(step)
        if applied is None:
            raise TrainingError(
                f"{self._blame(rows)}; the step was not applied. Exclude the session or lower actor.optimizer.lr"
            )
        stats.add_update(applied.grad_norm)

    def _micro_batch(self, packed: PackedBatch, rows: Sequence[RowArrays], stats: _StepStats) -> None:
        logprobs, entropy = self.policy.logprobs(packed)
        finite = torch.isfinite(logprobs.detach())
        if not finite.all():
            slot = int((~finite).nonzero()[0, 0])
            session = rows[int(packed.row[slot])].session_id
            raise TrainingError(
                f"session {session}: the policy's log-prob of token {int(packed.position[slot])} is {float(logprobs.detach()[slot]):g}; "
                "the weights have diverged or the token cannot be sampled: resume from an earlier checkpoint with a lower actor.optimizer.lr"
            )
        packed = packed.to(logprobs.device)
        inputs = LossInputs(
            logprobs=logprobs,
            proximal=logprobs.detach() if packed.proximal is None else packed.proximal,
            behaviour=packed.behaviour,
            advantages=packed.advantages,
            weight=packed.weight,
            sequence=packed.sequence,
        )
        loss, loss_stats = self._algorithm.loss(inputs, self._loss_settings)
        loss.backward()  # type: ignore[no-untyped-call]
        stats.add_micro_batch(packed, inputs, loss.detach(), entropy, loss_stats)

    def _blame(self, rows: Sequence[RowArrays]) -> str:
        """Which session's gradient is not finite, found by one backward pass per row; only after a step has failed."""
        for row in rows:
            [packed] = self._packs([row])
            self._micro_batch(packed, [row], _StepStats(-1, 1, 1))
            finite = all(
                bool(torch.isfinite(p.grad).all()) for _, p in self.policy.named_parameters() if p.grad is not None
            )
            self._optimizer.zero_grad()
            if not finite:
                return f"session {row.session_id}: its gradient is not finite"
        return f"the gradient over {len(rows)} rows is not finite although each row's own is"


class _StepStats:
    """Sums over the micro-batches of one step; loss and its stats are means over each mini-batch, averaged over them."""

    def __init__(self, current_version: int, rows: int, trained_tokens: int) -> None:
        self.current_version = current_version
        self.rows = rows
        self.trained_tokens = trained_tokens
        self.updated_rows = 0
        self.computed_tokens = 0
        self._row_tokens = 0
        self._updates = 0
        self._grad_norm = 0.0
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, float] = defaultdict(float)
        self._gap_sum = 0.0
        self._gap_tokens = 0

    def add_micro_batch(
        self, packed: PackedBatch, inputs: LossInputs, loss: Tensor, entropy: Tensor, loss_stats: dict[str, Tensor]
    ) -> None:
        self.computed_tokens += len(packed.ids)
        self._row_tokens += packed.row_tokens
        for name, value in {"loss": loss, "entropy": (inputs.weight * entropy).sum(), **loss_stats}.items():
            if name.endswith("_max"):
                self._maxima[name] = max(self._maxima[name], float(value))
            else:
                self._sums[name] = self._sums[name] + value if name in self._sums else value
        gap = (inputs.proximal - inputs.behaviour).abs()[packed.version == self.current_version]
        if len(gap):
            self._maxima["logprob_gap_max"] = max(self._maxima["logprob_gap_max"], float(gap.max()))
            self._gap_sum += float(gap.sum())
            self._gap_tokens += len(gap)

    def add_update(self, grad_norm: float) -> None:
        self._updates += 1
        self._grad_norm = max(self._grad_norm, grad_norm)

    def result(self, *, seconds: float, lr: float) -> dict[str, float]:
        names = ("loss", "entropy", "clip_ratio", "dual_clip_ratio", "approx_kl", "behave_weight_mean")
        means = {name: float(self._sums[name]) / max(1, self._updates) if name in self._sums else 0.0 for name in names}
        return means | {
            "behave_weight_max": self._maxima["behave_weight_max"],
            "grad_norm": self._grad_norm,
            "lr": lr,
            "updates": float(self._updates),
            "rows": float(self.rows),
            "skipped_rows": float(self.rows - self.updated_rows),
            "trained_tokens": float(self.trained_tokens),
            "computed_tokens": float(self.computed_tokens),
            "row_tokens": float(self._row_tokens),
            "logprob_gap_max": self._maxima["logprob_gap_max"],
            "logprob_gap_mean": self._gap_sum / max(1, self._gap_tokens),
            "logprob_gap_tokens": float(self._gap_tokens),
            "seconds": seconds,
        }
