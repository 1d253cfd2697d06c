"""The latency model: trajectories of log-normal length on a machine of so many slots, and what of it is known beforehand.

    cell = Cell(cv=1.0, waves=2, ratio=0.5)              # g = waves (mean length = 1), t = ratio * g, 512 trajectories per step
    cell.lengths(seed=1)                                  # endless
    cell.split                                            # slots that generate and the part of the machine that trains

Lengths have mean 1 before they are cut off at 12. Speed is proportional to the share: half of the machine has half of the slots, and
trains in twice the time. New weights cost nothing but the time they are trained in; a trajectory goes on under them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

CUT = 12.0
CVS, WAVES, RATIOS = (0.5, 1.0, 1.5), (1, 2, 4, 8), (0.25, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Cell:
    """cv: of the lengths. waves: trajectories per step and slot. ratio: t / g. per_step: trajectories in a step. mean: of the lengths as
    they are drawn, None = what is left of 1 by the cut."""

    cv: float
    waves: int
    ratio: float
    per_step: int = 512
    mean: float | None = None

    @property
    def slots(self) -> int:
        """Of the whole machine."""
        return self.per_step // self.waves

    @property
    def generate(self) -> float:
        """g: of the whole machine with all slots busy, in mean lengths."""
        return self.per_step * (mean_length(self.cv) if self.mean is None else self.mean) / self.slots

    @property
    def train(self) -> float:
        """t: of the whole machine."""
        return self.ratio * self.generate

    @property
    def split(self) -> tuple[int, float]:
        """Slots that generate, and the part of the machine that trains: as near to t / (g + t) as whole slots allow."""
        generating = max(1, round(self.slots * self.generate / (self.generate + self.train)))
        return generating, 1.0 - generating / self.slots

    def lengths(self, seed: int) -> Iterator[float]:
        rng = np.random.default_rng(seed)
        while True:
            yield from draw(self.cv, rng, 4096).tolist()


def draw(cv: float, rng: np.random.Generator, count: int) -> np.ndarray:
    """Log-normal with mean 1 and this coefficient of variation, cut off at CUT."""
    sigma = math.sqrt(math.log1p(cv * cv))
    return np.minimum(rng.lognormal(-sigma * sigma / 2, sigma, count), CUT)


def mean_length(cv: float) -> float:
    """E[min(X, CUT)], in closed form: a little below 1, for what is cut off."""
    sigma = math.sqrt(math.log1p(cv * cv))
    z = (math.log(CUT) + sigma * sigma / 2) / sigma
    below = 0.5 * math.erfc(-(z - sigma) / math.sqrt(2.0))
    beyond = 0.5 * math.erfc(z / math.sqrt(2.0))
    return below + CUT * beyond


def quantiles(cv: float, count: int) -> np.ndarray:
    """So many lengths that stand for the distribution, each as likely: the medians of equal parts."""
    sigma = math.sqrt(math.log1p(cv * cv))
    normal = NormalDist()
    parts = [normal.inv_cdf((k + 0.5) / count) for k in range(count)]
    return np.minimum(np.exp(sigma * np.array(parts) - sigma * sigma / 2), CUT)
