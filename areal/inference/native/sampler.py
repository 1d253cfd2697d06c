"""Logits -> tokens, each with its log-prob as sampled. One call for the whole batch; rows do not influence each other.

    drawn = sample(logits, [Draw(params, rng_seed, position), ...])      # logits float32 [n, vocabulary], overwritten

Log-prob: natural log at the request's temperature over the full vocabulary, before top-k and top-p; kept_mass is the
probability those keep (settled 6, T075). A mask comes first of all: where a grammar forbids tokens, everything
said here is of the distribution over the others, and the token is flagged unless what was forbidden had next to no probability anyway. Temperature 0 is greedy: logits stay unscaled, kept_mass is 1. top-k first, then
top-p on what is left, renormalised. The uniform number of output position t comes from a hash of (rng_seed, t) alone, so
a draw depends on the row's logits and its seed, never on the rest of the batch (settled 17).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal.base.types import SamplingParams

_BLOCK = 256  # tokens per block of the two-level search: one pass over the vocabulary instead of a prefix sum over it
_TOP_P_WINDOW = 1024  # most nuclei fit in here; where one does not, all of the vocabulary is sorted
# Below it a log-prob with the mask and one without agree better than two engines do; such a token may be trained without the mask.
_NEGLIGIBLE = 1e-4

Candidates = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's wish. position: how many tokens this request has sampled before."""

    sampling: SamplingParams
    rng_seed: int
    position: int

    @property
    def temperature(self) -> float:
        value = self.sampling.temperature
        return 1.0 if value is None else value

    @property
    def top_k(self) -> int:
        return 0 if self.temperature == 0 else self.sampling.top_k or 0

    @property
    def top_p(self) -> float:
        return 1.0 if self.temperature == 0 or self.sampling.top_p is None else self.sampling.top_p


@dataclass(frozen=True, slots=True)
class Mask:
    """What grammars allow: rows [m] of the batch, and for each of them allowed [m, vocabulary], at least one token."""

    rows: Sequence[int]
    allowed: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Arrays [n]. ok False: that row's logits held NaN or infinity, its other entries mean nothing.
    constrained: a mask took probability away from what this row could have been."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    kept_mass: npt.NDArray[np.float32]
    ok: npt.NDArray[np.bool_]
    constrained: npt.NDArray[np.bool_]
    top: tuple[Candidates, ...]  # per row as many as it asked for, best first


@torch.inference_mode()
def sample(logits: Tensor, draws: Sequence[Draw], mask: Mask | None = None) -> Drawn:
    """logits [n, vocabulary] float32 (used up), n = len(draws) >= 1. Rows without a mask cost nothing more with it."""
    device = logits.device
    temperatures = [draw.temperature for draw in draws]
    if any(t not in (0.0, 1.0) for t in temperatures):
        scale = torch.tensor([1.0 / t if t > 0 else 1.0 for t in temperatures], device=device)
        logits.mul_(scale[:, None])
    constrained = np.zeros(len(draws), np.bool_)
    if mask is not None:
        constrained[list(mask.rows)] = _apply(logits, mask)
    top = _top_candidates(logits, draws)
    highest = logits.amax(-1, keepdim=True)
    greedy = [row for row, t in enumerate(temperatures) if t == 0]
    best = {row: logits[row].argmax() for row in greedy}
    weights = logits.sub_(highest).exp_()  # from here on `logits` holds unnormalised probabilities, the best has 1
    uniform = torch.from_numpy(uniforms([d.rng_seed for d in draws], [d.position for d in draws])).to(device)
    token_ids, total = _draw_from_all(weights, uniform)
    for row, token in best.items():
        token_ids[row] = token
    kept_mass = torch.ones(len(draws), dtype=torch.float64, device=device)
    limited = [row for row, draw in enumerate(draws) if draw.top_k or draw.top_p < 1]
    if limited:
        rows = torch.tensor(limited, device=device)
        token_ids[rows], kept_mass[rows] = _draw_from_best(
            weights[rows], total[rows], uniform[rows], [draws[row] for row in limited]
        )
    logprobs = (weights.gather(1, token_ids[:, None])[:, 0].double() / total).log()
    ok = torch.isfinite(total) & torch.isfinite(highest[:, 0])
    return Drawn(
        token_ids=token_ids.to(torch.int32).cpu().numpy(),
        logprobs=logprobs.float().cpu().numpy(),
        kept_mass=kept_mass.float().cpu().numpy(),
        ok=ok.cpu().numpy(),
        constrained=constrained,
        top=_with_logprobs(top, highest, total),
    )


