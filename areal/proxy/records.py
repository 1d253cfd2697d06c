"""Stored sessions as JSON: what `/rl/export_trajectories` and `/rl/session` answer.

    body = exported(session, interactions, style="concat", turn_discount=1.0)
    body = summary(session, interactions, in_flight=1)

Token-level records, ready for another trainer: ids, one log-prob and one weight version per output token, raw and discounted
rewards, tags. A log-prob that the backend did not give is null. Pure. Used by control.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from areal.base.types import ExportStyle, FloatArray, Interaction, Session, Trajectory
from areal.proxy import export


def exported(
    session: Session, interactions: Sequence[Interaction], style: ExportStyle, turn_discount: float
) -> dict[str, Any]:
    """The whole session: every interaction, the training rows they make, and where the tokens went."""
    credit = export.discounted_rewards(interactions, turn_discount)
    return {
        **_head(session, len(interactions)),
        "style": style,
        "discount": turn_discount,
        "interactions": [_interaction(one, credit[one.id]) for one in interactions],
        "trajectories": [_trajectory(row) for row in export.rows(session, interactions, style, turn_discount)],
        "tokens": _tokens(interactions),
    }


def summary(session: Session, interactions: Sequence[Interaction], in_flight: int) -> dict[str, Any]:
    """Counts only. merge_rate: of the calls that continued a conversation, how many kept its sampled tokens."""
    continued = [one for one in interactions if one.credit_parent is not None]
    merged = sum(one.token_parent is not None for one in continued)
    rewards = [one.reward for one in interactions if one.reward is not None]
    return {
        **_head(session, len(interactions)),
        "in_flight": in_flight,
        "continued": len(continued),
        "merge_rate": merged / len(continued) if continued else None,
        "branches": dict(Counter(one.branch_reason for one in interactions if one.branch_reason)),
        "interaction_tags": dict(Counter(tag for one in interactions for tag in one.tags)),
        "rewards_set": len(rewards),
        "reward_sum": sum(rewards),
        "tokens": _tokens(interactions),
    }


def _head(session: Session, count: int) -> dict[str, Any]:
    return {
        "session_id": session.id,
        "task_id": session.task_id,
        "purpose": session.purpose,
        "tags": dict(session.tags),
        "ending": session.ending,
        "started_at": session.started_at,
        "ended_at": session.ended_at,
        "interaction_count": count,
    }


def _tokens(interactions: Sequence[Interaction]) -> dict[str, Any]:
    account = export.account(interactions)
    return {
        "recorded": account.recorded,
        "trained": account.trained,
        "masked": dict(account.masked),
        "empty_interactions": account.empty,
    }


def _interaction(one: Interaction, discounted: float) -> dict[str, Any]:
    completion = one.completion
    return {
        "id": one.id,
        "index": one.index,
        "prompt_ids": one.prompt_ids.tolist(),
        "output_ids": completion.token_ids.tolist(),
        "logprobs": _numbers(completion.logprobs),
        "versions": completion.versions.tolist(),
        "kept_mass": _numbers(completion.kept_mass),
        "loss_mask": export.trained_mask(one).astype(np.int8).tolist(),
        "temperature": completion.temperature,
        "finish_reason": completion.finish_reason,
        "messages": msgspec.to_builtins(one.messages),
        "reply": msgspec.to_builtins(one.reply),
        "tools": msgspec.to_builtins(one.tools),
        "sampling": msgspec.to_builtins(one.sampling),
        "model": one.model,
        "reward": one.reward,
        "discounted_reward": discounted,
        "tags": list(one.tags),
        "token_parent": one.token_parent,
        "credit_parent": one.credit_parent,
        "branch_reason": one.branch_reason,
        "started_at": one.started_at,
        "finished_at": one.finished_at,
        "request_id": one.request_id,
    }


def _trajectory(row: Trajectory) -> dict[str, Any]:
    return {
        "token_ids": row.token_ids.tolist(),
        "loss_mask": row.trained.astype(np.int8).tolist(),
        "logprobs": _numbers(row.logprobs),
        "versions": row.versions.tolist(),
        "temperatures": _numbers(row.temperatures),
        "spans": msgspec.to_builtins(row.spans),
    }


def _numbers(values: FloatArray) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]
