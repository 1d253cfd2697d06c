"""What the page is told, as plain JSON values: overview, list of sessions, one session with its tokens.

    view = View(store, log_dir, facts)
    await view.overview(); await view.sessions(limit=100, running=None); await view.session("task-1")

Masks, credits and sums come from proxy/export, proxy/statistics and the store's derived counts, so the page shows what training uses and computes
nothing of its own. Used by server.py.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from areal.base.errors import NotFound
from areal.base.metrics import MetricsTable, read_metrics
from areal.base.types import Interaction, Message
from areal.dashboard.run_facts import RunFacts
from areal.proxy import export
from areal.proxy.statistics import statistics
from areal.store.admission import most_running, queue_bound
from areal.store.base import SessionSummary, Store

# The curves of the overview, in this order; a run that does not log one does not show it.
CURVES = (
    ("train/reward", "reward of the batch"),
    ("eval/reward", "reward, held out"),
    ("train/loss", "loss"),
    ("train/lag_mean", "lag, mean steps"),
    ("throughput/tokens_per_second", "tokens per second"),
    ("train/entropy", "entropy, nats"),
    ("train/logprob_gap_max", "trainer − sampler log-prob, max"),
)


class View:
    """See the module. One per page; holds nothing but the last reading of metrics.jsonl."""

    def __init__(self, store: Store, log_dir: Path, facts: RunFacts) -> None:
        self._store = store
        self._metrics_path = log_dir / "metrics.jsonl"
        self._facts = facts
        self._metrics = MetricsTable({})
        self._metrics_state: tuple[int, int] | None = None

    async def overview(self) -> dict[str, Any]:
        training, reading = self._store.training, self._store.reading
        counts, limits, version = await training.counts(), await training.limits(), await reading.served()
        workers = await self._store.registry.workers()
        pending = counts.recorded_tokens - counts.trained_tokens - counts.masked_tokens - counts.dropped_tokens
        return {
            "run": self._facts.name,
            "time": time.time(),
            "version": {"label": version.label, "step": version.step} if version else None,
            "running_sessions": counts.running_sessions,
            "groups": {"running": counts.running, "accepted": counts.accepted, "consumed": counts.consumed},
            "queue_limit": queue_bound(limits) if limits else 0,
            "slots": {"free": counts.free_slots, "all": most_running(limits) if limits else 0},
            "accepting": bool(limits and limits.accepting),
            "max_lag": limits.max_lag if limits else None,
            "dropped_groups": dict(counts.dropped),
            "dropped_sessions": await reading.dropped_sessions(),
            "masked_tokens": await reading.masked_tokens(),
            "losses": [msgspec.to_builtins(loss) for loss in await reading.losses()],
            "tokens": {
                "recorded": counts.recorded_tokens,
                "trained": counts.trained_tokens,
                "masked": counts.masked_tokens,
                "dropped": counts.dropped_tokens,
                "pending": pending,
            },
            "workers": [
                {"id": one.id, "running": one.running_sessions, "pid": one.pid, "heartbeat_at": one.heartbeat_at}
                for one in workers
            ],
            "curves": self._curves(),
        }

    async def sessions(self, limit: int, running: bool | None) -> dict[str, Any]:
        found = await self._store.reading.recent(limit, running=running)
        return {"run": self._facts.name, "sessions": [_summary(one) for one in found]}

    async def session(self, session_id: str) -> dict[str, Any]:
        summary = await self._store.reading.session(session_id)
        if summary is None:
            raise NotFound(f"no session {session_id!r} in this run; look at the list for its id")
        interactions = await self._store.sessions.interactions(session_id)
        credits = export.discounted_rewards(interactions, self._facts.turn_discount, self._facts.reward_clip)
        by_id = {one.id: one for one in interactions}
        found = statistics(summary, interactions)
        return {
            "run": self._facts.name,
            "session": _summary(summary) | {"tags": dict(summary.session.tags), "group": summary.session.group_id},
            "statistics": {
                "rows": found.rows,
                "mergeable": found.mergeable,
                "merged": found.merged,
                "branches": found.reasons,
                "tokens": msgspec.to_builtins(found.tokens),
            },
            "turn_discount": self._facts.turn_discount,
            "interactions": [
                self._interaction(one, by_id.get(one.credit_parent or ""), credits[one.id]) for one in interactions
            ],
        }

    def _curves(self) -> list[dict[str, Any]]:
        """Read again only when the file has grown or was replaced."""
        try:
            state = os.stat(self._metrics_path)
            if self._metrics_state != (state.st_size, state.st_ino):
                self._metrics = read_metrics(self._metrics_path, self._facts.run_id)
                self._metrics_state = (state.st_size, state.st_ino)
        except FileNotFoundError:  # the first step is not done yet
            return []
        curves = []
        for name, title in CURVES:
            series = self._metrics.series(name)
            if series.steps:
                values = [value if math.isfinite(value) else None for value in series.values]
                curves.append({"name": name, "title": title, "steps": series.steps, "values": values})
        return curves

    def _interaction(self, one: Interaction, parent: Interaction | None, credit: float) -> dict[str, Any]:
        done = one.completion
        known = len(parent.messages) + 1 if parent is not None else 0
        return {
            "id": one.id,
            "index": one.index,
            "model": one.model,
            "tags": list(one.tags),
            "masked_for": export.mask_reason(one),
            "fork": None if one.fork is None else msgspec.to_builtins(one.fork),
            "continues": one.credit_parent,
            "extends_tokens_of": one.token_parent,
            "messages": [_message(message) for message in one.messages[known:]],
            "reply": _message(one.reply),
            "reward": one.reward,
            "credit": credit,
            "finish_reason": done.finish_reason,
            "temperature": done.temperature,
            "seconds": one.finished_at - one.started_at,
            "prompt_tokens": len(one.prompt_ids),
            "token_ids": done.token_ids.tolist(),
            "texts": [self._text(token) for token in done.token_ids.tolist()],
            "logprobs": [value if math.isfinite(value) else None for value in done.logprobs.tolist()],
            "versions": done.versions.tolist(),
            "kept_mass": [value if math.isfinite(value) else None for value in done.kept_mass.tolist()],
            "trained": export.trained_mask(one).tolist(),
        }

    def _text(self, token_id: int) -> str | None:
        """A token's own text; bytes that are no character by themselves are spelled in hex; None without a tokenizer."""
        tokenizer = self._facts.tokenizer
        if tokenizer is None:
            return None
        piece = tokenizer.piece(token_id)
        if not piece:
            return tokenizer.decode([token_id], skip_special=False)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return f"⟨{piece.hex(' ')}⟩"


def _summary(one: SessionSummary) -> dict[str, Any]:
    session = one.session
    return {
        "id": session.id,
        "task": session.task_id,
        "sample": session.sample,
        "purpose": session.purpose,
        "worker": session.worker,
        "started_at": session.started_at,
        "ended_at": session.ended_at,
        "ending": session.ending,
        "interactions": session.interaction_count,
        "recorded": one.recorded_tokens,
        "trained": one.trained_tokens,
        "masked": one.masked_tokens,
        "reward": one.reward,
        "fate": one.fate,
    }


def _message(message: Message) -> dict[str, Any]:
    calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    return {"role": message.role, "content": message.content, "reasoning": message.reasoning, "tool_calls": calls}
