"""Training rows: from recorded trajectories and their advantages to what travels to a rank, and back to arrays.

    returns = interaction_returns(groups)                        # one entry per trained interaction
    advantages = algorithm.advantages(Returns(*map(torch.from_numpy, (returns.returns, returns.group, returns.session))))
    rows = to_rows(groups, returns, advantages.numpy())          # list[Row], for EngineClient.train_step
    arrays = decode_row(row)                                     # in the rank; checked

An interaction's advantage stands at each of its trained tokens. No torch: the controller's side is numpy. Neighbours:
commands.py (Row on the wire), batch.py (packs the arrays), algorithms/advantages.py (the numbers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from areal.base.errors import ShapeError, TrainingError
from areal.base.types import BoolArray, FloatArray, Group, IntArray, Trajectory
from areal.engine.commands import Row

IdArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class InteractionReturns:
    """One entry per interaction with at least one token to train: arrays of one length [k] and what they belong to.

    keys [k]: (session id, interaction id). returns: discounted. group, session: numbers within the batch."""

    keys: tuple[tuple[str, str], ...]
    returns: FloatArray
    group: IdArray
    session: IdArray


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


def interaction_returns(groups: Sequence[Group]) -> InteractionReturns:
    """The returns that advantages are computed from, in batch order, each trained interaction once."""
    entries: dict[tuple[str, str], tuple[float, int, int]] = {}
    numbers = _session_numbers(groups)
    for index, group in enumerate(groups):
        for row in group.trajectories:
            for span in row.spans:
                if span.trained and row.trained[span.start : span.end].any():
                    key = (row.session_id, span.interaction_id)
                    entries.setdefault(key, (span.reward, index, numbers[row.session_id]))
    values = list(entries.values())
    return InteractionReturns(
        keys=tuple(entries),
        returns=np.array([value[0] for value in values], dtype=np.float32),
        group=np.array([value[1] for value in values], dtype=np.int64),
        session=np.array([value[2] for value in values], dtype=np.int64),
    )


def to_rows(groups: Sequence[Group], returns: InteractionReturns, advantages: FloatArray) -> list[Row]:
    """Rows for a training step: every trajectory that has a token to train. advantages [k] as in `returns`.

    Raises ShapeError if the lengths differ, TrainingError if a trained token belongs to no interaction."""
    if advantages.shape != (len(returns.keys),):
        raise ShapeError(
            f"{advantages.shape} advantages for {len(returns.keys)} interactions; compute them from the same batch"
        )
    by_key = dict(zip(returns.keys, advantages.astype(np.float32).tolist(), strict=True))
    numbers = _session_numbers(groups)
    return [
        _encode(row, numbers[row.session_id], by_key)
        for group in groups
        for row in group.trajectories
        if row.trained.any()
    ]


def _session_numbers(groups: Sequence[Group]) -> dict[str, int]:
    sessions = dict.fromkeys(row.session_id for group in groups for row in group.trajectories)
    return {session: number for number, session in enumerate(sessions)}


def _encode(row: Trajectory, sequence: int, by_key: dict[tuple[str, str], float]) -> Row:
    advantages = np.full(len(row.token_ids), np.nan, dtype=np.float32)
    for span in row.spans:
        if span.trained and row.trained[span.start : span.end].any():
            advantages[span.start : span.end] = by_key[row.session_id, span.interaction_id]
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
    )


def decode_row(row: Row) -> RowArrays:
    """The row's arrays, checked: one length, a token before each trained one, numbers where they are trained.

    Raises ShapeError (lengths) or TrainingError (NaN or infinite log-prob or advantage), both naming the session."""
    ids = np.frombuffer(row.ids, dtype="<i4").astype(np.int32)
    arrays = RowArrays(
        session_id=row.session_id,
        sequence=row.sequence,
        ids=ids,
        trained=np.frombuffer(row.trained, dtype="?"),
        logprobs=np.frombuffer(row.logprobs, dtype="<f4").astype(np.float32),
        versions=np.frombuffer(row.versions, dtype="<i4").astype(np.int32),
        temperatures=np.frombuffer(row.temperatures, dtype="<f4").astype(np.float32),
        advantages=np.frombuffer(row.advantages, dtype="<f4").astype(np.float32)
        if row.advantages
        else np.zeros(len(ids), np.float32),
        proximal=np.frombuffer(row.proximal, dtype="<f4").astype(np.float32) if row.proximal else None,
    )
    _check(arrays)
    return arrays


def _check(row: RowArrays) -> None:
    n = len(row.ids)
    fields = {"trained": row.trained, "logprobs": row.logprobs, "versions": row.versions}
    fields |= {"temperatures": row.temperatures, "advantages": row.advantages}
    if row.proximal is not None:
        fields["proximal"] = row.proximal
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
