"""Why a call goes on from nothing that its session has recorded: where the messages part, and what such a parting is called.

    found = diverge(call, ends)                      # ends: recorded conversations that nothing has gone on from yet
    found.reason, found.detail, found.against        # "system_changed", "message 0 (system) says something else", Interaction
    fork = describe(found, prompt_ids, tokenizer)    # with the first token that differs, decoded on both sides

The call is compared with the recorded conversation that shares most with it, message by message in canonical form (chat/canonical.py).
A name is a guess at what a client did, made from the messages alone; the tokens beside it are facts. docs/http.md says what
each name means, tools/doctor what to do about it. Pure. Used by conversation.py (when) and plan.py (the tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from areal.base.types import BranchReason, Fork, IntArray, Interaction, Message, ModelCall
from areal.chat.base import Tokenizer
from areal.chat.canonical import message_key, placed, tools_key, visible

SHOWN_TOKENS = 24  # of each side, from the first that differs
SHOWN_BEFORE = 16  # of what both have in common
_SUMMARY = 40  # characters without white space from which a recorded answer inside another message is no chance


@dataclass(frozen=True, slots=True)
class Divergence:
    """against: the recorded conversation (messages and reply) that the call was compared with."""

    reason: BranchReason
    detail: str
    against: Interaction


@dataclass(frozen=True, slots=True)
class _Talk:
    """Messages in canonical order, with their keys; `lead` of them are the system turns at the beginning."""

    messages: Sequence[Message]
    keys: Sequence[bytes]
    lead: int

    @classmethod
    def of(cls, messages: Sequence[Message], known: dict[int, bytes]) -> _Talk:
        """known: keys of messages by identity; the same objects stand in many conversations."""
        pairs = placed(messages)
        turns = [one for one, _ in pairs]
        keys = [(known.get(id(one)) or known.setdefault(id(one), message_key(one))) + place for one, place in pairs]
        return cls(turns, keys, len(list(takewhile(lambda one: one.role == "system", turns))))

    @property
    def body(self) -> Sequence[bytes]:
        return self.keys[self.lead :]

    def said(self, at: int, count: int = 1) -> str:
        """Message `at` of the body, counted over the whole conversation."""
        number, role = self.lead + at, self.messages[self.lead + at].role
        return f"message {number} ({role})" if count == 1 else f"messages {number} to {number + count - 1}"

    def answers(self, start: int, end: int) -> bool:
        """Whether a turn of the assistant stands in this part of the body."""
        return any(one.role == "assistant" for one in self.messages[self.lead + start : self.lead + end])


def diverge(call: ModelCall, ends: Sequence[Interaction]) -> Divergence:
    """Compare with the nearest of `ends` (at least one; in start order)."""
    known: dict[int, bytes] = {}
    theirs, tools = _Talk.of(call.messages, known), tools_key(call.tools)

    def nearness(one: Interaction) -> tuple[int, bool, bool, int]:
        ours = _Talk.of((*one.messages, one.reply), known)
        lead = ours.keys[: ours.lead] == theirs.keys[: theirs.lead]
        return _common(ours.body, theirs.body), lead, tools_key(one.tools) == tools, one.index

    nearest = max(ends, key=nearness)
    ours = _Talk.of((*nearest.messages, nearest.reply), known)
    reason, detail = _why(ours, theirs, same_tools=tools_key(nearest.tools) == tools, ends=ends)
    if reason == "new_conversation" and call.agent:
        reason, detail = "sub_agent", f"agent {call.agent[:40]} has begun a conversation of its own"
    return Divergence(reason, detail, nearest)


def describe(found: Divergence, prompt_ids: IntArray, tokenizer: Tokenizer) -> Fork:
    """The divergence with the tokens at which the prompt leaves the recorded row."""
    one = found.against
    row = np.concatenate([one.prompt_ids, one.completion.token_ids])
    shorter = min(len(row), len(prompt_ids))
    differing = np.flatnonzero(row[:shorter] != prompt_ids[:shorter])
    at = int(differing[0]) if len(differing) else shorter

    def text(ids: IntArray) -> str:
        return tokenizer.decode(ids.tolist(), skip_special=False)

    return Fork(
        reason=found.reason,
        detail=found.detail,
        against=one.id,
        position=at,
        before=text(prompt_ids[max(0, at - SHOWN_BEFORE) : at]),
        recorded=text(row[at : at + SHOWN_TOKENS]),
        requested=text(prompt_ids[at : at + SHOWN_TOKENS]),
    )


def _why(ours: _Talk, theirs: _Talk, *, same_tools: bool, ends: Sequence[Interaction]) -> tuple[BranchReason, str]:
    recorded = set(ours.body)
    echoed = any(theirs.answers(k, k + 1) and key in recorded for k, key in enumerate(theirs.body))
    if not echoed and not _common(ours.body, theirs.body):
        if _summarised(theirs, ours, ends):
            return "compacted", "a recorded answer comes back inside another message, its conversation is gone"
        return "new_conversation", "nothing of a recorded conversation is in it"
    if ours.keys[: ours.lead] != theirs.keys[: theirs.lead]:
        at = _common(ours.keys[: ours.lead], theirs.keys[: theirs.lead])
        return "system_changed", f"message {at} (system) {_unlike(ours, theirs, at)}"
    if not same_tools:
        return "tools_changed", "the list of tools is another one"
    at = _common(ours.body, theirs.body)
    if at == len(ours.body):
        return "parallel", "another call goes on from the same answer at the same time"
    if at == len(theirs.body):
        return "history_changed", f"it ends before {ours.said(at)} of the recorded conversation"
    return _moved(ours, theirs, at) or _replaced(ours, theirs, at, ends)


def _moved(ours: _Talk, theirs: _Talk, at: int) -> tuple[BranchReason, str] | None:
    """What both have stands elsewhere: something was taken out before it, or put in. None if something stands in its place."""
    if theirs.body[at] in ours.body[at:]:
        count = list(ours.body[at:]).index(theirs.body[at])
        if ours.answers(at, at + count) and not set(ours.body[at : at + count]) & set(theirs.body[at:]):
            return "turns_dropped", f"{ours.said(at, count)} of the recorded conversation {_is(count)} left out"
        return "context_moved", f"{ours.said(at, count)} of the recorded conversation {_is(count)} gone or elsewhere"
    if ours.body[at] in theirs.body[at:]:
        count = list(theirs.body[at:]).index(ours.body[at])
        reason: BranchReason = "fabricated_turn" if theirs.answers(at, at + count) else "history_changed"
        return reason, f"{theirs.said(at, count)} {_was(count)} put between recorded ones"
    return None


def _replaced(ours: _Talk, theirs: _Talk, at: int, ends: Sequence[Interaction]) -> tuple[BranchReason, str]:
    later = set(ours.body[at:])
    count = next((k for k, key in enumerate(theirs.body[at:]) if key in later), None)
    if count is not None:  # from there on it is the recorded conversation again
        gone = list(ours.body[at:]).index(theirs.body[at + count])
        if gone > count and ours.answers(at, at + gone):
            return "compacted", f"{ours.said(at, gone)} of the recorded conversation became {theirs.said(at, count)}"
    elif _summarised(theirs, ours, ends):
        return "compacted", f"from {ours.said(at)} on, the recorded conversation became its own summary"
    recorded, sent = ours.answers(at, at + 1), theirs.answers(at, at + 1)
    if sent:
        if recorded:
            return "answer_changed", f"{theirs.said(at)} {_unlike(ours, theirs, theirs.lead + at)}"
        return "fabricated_turn", f"{theirs.said(at)} was never sampled here"
    if recorded:
        return "turns_dropped", f"{ours.said(at)} of the recorded conversation is left out"
    return "history_changed", f"{theirs.said(at)} {_unlike(ours, theirs, theirs.lead + at)}"


def _unlike(ours: _Talk, theirs: _Talk, at: int) -> str:
    """How message `at` differs, in words."""
    if at >= min(len(ours.messages), len(theirs.messages)):
        return "is new" if at < len(theirs.messages) else "is gone"
    one, other = ours.messages[at], theirs.messages[at]
    if one.role != other.role:
        return f"stands where the recorded conversation has a {one.role} turn"
    if one.content.strip() == other.content.strip():
        return (
            "has other tool calls"
            if one.tool_calls or other.tool_calls
            else "answers another call, or under another name"
        )
    return f"differs from character {_common(one.content, other.content)} on"


def _summarised(theirs: _Talk, ours: _Talk, ends: Sequence[Interaction]) -> bool:
    """Whether the text of a recorded answer stands inside a message that is not the assistant's own."""
    known = set(ours.keys)
    places = [
        _squeezed(one.content)
        for one, key in zip(theirs.messages, theirs.keys, strict=True)
        if one.role != "assistant" and key not in known
    ]
    for end in ends:
        said = visible(end.reply.content)
        inner = said.partition("<summary>")[2].partition("</summary>")[0]  # Claude Code takes what stands between these
        text = _squeezed(inner or said)
        if len(text) >= _SUMMARY and any(text in place for place in places):
            return True
    return False


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    """How many leading items are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((k for k, (a, b) in pairs if a != b), min(len(one), len(other)))


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _was(count: int) -> str:
    return "was" if count == 1 else "were"
