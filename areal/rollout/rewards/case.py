"""What a reward source sees of a session: its task, the conversation of its last answer, and every answer that may be rewarded.

    case = case_of(session, interactions, task)
    case.messages          # OpenAI's shape, the last answer among them
    case.answers           # [{"id": "chatcmpl-…", "role": "assistant", "content": "4", …}, …]
    case.text              # the last answer as text

An answer that was superseded, aborted or is a side request is none (settled 10); of a call with several choices each is one. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal.base.types import Interaction, Message, Session

_NO_ANSWER = frozenset({"side_request", "superseded", "aborted"})

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """See the module. group_id: empty for evaluation. task: the task's data, empty where the run has none of it."""

    session_id: str
    group_id: str
    task_id: str
    task: Mapping[str, Any]
    messages: tuple[Json, ...]
    answers: tuple[Json, ...]

    @property
    def text(self) -> str:
        """The last answer: its text, else the tools that it called."""
        return text_of(self.answers[-1])

    @property
    def ids(self) -> frozenset[str]:
        """Of the answers; the bare id of a call with choices is one too."""
        names = [str(answer["id"]) for answer in self.answers]
        return frozenset([*names, *(name.partition("#")[0] for name in names)])


def case_of(session: Session, interactions: Sequence[Interaction], task: Mapping[str, Any]) -> Case:
    """A session without an answer has a case with none; nobody can reward it."""
    answered = [one for one in interactions if not _NO_ANSWER & set(one.tags)]
    last = max(answered, key=lambda one: one.finished_at, default=None)
    in_order = [one for one in answered if one is not last] + ([last] if last is not None else [])
    return Case(
        session_id=session.id,
        group_id=session.group_id,
        task_id=session.task_id,
        task=task,
        messages=() if last is None else tuple(as_openai(message) for message in (*last.messages, last.reply)),
        answers=tuple({"id": one.id, **as_openai(one.reply)} for one in in_order),
    )


def as_openai(message: Message) -> Json:
    """One message in the shape of Chat Completions; reasoning stands beside the content where there is any."""
    shown: Json = {"role": message.role, "content": message.content}
    if message.reasoning:
        shown["reasoning_content"] = message.reasoning
    if message.tool_calls:
        shown["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        shown["tool_call_id"] = message.tool_call_id
    if message.name:
        shown["name"] = message.name
    return shown


def text_of(message: Mapping[str, Any]) -> str:
    """What a message says: its content, then the calls it makes, one a line."""
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls", ())]
    return "\n".join([part for part in (message["content"],) if part] + calls)
