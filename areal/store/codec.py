"""Interaction <-> the two rows that keep it: one of small facts, one of arrays and texts.

    facts, recording = encode(interaction)
    same = decode({**facts, **recording}, session_id)

Token arrays are raw little-endian bytes (int32 ids and versions, float32 log-probs and masses, one byte per mask entry); messages,
reply, tools and sampling are JSON; what shrinks is kept smaller (packing.py). An old row stays readable: a field that a
later release adds to a noun has a default there, and a field that it drops is skipped here. Layout changes beyond that are migrations
(sql/schema.py). No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from areal.base.types import BranchReason, Completion, Fork, Interaction, Message, SamplingParams, Tool
from areal.store.packing import pack, unpack

T = TypeVar("T")

_INT = np.dtype("<i4")
_FLOAT = np.dtype("<f4")
_BOOL = np.dtype("?")

# Columns of each row, in the order of the tables.
FACTS = (
    "id", "idx", "output_tokens", "reward", "tags", "token_parent", "credit_parent", "branch_reason", "model",
    "finish_reason", "temperature", "started_at", "finished_at", "request_id",
)  # fmt: skip
RECORDING = (
    "prompt_ids", "token_ids", "logprobs", "versions", "kept_mass", "constrained", "messages", "reply", "tools", "sampling",
    "fork", "packed", "texts",
)  # fmt: skip


def to_json(value: object) -> str:
    """JSON text of dataclasses, mappings and sequences."""
    return msgspec.json.encode(value).decode()


def from_json(text: str, kind: type[T]) -> T:
    """Decode what `to_json` wrote; raises msgspec.ValidationError when the text is of another shape."""
    return msgspec.json.decode(text, type=kind)


def encode(interaction: Interaction) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split an interaction into column values: small facts, and the recording (arrays as bytes, texts as JSON)."""
    done = interaction.completion
    facts = {
        "id": interaction.id,
        "idx": interaction.index,
        "output_tokens": len(done.token_ids),
        "reward": interaction.reward,
        "tags": to_json(interaction.tags),
        "token_parent": interaction.token_parent,
        "credit_parent": interaction.credit_parent,
        "branch_reason": interaction.branch_reason,
        "model": interaction.model,
        "finish_reason": done.finish_reason,
        "temperature": done.temperature,
        "started_at": interaction.started_at,
        "finished_at": interaction.finished_at,
        "request_id": interaction.request_id,
    }
    recording = {
        "prompt_ids": _pack(interaction.prompt_ids, _INT),
        "token_ids": _pack(done.token_ids, _INT),
        "logprobs": _pack(done.logprobs, _FLOAT),
        "versions": _pack(done.versions, _INT),
        "kept_mass": _pack(done.kept_mass, _FLOAT),
        "constrained": None if done.constrained is None else _pack(done.constrained, _BOOL),
        "messages": to_json(interaction.messages),
        "reply": to_json(interaction.reply),
        "tools": to_json(interaction.tools),
        "sampling": to_json(interaction.sampling),
        "fork": "" if interaction.fork is None else to_json(interaction.fork),
    }
    pack(recording)
    return facts, recording


def decode(row: Mapping[str, Any], session_id: str) -> Interaction:
    """Rebuild the interaction that `encode` split; `row` has the columns of both tables."""
    constrained, large = row["constrained"], unpack(row)
    completion = Completion(
        token_ids=_unpack(large["token_ids"], _INT),
        logprobs=_unpack(row["logprobs"], _FLOAT),
        versions=_unpack(large["versions"], _INT),
        kept_mass=_unpack(large["kept_mass"], _FLOAT),
        temperature=row["temperature"],
        finish_reason=row["finish_reason"],
        constrained=None if constrained is None else _unpack(constrained, _BOOL),
    )
    return Interaction(
        id=row["id"],
        session_id=session_id,
        index=row["idx"],
        prompt_ids=_unpack(large["prompt_ids"], _INT),
        completion=completion,
        messages=from_json(large["messages"], tuple[Message, ...]),
        reply=from_json(row["reply"], Message),
        tools=from_json(large["tools"], tuple[Tool, ...]),
        sampling=from_json(row["sampling"], SamplingParams),
        model=row["model"],
        token_parent=row["token_parent"],
        credit_parent=row["credit_parent"],
        fork=_fork(row["fork"], row["branch_reason"]),
        reward=row["reward"],
        tags=from_json(row["tags"], tuple[Any, ...]),
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        request_id=row["request_id"],
    )


def _fork(text: str, reason: str) -> Fork | None:
    """An earlier release kept the reason alone: a name, or a sentence about the template."""
    if text or not reason:
        return from_json(text, Fork) if text else None
    if reason in get_args(BranchReason):
        return Fork(cast(BranchReason, reason))
    return Fork("template_rewrites", detail=reason)


def _pack(values: npt.ArrayLike, dtype: np.dtype[Any]) -> bytes:
    return np.asarray(values, dtype).tobytes()


def _unpack(data: bytes, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    # A view of the bytes is read-only, as a recorded array should be; astype is a no-op on little-endian machines.
    return np.frombuffer(data, dtype=dtype).astype(dtype.newbyteorder("="), copy=False)
