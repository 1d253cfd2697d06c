"""Training rows: from recorded trajectories and their advantages to what travels to a rank, and back to arrays.

    returns = interaction_returns(groups)                        # one entry per trained interaction
    rows = to_rows(groups, returns, advantages)                  # list[Row], for EngineClient.train_step
    values_m = trained_values(groups, values)                    # what a rank said of each row, at the trained tokens alone
    arrays = decode_row(row)                                     # in the rank; checked

No torch: the controller's side is numpy. Neighbours: commands.py (Row on the wire), batch.py (packs the arrays), credit.py
(computes the advantages).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from areal.base.errors import ShapeError, TrainingError
from areal.base.types import BoolArray, FloatArray, Group, IntArray, Span, Trajectory
from areal.engine.commands import Row

IdArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class InteractionReturns:
    """One entry per interaction with at least one token to train: arrays of one length [k] and what they belong to.

    keys [k]: (session id, interaction id). returns: discounted. group, session: numbers within the batch. tokens: how many of its
    tokens are trained. lengths: how many it sampled. truncated: a length limit cut it off."""

    keys: tuple[tuple[str, str], ...]
    returns: FloatArray
    group: IdArray
    session: IdArray
    tokens: IdArray
    lengths: IdArray
    truncated: BoolArray


@dataclass(frozen=True, slots=True)
class RowArrays:
    """One row as arrays of length n; see commands.Row. weight: part of the optimizer step's mean, set by batch.py."""

    session_id: str
    sequence: int
    ids: IntArray
    trained: BoolArray
    logprobs: FloatArray
    versions: IntArray
    temperatures: FloatArray
    advantages: FloatArray
    proximal: FloatArray | None = None
    weight: FloatArray | None = None
    interactions: IntArray | None = None
    reference: FloatArray | None = None
    teacher: FloatArray | None = None


def interaction_returns(groups: Sequence[Group]) -> InteractionReturns:
    """The returns that advantages are computed from, in batch order, each trained interaction once."""
    entries: dict[tuple[str, str], tuple[float, int, int, int, int, bool]] = {}
    numbers = _session_numbers(groups)
    for index, group in enumerate(groups):
        for row in group.trajectories:
            for span in _trained_spans(row):
                tokens = int(row.trained[span.start : span.end].sum())
                facts = (span.reward, index, numbers[row.session_id], tokens, span.end - span.start, span.truncated)
                entries.setdefault((row.session_id, span.interaction_id), facts)
    columns = list(zip(*entries.values(), strict=True)) or [()] * 6
    group_k, session_k, tokens_k, lengths_k = (np.array(column, dtype=np.int64) for column in columns[1:5])
    return InteractionReturns(
        keys=tuple(entries),
        returns=np.array(columns[0], dtype=np.float32),
        group=group_k,
        session=session_k,
        tokens=tokens_k,
        lengths=lengths_k,
        truncated=np.array(columns[5], dtype=np.bool_),
    )


def to_rows(groups: Sequence[Group], returns: InteractionReturns, advantages: FloatArray) -> list[Row]:
    """Rows for a training step: every trajectory that has a token to train. advantages: [k] as in `returns`, then each stands
    at all trained tokens of its interaction, or [m], one per trained token in that order.

    Raises ShapeError if the lengths differ, TrainingError if a trained token belongs to no interaction."""
    ends = np.cumsum(returns.tokens)
    total = int(ends[-1]) if len(ends) else 0
    if advantages.shape == (len(returns.keys),):
        advantages = np.repeat(advantages, returns.tokens)
    elif advantages.shape != (total,):
        raise ShapeError(
            f"{advantages.shape} advantages for {len(returns.keys)} interactions; compute them from the same batch"
        )
    parts = np.split(advantages.astype(np.float32), ends[:-1])
    by_key = {key: (number, part) for number, (key, part) in enumerate(zip(returns.keys, parts, strict=False))}
    numbers = _session_numbers(groups)
    return [_encode(row, numbers[row.session_id], by_key) for row in trained_trajectories(groups)]


def trained_trajectories(groups: Sequence[Group]) -> list[Trajectory]:
    """The trajectories that become rows, in that order."""
    return [row for group in groups for row in group.trajectories if row.trained.any()]