def _apply(scaled: Tensor, mask: Mask) -> npt.NDArray[np.bool_]:
    """Take what is forbidden out of the scaled logits, in place. Returns [m]: whether it had any probability to speak of."""
    rows = torch.tensor(mask.rows, device=scaled.device)
    allowed = torch.from_numpy(mask.allowed).to(scaled.device)
    whole = scaled[rows]
    excluded = whole.softmax(-1).masked_fill_(allowed, 0.0).sum(-1)
    masked = whole.masked_fill_(~allowed, -torch.inf)
    masked[~torch.isfinite(excluded)] = torch.nan  # a net that says NaN of a forbidden token has failed as well
    scaled[rows] = masked
    return (excluded > _NEGLIGIBLE).cpu().numpy()


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """[n] numbers in [0, 1): a hash of (seed mod 2^64, position), two rounds of splitmix64's mixer."""
    seed = np.array([value & 0xFFFFFFFFFFFFFFFF for value in seeds], dtype=np.uint64)
    counter = np.array(positions, dtype=np.uint64) + np.uint64(1)
    mixed = _mix(seed + counter * np.uint64(0x9E3779B97F4A7C15))
    mixed = _mix(mixed ^ (counter * np.uint64(0xD1B54A32D192ED03)))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _draw_from_all(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of the cumulative distribution in vocabulary order: token ids [n] and the sum of weights [n] (float64).

    Two levels: the sums of blocks of 256 tokens, then the inside of one block."""
    n, vocabulary = weights.shape
    whole = vocabulary // _BLOCK * _BLOCK
    sums = weights[:, :whole].view(n, -1, _BLOCK).sum(-1)
    if whole < vocabulary:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], dim=1)
    cumulative = sums.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1].clone()
    target = (uniform * total)[:, None]
    block = _first_beyond(cumulative, target)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp_(min=0)), 0.0)
    members = block * _BLOCK + torch.arange(min(_BLOCK, vocabulary), device=weights.device)
    inside = weights.gather(1, members.clamp(max=vocabulary - 1)).masked_fill_(members >= vocabulary, 0.0)
    offset = _first_beyond(inside.cumsum(-1, dtype=torch.float64), target - before)
    return members.gather(1, offset)[:, 0].clamp_(max=vocabulary - 1), total


def _first_beyond(cumulative: Tensor, target: Tensor) -> Tensor:
    """Index [n, 1] of the first entry > target; where rounding left none, of the last that adds probability."""
    found = torch.searchsorted(cumulative, target, right=True)
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(found, last).clamp_(max=cumulative.shape[1] - 1)


def _draw_from_best(weights: Tensor, total: Tensor, uniform: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """Token ids and kept mass [m] of the rows with top-k or top-p."""
    vocabulary = weights.shape[1]
    device = weights.device
    top_k = torch.tensor([min(draw.top_k or vocabulary, vocabulary) for draw in draws], device=device)[:, None]
    top_p = torch.tensor([draw.top_p for draw in draws], dtype=torch.float64, device=device)[:, None]
    width = min(vocabulary, max(draw.top_k or _TOP_P_WINDOW for draw in draws))
    while True:
        best, ids = weights.topk(width)
        probability = best.double() / total[:, None]
        probability.masked_fill_(torch.arange(width, device=device) >= top_k, 0.0)
        cumulative = probability.cumsum(-1)
        after_k = torch.where(top_k < vocabulary, cumulative[:, -1:], 1.0)
        if width == vocabulary or bool(((cumulative[:, -1:] >= top_p * after_k) | (top_k <= width)).all()):
            break
        width = vocabulary  # a nucleus larger than the window
    before = cumulative - probability
    kept = probability.masked_fill_(before >= top_p * after_k, 0.0)
    cumulative = kept.cumsum(-1)
    mass = cumulative[:, -1]
    place = _first_beyond(cumulative, (uniform * mass)[:, None])
    return ids.gather(1, place)[:, 0], mass


def _top_candidates(scaled: Tensor, draws: Sequence[Draw]) -> list[tuple[Tensor, Tensor] | None]:
    """Per row (ids, scaled logits) of the best candidates, where asked for."""
    found: list[tuple[Tensor, Tensor] | None] = []
    for row, draw in enumerate(draws):
        wanted = min(draw.sampling.top_logprobs, scaled.shape[1])
        values = scaled[row].topk(wanted) if wanted else None
        found.append((values.indices, values.values) if values is not None else None)
    return found


def _with_logprobs(
    found: Sequence[tuple[Tensor, Tensor] | None], highest: Tensor, total: Tensor
) -> tuple[Candidates, ...]:
    rows: list[Candidates] = []
    for row, candidates in enumerate(found):
        if candidates is None:
            rows.append(())
            continue
        ids, values = candidates
        logprobs = (values - highest[row]).double() - total[row].log()
        rows.append(tuple(zip(ids.tolist(), logprobs.tolist(), strict=True)))
    return tuple(rows)
