"""Stored sessions as JSON: what `/rl/export_trajectories` and `/rl/session` answer.

    body = exported(summary, interactions, style="concat", turn_discount=1.0)
    body = looked_at(summary, interactions, in_flight=1)

Token-level records, ready for another trainer: ids, one log-prob and one weight version per output token, raw and discounted
rewards, tags; and the session's statistics. A log-prob that the backend did not give is null. Pure. Used by control.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from areal.base.types import ExportStyle, FloatArray, Fork, Interaction, Trajectory
from areal.proxy import export
from areal.proxy.statistics import statistics
from areal.store.base import SessionSummary


def exported(
    summary: SessionSummary,
    interactions: Sequence[Interaction],
    style: ExportStyle,
    turn_discount: float,
    reward_clip: float | None = None,
) -> dict[str, Any]:
    """The whole session: every interaction, the training rows they make, and where the tokens went."""
    credit = export.discounted_rewards(interactions, turn_discount, reward_clip)
    rows = export.rows(summary.session, interactions, style, turn_discount, reward_clip)
    return {
        **_head(summary, interactions),
        "style": style,
        "discount": turn_discount,
        "reward_clip": reward_clip,
        "interactions": [_interaction(one, credit[one.id]) for one in interactions],
        "trajectories": [_trajectory(row) for row in rows],
    }


def looked_at(
    summary: SessionSummary, interactions: Sequence[Interaction], in_flight: int, reward_clip: float | None = None
) -> dict[str, Any]:
    """Counts only. in_flight: model calls that run now. rewards_clipped: how many are trained as less than was set."""
    rewards = [one.reward for one in interactions if one.reward is not None]
    return {
        **_head(summary, interactions),
        "in_flight": in_flight,
        "interaction_tags": dict(Counter(tag for one in interactions for tag in one.tags)),
        "rewards_clipped": sum(export.clipped(one, reward_clip) != one for one in rewards),
    }


def _head(summary: SessionSummary, interactions: Sequence[Interaction]) -> dict[str, Any]:
    """Which session, and its statistics: the same in both answers."""
    session, found = summary.session, statistics(summary, interactions)
    return {
        "session_id": session.id,
        "task_id": session.task_id,
        "purpose": session.purpose,
        "tags": dict(session.tags),
        "ending": session.ending,
        "fate": summary.fate,
        "started_at": session.started_at,
        "ended_at": session.ended_at,
        "excluded_because": session.excluded_because,
        "interaction_count": found.interactions,
        "call_count": found.calls,
        "rows": found.rows,
        "mergeable": found.mergeable,
        "merged": found.merged,
        "merge_rate": found.merge_rate,
        "branches": found.reasons,
        "forks": [
            {"interaction_id": branch.interaction_id, "index": branch.index, **_fork(branch.fork)}
            for branch in found.branches
        ],
        "rewards_set": found.rewards_set,
        "reward_sum": found.reward_sum,
        "tokens": {**msgspec.to_builtins(found.tokens), "empty_interactions": found.empty},
    }


def _fork(fork: Fork) -> dict[str, Any]:
    return dict(msgspec.to_builtins(fork))


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
        "constrained": None if completion.constrained is None else completion.constrained.astype(np.int8).tolist(),
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
        "fork": None if one.fork is None else _fork(one.fork),
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
