"""The optimizer step: AdamW in float32, the gradient's global norm reported and clipped, the learning rate by schedule.

    optimizer = Optimizer(net.trained_parameters(), settings.optimizer, total_steps=100, world=world)
    ...backward passes...
    applied = optimizer.step(training_step=3)   # Applied(grad_norm, lr); None when the gradient is not finite

Where parameters are cut over several processes, each works on the piece it holds: AdamW knows no neighbours, and the norm is one sum over all of
them, in which a number that several hold counts once. Parameters below float32 get float32 masters: at learning rates of 1e-6 a bfloat16 weight would round every update away. Losses arrive
already normalised over the optimizer step (batch.py: loss_weights), so nothing is divided again, however many micro-batches there were.
State goes out and in as named tensors (engine/checkpoint.py); no pickle. With offload all of this lies in host memory: gradients come there, AdamW
runs there, and what it made goes back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from areal.algorithms.schedules import learning_rate
from areal.config.engine import OptimizerConfig
from areal.engine.parallel.gather import cut_as
from areal.engine.parallel.world import World, local, replicas

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Applied:
    """What one optimizer step did: the global gradient norm before clipping and the learning rate used."""

    grad_norm: float
    lr: float


class Optimizer:
    """Owns moments, masters and the number of optimizer steps taken. total_steps: training steps of the whole run. The parameters must lie
    where they will stay: sharded, and on their device."""

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        *,
        total_steps: int,
        world: World | None = None,
        shared: Mapping[str, str] | None = None,
        on_host: bool = False,
    ) -> None:
        """shared: names of parameters that stand on two stages of a pipeline, and the one name that both have outside. on_host: moments and float32
        masters lie in host memory and AdamW runs there, wherever the parameters are."""
        self.config = config
        self.total_steps = total_steps
        self.steps = 0
        self._world = world or World.alone()
        self._params = dict(named)
        self._outside = {name: (shared or {}).get(name, name) for name in self._params}
        self._held_by = {
            name: replicas(p, self._world) * (1 + (name in (shared or {}))) for name, p in self._params.items()
        }
        self._pieces = {name: local(p.detach()) for name, p in self._params.items()}
        self._masters = {name: _master(piece, on_host=on_host).requires_grad_() for name, piece in self._pieces.items()}
        self._adamw = torch.optim.AdamW(
            list(self._masters.values()),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def step(self, training_step: int) -> Applied | None:
        """Clip, apply, zero the gradients. training_step, from 0, is the place in the learning-rate schedule.

        None: the gradient held a NaN or infinity; nothing was changed but the gradients, which are gone."""
        grads = {name: local(p.grad) for name, p in self._params.items() if p.grad is not None}
        norm = self._norm(grads)
        if not math.isfinite(norm):
            self.zero_grad()
            return None
        if norm > self.config.gradient_clipping:
            torch._foreach_mul_(list(grads.values()), self.config.gradient_clipping / (norm + 1e-6))
        lr = self.lr(training_step)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        for name, grad in grads.items():
            self._masters[name].grad = grad.to(self._masters[name].device, torch.float32)
            self._params[name].grad = None
        self._adamw.step()
        with torch.no_grad():
            for name, piece in self._pieces.items():
                if self._apart(name):
                    piece.copy_(self._masters[name])
        self.steps += 1
        self.zero_grad()
        return Applied(norm, lr)

    def _norm(self, grads: Mapping[str, Tensor]) -> float:
        """Of the whole gradient. The same on every rank, to the bit, so that all clip alike."""
        square = torch.zeros((), dtype=torch.float64, device=self._world.device)
        if grads:
            norms = torch.stack(torch._foreach_norm(list(grads.values()))).double()
            held_by = torch.tensor([self._held_by[name] for name in grads], dtype=torch.float64, device=norms.device)
            square += (norms.square() / held_by).sum().to(square.device)
        return math.sqrt(self._world.sum(square).item())

    def lr(self, training_step: int) -> float:
        """The learning rate of every optimizer step in this training step."""
        return learning_rate(
            training_step,
            lr=self.config.lr,
            schedule=self.config.lr_scheduler_type,
            warmup_steps=self.config.warmup_steps,
            total_steps=self.total_steps,
            min_lr_ratio=self.config.min_lr_ratio,
        )

    def zero_grad(self) -> None:
        for name, p in self._params.items():
            p.grad = None
            self._masters[name].grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """`exp_avg.NAME`, `exp_avg_sq.NAME`, `step.NAME` of every parameter that has been stepped, `master.NAME` where kept; cut as the
        parameters are (parallel/gather.py makes them whole)."""
        tensors: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            state, like, outside = self._adamw.state.get(master, {}), self._params[name].detach(), self._outside[name]
            tensors |= {f"{key}.{outside}": cut_as(state[key], like) for key in MOMENTS if key in state}
            tensors |= {f"step.{outside}": state["step"]} if "step" in state else {}
            if self._pieces[name].dtype != torch.float32:
                tensors[f"master.{outside}"] = cut_as(master.detach(), like)
        return tensors

    def _apart(self, name: str) -> bool:
        """Whether the parameter is a copy of its master, and not the master itself."""
        master, piece = self._masters[name], self._pieces[name]
        return piece.dtype != master.dtype or master.data_ptr() != piece.data_ptr()

    def places(self) -> dict[str, Tensor]:
        """All that `state_tensors` may give, by name: a tensor that is cut as it is, of its shape."""
        places: dict[str, Tensor] = {}
        for name, param in self._params.items():
            outside = self._outside[name]
            places |= {f"{key}.{outside}": param.detach() for key in (*MOMENTS, "master")}
            places[f"step.{outside}"] = torch.zeros(())
        return places

    def load_state_tensors(self, tensors: Mapping[str, Tensor], *, steps: int) -> None:
        """Take over what `state_tensors` gave, of each tensor what is here. The parameters have their values already."""
        for name, master in self._masters.items():
            outside = self._outside[name]
            state: dict[str, Tensor] = {}
            for key in (*MOMENTS, "step"):
                if (tensor := tensors.get(f"{key}.{outside}")) is not None:
                    state[key] = tensor.to(master.device, copy=True)
            if state:
                self._adamw.state[master] = state
            else:
                self._adamw.state.pop(master, None)
            with torch.no_grad():
                if (tensor := tensors.get(f"master.{outside}")) is not None:
                    master.copy_(tensor)
                elif self._apart(name):
                    master.copy_(self._pieces[name])
        self.steps = steps


def _master(piece: Tensor, *, on_host: bool) -> Tensor:
    """What AdamW changes: the parameter itself where it is float32 and lies where its optimizer does."""
    return piece.to("cpu", torch.float32, copy=True) if on_host else piece.float()
