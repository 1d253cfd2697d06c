"""How far a layout is from one process, and how far it may be."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tests.engine.parallel.pool import Result

LOSS = 5e-6
GRADIENT = 1e-5
WEIGHTS = 1e-5
NORM = 1e-5


@dataclass(frozen=True)
class Apart:
    """loss: the largest difference of a step. gradient, weights: relative L2 of the worst parameter, named. norm: relative, of the worst step.
    replicas_equal: whether all who hold the same piece hold the same bits."""

    loss: float
    gradient: float
    worst_gradient: str
    weights: float
    worst_weights: str
    norm: float
    replicas_equal: bool

    @classmethod
    def of(cls, ours: Result, theirs: Result) -> Apart:
        assert ours.gradients.keys() == theirs.gradients.keys()
        assert ours.weights.keys() == theirs.weights.keys()
        gradient = {name: apart(ours.gradients[name], expected) for name, expected in theirs.gradients.items()}
        weights = {name: apart(ours.weights[name], expected) for name, expected in theirs.weights.items()}
        worst, farthest = max(gradient, key=gradient.__getitem__), max(weights, key=weights.__getitem__)
        norms = [(mine["grad_norm"], one["grad_norm"]) for mine, one in zip(ours.stats, theirs.stats, strict=True)]
        return cls(
            max(abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=True)),
            gradient[worst],
            worst,
            weights[farthest],
            farthest,
            max(abs(mine - one) / one for mine, one in norms),
            ours.replicas_equal,
        )

    def check(self, *, weights: float = WEIGHTS) -> None:
        assert self.loss <= LOSS, self
        assert self.gradient <= GRADIENT, self
        assert self.weights <= weights, self
        assert self.norm <= NORM, self
        assert self.replicas_equal, self


def assert_twins(ours: Result, theirs: Result, *, weights: float = WEIGHTS) -> None:
    Apart.of(ours, theirs).check(weights=weights)


def apart(ours: Tensor, theirs: Tensor) -> float:
    """L2."""
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))
