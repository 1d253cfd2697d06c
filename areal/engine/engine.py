"""The engine of one rank: rows in, one training step on its net, stats out. The net is a policy, a frozen policy or a critic.

    engine = TrainEngine.load(settings)
    stats = engine.train_step(rows, step=3, current_version=3)
    for name, tensor in engine.named_tensors(): ...            # for the weights source
    engine.save(path, step=3, full=True); engine.restore(path)      # engine.hold is the part of it that training waits for

A step is one or more optimizer mini-batches (whole sessions), each packed into micro-batches (batch.py) whose losses add up. The proximal
policy is the one at the start of the step: with a single mini-batch its log-probs are those of the same forward pass, detached; with
several they are computed once, before the first update. A mini-batch in which every advantage is 0 has nothing to say: no optimizer
step, weights and moments stay as they are. A frozen engine (reference, teacher) only scores and has no optimizer. Where a net lies on several
processes (engine/parallel), each has such an engine, all get the same rows and calls in the same order, and all return the same. Single-threaded; worker.py is its
process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from functools import partial
from itertools import chain
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from areal.algorithms import ALGORITHMS, LossInputs, LossSettings
from areal.algorithms.off_policy import Correction, loglinear
from areal.algorithms.ppo import CRITIC
from areal.base.errors import ConfigError, TrainingError
from areal.base.types import FloatArray
from areal.config.backend_spec import parse_backend
from areal.engine import checkpoint
from areal.engine.balance import Balance
from areal.engine.batch import PackedBatch, loss_weights, row_tokens
from areal.engine.commands import Row
from areal.engine.load import load_net
from areal.engine.lora import AdaptedPolicy
from areal.engine.net import Net
from areal.engine.optimizer import Optimizer
from areal.engine.parallel.apply import apply
from areal.engine.parallel.data import share
from areal.engine.parallel.gather import whole
from areal.engine.parallel.planned import check_plan
from areal.engine.parallel.world import CPU, World, local
from areal.engine.random_state import PREFIX, random_state, restore_random_state, seed_generators
from areal.engine.rows import RowArrays, decode_row
from areal.engine.settings import EngineSettings
from areal.engine.stats import StepStats
from areal.models.hf_names import to_disk

OUTPUT = {"policy": "the policy's log-prob", "frozen": "the frozen net's log-prob", "critic": "the critic's value"}


class TrainEngine:
    """One net, its optimizer and its algorithm. Not thread-safe: one command at a time."""

    def __init__(self, policy: Net, settings: EngineSettings, world: World | None = None) -> None:
        """policy: cut for this process of the `world` here, and then filled unless it has its weights."""
        if settings.algorithm not in ALGORITHMS:
            raise ConfigError(f"no algorithm {settings.algorithm!r}; known: {', '.join(sorted(ALGORITHMS))}")
        self.policy = policy
        self.settings = settings
        self.world = world or World.alone()
        self._passes = apply(policy, self.world, settings)
        if any(parameter.is_meta for parameter in policy.parameters()):
            self._fill()
            if settings.role != "frozen":
                check_plan(policy, self.world, self._passes)
        self._balance = Balance(policy, self.world, aux_loss=settings.moe_aux_loss, bias_rate=settings.moe_bias_rate)
        self._algorithm = CRITIC if settings.role == "critic" else ALGORITHMS[settings.algorithm]
        self._drops_zero = self._algorithm.drop_zero and not settings.kl_ctl
        self._lags: dict[int, int] = {}
        self._loss_settings = _loss_settings(settings)
        self._learns = (
            None
            if settings.role == "frozen"
            else Optimizer(
                policy.trained_parameters(),
                settings.optimizer,
                total_steps=settings.total_steps,
                world=self.world,
                shared=policy.shared,
                on_host=settings.offload == "optimizer",
            )
        )

    @classmethod
    def load(cls, settings: EngineSettings, world: World | None = None) -> Self:
        """Sets this process's torch threads, seed and determinism, then loads the model."""
        torch.set_num_threads(settings.threads)
        seed_generators(settings.seed)
        torch.use_deterministic_algorithms(settings.deterministic)
        world = world or world_alone(settings)
        return cls(load_net(settings, world), settings, world)

    @torch.no_grad()
    def score(self, rows: Sequence[Row], *, base: bool = False) -> list[FloatArray]:
        """The net's log-probs (a critic's values) under the current weights, one array [n] per row, 0 where not trained. base: without its
        adapter."""
        with self._as_base() if base else nullcontext():
            return self._score(self._decoded(rows))

    def train_step(
        self, rows: Sequence[Row], step: int, current_version: int, lags: Mapping[int, int] | None = None
    ) -> dict[str, float]:
        """Train on these rows; returns the stats (commands.Stepped). current_version: label of the weights at the start. lags: steps
        that the weights of each label are behind them, for proximal log-probs by `loglinear`.

        Raises TrainingError naming the session whose numbers are not finite; the mini-batch at fault is not applied."""
        optimizer = self._optimizer
        started = time.monotonic()
        arrays = self._decoded(rows)
        aggregation, length = self.settings.loss_aggregation, self.settings.fixed_length
        mini_batches = [loss_weights(part, aggregation, fixed_length=length) for part in self._mini_batches(arrays)]
        stats = StepStats(current_version, len(arrays), sum(int(row.trained.sum()) for row in arrays))
        totals = [sum(float(row.weight.sum()) for row in part if row.weight is not None) for part in mini_batches]
        kept = [[row for row in part if not self._skippable(row)] for part in mini_batches]
        self._lags = dict(lags or {})
        if self.settings.prox_logp_method == "recompute" and (len(kept) > 1 or self._algorithm.screen):
            kept = self._with_proximal(kept, stats)
        for part, total in zip(kept, totals, strict=True):
            stats.weight_total = total if aggregation == "fixed_length" else 1.0
            self._mini_batch(self._screened(part, stats), step, stats)
        stats.gather(self.world)
        return stats.result(seconds=time.monotonic() - started, lr=optimizer.lr(step))

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Current weights as they lie in a model folder, tied ones once; of an adapter these are its own (`about_adapter`). Where they are cut over several processes, all of these go through it
        together to its end, and the leader alone gets them, whole, a few at a time."""
        for name, tensor in whole(self.policy.named_tensors(), self.world):
            yield from to_disk(self.policy.parts(name), tensor)

    def about_adapter(self) -> dict[str, Any]:
        """What `named_tensors` stand beside, for a manifest; empty where they are a whole model."""
        return {} if self.policy.base is None else {"adapter": self.policy.base.published()}

    def hold(self, step: int, *, full: bool) -> checkpoint.Held:
        """A copy of the net as it is after `step` steps, in host memory; full: with what `restore` needs to go on bit-equal. Of several
        processes all take part, and each copies what it is to write."""
        config, base = self.policy.config_files(), self.policy.base
        hold = partial(
            checkpoint.hold, self.policy.named_tensors(), config, parts=self.policy.parts, base=base, world=self.world
        )
        if not full:
            return hold()
        drawn = random_state() if self.world.leader else {}
        state = self._optimizer.state_tensors() | self._balance.state_tensors() | drawn
        facts = {"step": step, "optimizer_steps": self._optimizer.steps, "dtype": self.settings.dtype}
        return hold(state=state.items(), facts=facts | ({"adapter": base.facts()} if base else {}))

    def save(self, path: str, step: int, *, full: bool, model: bool = True) -> None:
        """Write a checkpoint folder, complete or not at all; model: see checkpoint.finish. Of several processes all call it; what one raises the others do too."""
        held = self.hold(step, full=full)
        checkpoint.write(path, held, self.settings.model_dir, step=step, model=model, world=self.world)

    @torch.no_grad()
    def restore(self, path: str) -> dict[str, Any]:
        """Take weights and state from a full checkpoint, of whatever layout; returns its facts (`step`, `optimizer_steps`, `dtype`)."""
        with checkpoint.opened(path, self.policy, self.world) as saved:
            if (facts := saved.facts) is None:
                raise ConfigError(f"{path} has no recovery state; resume from a checkpoint that was saved with it")
            if (dtype := facts["dtype"]) != self.settings.dtype:
                raise ConfigError(
                    f"{path} was trained in {dtype}, and this run's dtype is {self.settings.dtype}: set it back, or begin another "
                    "run with actor.path set to that folder"
                )
            places = self._optimizer.places() | self._balance.state_tensors()
            state = saved.state(places, prefix=PREFIX, world=self.world)
            held = dict(self.policy.trained_parameters())
            twins = [
                (name, held[name].detach()) for name in self.policy.shared
            ]  # of tied ends one has no name of its own
            for name, tensor in chain(self.policy.named_tensors(), twins):
                saved.weights_into(self.policy.parts(name), tensor)
            self._balance.load_state_tensors(state)
            self._optimizer.load_state_tensors(state, steps=int(facts["optimizer_steps"]))
        restore_random_state(state)
        return dict(facts)

    def _fill(self) -> None:
        """With offload the pieces in host memory; what is computed once and belongs to no optimizer, on the device all the same."""
        self.policy.fill(CPU if self.settings.offload == "all" else self.world.device)
        if self.settings.offload == "all":
            self.policy.computes_on = self.world.device
            for module in self.policy.modules():
                for name, buffer in module._buffers.items():
                    module._buffers[name] = None if buffer is None else buffer.to(self.world.device)
        self.policy.check()

    @property
    def _optimizer(self) -> Optimizer:
        if self._learns is None:
            raise ConfigError(f"the net of {self.settings.model_dir} is frozen; it scores, another one is trained")
        return self._learns

    def _as_base(self) -> AbstractContextManager[None]:
        if not isinstance(self.policy, AdaptedPolicy):
            raise ConfigError(
                "this net has no adapter that could be left out; set actor.lora, or ask a reference of its own"
            )
        return self.policy.as_base()

    def _decoded(self, rows: Sequence[Row]) -> list[RowArrays]:
        vocabulary, longest = self.policy.vocabulary, self.policy.longest
        arrays = [decode_row(row) for row in rows]
        for row in arrays:
            strange = row.ids[(row.ids < 0) | (row.ids >= vocabulary)]
            if len(strange):
                raise TrainingError(
                    f"session {row.session_id}: token id {int(strange[0])} is none of the model's {vocabulary} tokens; what "
                    "generates must have the vocabulary of actor.path (a scripted backend: settings.vocabulary)"
                )
            if longest and len(row.ids) > longest:
                raise TrainingError(
                    f"session {row.session_id}: a row of {len(row.ids)} tokens, and a row of more than {longest} makes this model turn the "
                    "positions of all that it is packed with otherwise (its rope scaling); bound the backend's context to that"
                )
        return arrays

    def _skippable(self, row: RowArrays) -> bool:
        return not row.trained.any() or (self._drops_zero and not row.advantages[row.trained].any())

    def _mini_batches(self, rows: Sequence[RowArrays]) -> list[list[RowArrays]]:
        """Whole sessions, mini_batch_size at a time, in batch order."""
        sequences = list(dict.fromkeys(row.sequence for row in rows if row.trained.any()))
        size = self.settings.mini_batch_size or max(1, len(sequences))
        parts = [set(sequences[start : start + size]) for start in range(0, len(sequences), size)]
        if not parts:
            raise TrainingError("the batch has no trained token; check the masks of its sessions")
        return [[row for row in rows if row.sequence in part] for part in parts]

    def _packs(self, rows: Sequence[RowArrays]) -> list[PackedBatch]:
        ranks, rank = self.world.size("d"), self.world.index("d")
        return share(rows, ranks=ranks, rank=rank, max_tokens=self.settings.max_tokens_per_mb)

    def _score(self, rows: Sequence[RowArrays]) -> list[FloatArray]:
        places = [np.flatnonzero(row.trained) for row in rows]
        first = np.cumsum([0, *map(len, places)])
        found = torch.zeros(int(first[-1]), device=self.world.device)
        trouble: list[str] = []
        packs = self._packs(rows)
        for packed, outputs in zip(packs, self._passes.score(packs), strict=True):
            if outputs is None or not self.world.counts:
                continue
            trouble += self._not_finite(packed, rows, outputs)
            for number in np.unique(packed.row):
                own = packed.row == number
                at = first[number] + np.searchsorted(places[number], packed.position[own])
                found[torch.from_numpy(at)] = outputs[torch.from_numpy(own)]
        self._agree(trouble)
        values = self.world.sum(found).cpu().numpy()
        scored = [np.zeros(len(row.ids), dtype=np.float32) for row in rows]
        for row, place, start in zip(scored, places, first, strict=False):
            row[place] = values[start : start + len(place)]
        return scored

    def _with_proximal(self, parts: list[list[RowArrays]], stats: StepStats) -> list[list[RowArrays]]:
        with torch.no_grad():
            rows = [row for part in parts for row in part]
            missing = [row for row in rows if row.proximal is None]
            if self.world.counts:
                stats.computed_tokens += sum(len(packed.ids) for packed in self._packs(missing))
            fresh = iter(self._score(missing))
        return [
            [row if row.proximal is not None else replace(row, proximal=next(fresh)) for row in part] for part in parts
        ]

    def _screened(self, rows: list[RowArrays], stats: StepStats) -> list[RowArrays]:
        """The mini-batch without the weight of what the algorithm leaves out, judged over all of it at once."""
        if self._algorithm.screen is None or not rows:
            return rows
        proximal = np.concatenate([row.proximal[row.trained] for row in rows if row.proximal is not None])
        behaviour = np.concatenate([row.logprobs[row.trained] for row in rows])
        kept = self._algorithm.screen(
            torch.from_numpy(proximal), torch.from_numpy(behaviour), self._loss_settings
        ).numpy()
        stats.screened_tokens += int((~kept).sum())
        ends = np.cumsum([int(row.trained.sum()) for row in rows])
        screened = []
        for row, own in zip(rows, np.split(kept, ends[:-1]), strict=True):
            weight = np.zeros(len(row.ids), np.float32) if row.weight is None else row.weight.copy()
            weight[row.trained] *= own
            screened.append(replace(row, weight=weight))
        return screened

    def _mini_batch(self, rows: Sequence[RowArrays], step: int, stats: StepStats) -> None:
        if not rows or (self._drops_zero and not any(row.advantages[row.trained].any() for row in rows)):
            return
        stats.updated_rows += len(rows)
        self._balance.begin(row_tokens(rows))
        try:
            self._pass(rows, stats)
        except BaseException:
            self._optimizer.zero_grad()
            raise
        applied = self._optimizer.step(step)
        if applied is None:
            raise TrainingError(
                f"{self._blame(rows)}; the step was not applied. Exclude the session or lower actor.optimizer.lr"
            )
        stats.add_update(applied.grad_norm, self._balance.finish())

    def _pass(self, rows: Sequence[RowArrays], stats: StepStats) -> None:
        """Forward and backward of the rows. Raises TrainingError, on every rank alike, where an output is not finite."""
        trouble: list[str] = []

        def loss(packed: PackedBatch, outputs: Tensor, entropy: Tensor) -> Tensor:
            trouble.extend(self._not_finite(packed, rows, outputs.detach()))
            return self._loss(packed, outputs, entropy, stats)

        self._passes.train(self._packs(rows), loss)
        self._agree(trouble)

    def _loss(self, packed: PackedBatch, logprobs: Tensor, entropy: Tensor, stats: StepStats) -> Tensor:
        packed = packed.to(logprobs.device)
        inputs = LossInputs(
            logprobs=logprobs,
            proximal=self._proximal(packed, logprobs),
            behaviour=packed.behaviour,
            advantages=packed.advantages,
            weight=packed.weight,
            interaction=packed.interaction,
            reference=packed.reference,
            teacher=packed.teacher,
        )
        loss, loss_stats = self._algorithm.loss(inputs, self._loss_settings)
        loss_stats["entropy"] = (inputs.weight * entropy).sum()
        known = self.settings.prox_logp_method == "recompute"
        at_start = inputs.proximal if known else logprobs.detach() if stats.updates == 0 else None
        if self.world.counts and len(packed.target):
            stats.add_micro_batch(packed, inputs, loss.detach(), loss_stats, at_start)
        return loss

    def _not_finite(self, packed: PackedBatch, rows: Sequence[RowArrays], outputs: Tensor) -> list[str]:
        finite = torch.isfinite(outputs)
        if finite.all():
            return []
        slot = int((~finite).nonzero()[0, 0])
        return [
            f"session {rows[int(packed.row[slot])].session_id}: {OUTPUT[self.settings.role]} of token {int(packed.position[slot])} is "
            f"{float(outputs[slot]):g}; the weights have diverged or the token cannot be sampled: resume from an earlier "
            "checkpoint with a lower learning rate"
        ]

    def _agree(self, trouble: Sequence[str]) -> None:
        """What one rank found, all of them raise."""
        for said in self.world.gather("".join(trouble[:1]).encode()):
            if said:
                raise TrainingError(said.decode())

    def _proximal(self, packed: PackedBatch, logprobs: Tensor) -> Tensor:
        if packed.proximal is not None:
            return packed.proximal
        if self.settings.prox_logp_method == "recompute":
            return logprobs.detach()
        lags = [self._lags.get(label, 0) for label in packed.version.tolist()]
        return loglinear(packed.behaviour, logprobs, torch.tensor(lags, device=logprobs.device))

    def _blame(self, rows: Sequence[RowArrays]) -> str:
        """Which session's gradient is not finite, found by one backward pass per row; only after a step has failed."""
        for row in rows:
            self._pass([row], StepStats(-1, 1, 1))
            grads = [local(p.grad) for _, p in self.policy.trained_parameters() if p.grad is not None]
            faults = torch.tensor([float(not torch.isfinite(grad).all()) for grad in grads]).sum().to(self.world.device)
            self._optimizer.zero_grad()
            if self.world.sum(faults) > 0:
                return f"session {row.session_id}: its gradient is not finite"
        return f"the gradient over {len(rows)} rows is not finite although each row's own is"


def world_alone(settings: EngineSettings) -> World:
    """Of a net on one process."""
    spec = parse_backend(settings.backend)
    return World.alone_in_a_group(spec) if settings.offload == "all" else World.alone()


def _loss_settings(settings: EngineSettings) -> LossSettings:
    same = {f.name: getattr(settings, f.name) for f in fields(LossSettings) if f.name in EngineSettings.model_fields}
    higher = settings.eps_clip if settings.eps_clip_higher is None else settings.eps_clip_higher
    return LossSettings(
        **same | {"eps_clip_higher": higher}, correction=Correction(**settings.rejection_sampling.model_dump())
    )
