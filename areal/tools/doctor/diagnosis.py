"""What a run of an agent left in the store: sessions, turns, tool calls, rewards, rows, and where every token went.

    found = await diagnose(store, turn_discount=1.0)
    found.sessions, found.calls, found.merged, found.mergeable, found.tokens

Numbers per session come from proxy/statistics.py and proxy/export.py; here they are only added up, and read for what only this page
asks: dialects, tool calls that could not be read, rows as each style makes them. Used by findings.py and report.py.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from areal.base.types import ExportStyle, Interaction, Session
from areal.chat.tool_formats import TOOL_FORMATS
from areal.proxy import export
from areal.proxy.dialects import dialects
from areal.proxy.statistics import Branch, Statistics, TokenSums, statistics
from areal.store.base import SessionSummary, Store
from areal.web.topic import Topic

MOST_SESSIONS = 100_000
DIALECT_NAMES: Mapping[str, str] = {
    "openai_chat": "OpenAI Chat Completions",
    "openai_responses": "OpenAI Responses",
    "anthropic_messages": "Anthropic Messages",
}


@dataclass(frozen=True, slots=True)
class RowSums:
    """Training rows of one style. tokens: prompts and answers in them, padding aside."""

    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """offered: answers that could have called a tool. parsed: calls that were read; malformed: those of them whose arguments
    are no JSON object. unread: answers with tools that hold a call's marker and no call."""

    offered: int = 0
    parsed: int = 0
    malformed: int = 0
    unread: int = 0


@dataclass(frozen=True, slots=True)
class SessionFound:
    """One session. opened_by: "start_session", or how a session under the internal token was found: "hint", "conversation"."""

    session: Session
    fate: str
    opened_by: str
    statistics: Statistics
    dialects: tuple[str, ...]
    tools: ToolCalls
    cut: int  # answers that ended at their token limit or at the end of the context
    rows: Mapping[ExportStyle, RowSums]

    @property
    def agent(self) -> str:
        """What the client calls itself, where it was recorded."""
        return self.session.tags.get("user_agent", "")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All sessions, in the order in which they began."""

    sessions: tuple[SessionFound, ...]

    @property
    def played(self) -> tuple[SessionFound, ...]:
        """Those in which something was recorded."""
        return tuple(one for one in self.sessions if one.statistics.interactions)

    @property
    def calls(self) -> int:
        return self._sum(lambda one: one.statistics.calls)

    @property
    def mergeable(self) -> int:
        return self._sum(lambda one: one.statistics.mergeable)

    @property
    def merged(self) -> int:
        return self._sum(lambda one: one.statistics.merged)

    @property
    def rewards_set(self) -> int:
        return self._sum(lambda one: one.statistics.rewards_set)

    @property
    def reward_sum(self) -> float:
        return sum(one.statistics.reward_sum for one in self.sessions)

    @property
    def cut(self) -> int:
        return self._sum(lambda one: one.cut)

    @property
    def dialects(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for one in self.sessions for name in one.dialects))

    @property
    def branches(self) -> tuple[tuple[SessionFound, Branch], ...]:
        return tuple((one, branch) for one in self.sessions for branch in one.statistics.branches)

    @property
    def tools(self) -> ToolCalls:
        every = [one.tools for one in self.sessions]
        return ToolCalls(
            sum(one.offered for one in every),
            sum(one.parsed for one in every),
            sum(one.malformed for one in every),
            sum(one.unread for one in every),
        )

    @property
    def tokens(self) -> TokenSums:
        every = [one.statistics.tokens for one in self.sessions]
        return TokenSums(
            recorded=sum(one.recorded for one in every),
            trained=sum(one.trained for one in every),
            masked=_added(one.masked for one in every),
            dropped=_added(one.dropped for one in every),
        )

    def rows(self, style: ExportStyle) -> RowSums:
        """Over all sessions, whatever becomes of them."""
        every = [one.rows[style] for one in self.sessions]
        return RowSums(sum(one.rows for one in every), sum(one.tokens for one in every))

    def _sum(self, number: Callable[[SessionFound], int]) -> int:
        return sum(map(number, self.sessions))


async def diagnose(store: Store, *, turn_discount: float) -> Diagnosis:
    """Read every session of the store."""
    summaries = await store.reading.recent(MOST_SESSIONS)
    found = [
        _session(summary, await store.sessions.interactions(summary.session.id), turn_discount)
        for summary in reversed(summaries)
    ]
    return Diagnosis(tuple(found))


def _session(summary: SessionSummary, interactions: Sequence[Interaction], turn_discount: float) -> SessionFound:
    prefixes = {dialect.id_prefix: dialect.name for dialect in dialects()}
    spoken = (name for one in interactions for prefix, name in prefixes.items() if one.id.startswith(prefix))
    styles: tuple[ExportStyle, ...] = ("individual", "concat")
    rows = {style: export.rows(summary.session, interactions, style, turn_discount) for style in styles}
    return SessionFound(
        session=summary.session,
        fate=summary.fate,
        opened_by=_opened_by(summary.session),
        statistics=statistics(summary, interactions),
        dialects=tuple(dict.fromkeys(spoken)),
        tools=_tools(interactions),
        cut=sum(one.completion.finish_reason == "length" for one in interactions),
        rows={style: RowSums(len(made), sum(len(row.token_ids) for row in made)) for style, made in rows.items()},
    )


def _opened_by(session: Session) -> str:
    """Sessions that opened by themselves are named after their topic, and tagged with the client's name."""
    kinds = [
        topic.kind
        for topic in (Topic("hint", ""), Topic("conversation", ""))
        if session.task_id.startswith(topic.task_id)
    ]
    return kinds[0] if kinds and "user_agent" in session.tags else "start_session"


def _tools(interactions: Iterable[Interaction]) -> ToolCalls:
    marks = {mark for form in TOOL_FORMATS.values() if form is not None for mark in form.marks}
    offered = [one for one in interactions if one.tools]
    calls = [call for one in offered for call in one.reply.tool_calls]
    return ToolCalls(
        offered=len(offered),
        parsed=len(calls),
        malformed=sum(not _is_object(call.arguments) for call in calls),
        unread=sum(not one.reply.tool_calls and any(mark in one.reply.content for mark in marks) for one in offered),
    )


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(sorted(total.items()))