def trained_values(groups: Sequence[Group], values: Sequence[FloatArray]) -> FloatArray:
    """The entries [m] at the trained tokens, in the order of `interaction_returns`; values: an array [n] per row."""
    parts = [
        own[span.start : span.end][row.trained[span.start : span.end]]
        for row, own in zip(trained_trajectories(groups), values, strict=True)
        for span in _trained_spans(row)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)


def _trained_spans(row: Trajectory) -> Iterator[Span]:
    yield from (span for span in row.spans if span.trained and row.trained[span.start : span.end].any())


def _session_numbers(groups: Sequence[Group]) -> dict[str, int]:
    sessions = dict.fromkeys(row.session_id for group in groups for row in group.trajectories)
    return {session: number for number, session in enumerate(sessions)}


def _encode(row: Trajectory, sequence: int, by_key: dict[tuple[str, str], tuple[int, FloatArray]]) -> Row:
    advantages = np.full(len(row.token_ids), np.nan, dtype=np.float32)
    interactions = np.full(len(row.token_ids), -1, dtype=np.int32)
    for span in _trained_spans(row):
        own = slice(span.start, span.end)
        interactions[own], values = by_key[row.session_id, span.interaction_id]
        advantages[own][row.trained[own]] = values
    homeless = row.trained & np.isnan(advantages)
    if homeless.any():
        raise TrainingError(
            f"session {row.session_id}: trained token {int(homeless.argmax())} has no advantage (it lies in no trained "
            "interaction, or its reward is not a number); check the rewards of this session"
        )
    return Row(
        session_id=row.session_id,
        sequence=sequence,
        ids=row.token_ids.astype("<i4").tobytes(),
        trained=row.trained.astype("?").tobytes(),
        logprobs=row.logprobs.astype("<f4").tobytes(),
        versions=row.versions.astype("<i4").tobytes(),
        temperatures=row.temperatures.astype("<f4").tobytes(),
        advantages=np.where(row.trained, advantages, np.float32(0)).astype("<f4").tobytes(),
        interactions=interactions.astype("<i4").tobytes(),
    )


def decode_row(row: Row) -> RowArrays:
    """The row's arrays, checked: one length, a token before each trained one, numbers where they are trained.

    Raises ShapeError (lengths) or TrainingError (NaN or infinite log-prob or advantage), both naming the session."""
    ids = _integers(row.ids)
    arrays = RowArrays(
        session_id=row.session_id,
        sequence=row.sequence,
        ids=ids,
        trained=np.frombuffer(row.trained, dtype="?"),
        logprobs=_numbers(row.logprobs),
        versions=_integers(row.versions),
        temperatures=_numbers(row.temperatures),
        advantages=_numbers(row.advantages) if row.advantages else np.zeros(len(ids), np.float32),
        proximal=_numbers(row.proximal) if row.proximal else None,
        interactions=_integers(row.interactions) if row.interactions else None,
        reference=_numbers(row.reference) if row.reference else None,
        teacher=_numbers(row.teacher) if row.teacher else None,
    )
    _check(arrays)
    return arrays


def _integers(values: bytes) -> IntArray:
    return np.frombuffer(values, dtype="<i4").astype(np.int32)


def _numbers(values: bytes) -> FloatArray:
    return np.frombuffer(values, dtype="<f4").astype(np.float32)


def _check(row: RowArrays) -> None:
    n = len(row.ids)
    fields = {"trained": row.trained, "logprobs": row.logprobs, "versions": row.versions}
    fields |= {"temperatures": row.temperatures, "advantages": row.advantages}
    optional = {name: getattr(row, name) for name in ("proximal", "interactions", "reference", "teacher")}
    fields |= {name: values for name, values in optional.items() if values is not None}
    for name, values in fields.items():
        if len(values) != n:
            raise ShapeError(f"session {row.session_id}: {len(values)} {name} for {n} token ids")
    if n == 0 or row.trained[0]:
        raise ShapeError(f"session {row.session_id}: a trained token needs a token before it; rows start with a prompt")
    for name, values in fields.items():
        bad = row.trained & ~np.isfinite(values)
        if bad.any():
            position = int(bad.argmax())
            raise TrainingError(
                f"session {row.session_id}: {name} of trained token {position} is {values[position]}; exclude this session "
                "and look at what recorded it (the backend for logprobs, the reward for advantages)"
            )
