"""What a call's prompt will be: the recorded ids of the conversation it continues, or a new branch and why.

    plan = make_plan(renderer, conversation.continued_by(call), call, max_context, new_branch="history_changed")
    plan.prompt.ids, plan.prompt.parent, plan.credit_parent, plan.branch_reason

Two parents (settled 5): token_parent (prompt.parent) is the interaction whose ids the prompt extends, credit_parent the one
whose conversation the messages continue. A template that rewrites history breaks the first and not the second. Answers that
come back are taken as they were recorded: clients drop reasoning and print arguments anew, which a template must not
see. Pure, but for the renderer's work. Used by recorder.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal.base.errors import ContextOverflow
from areal.base.types import Interaction, Message, ModelCall
from areal.chat.base import Mismatch, RenderedPrompt, Renderer


@dataclass(frozen=True, slots=True)
class Plan:
    """messages: the call's, with recorded answers in place of their echoes. reused_tokens: how many of the prompt's ids are
    recorded ones. branch_reason: empty if it is a continuation."""

    messages: tuple[Message, ...]
    prompt: RenderedPrompt
    credit_parent: str | None
    branch_reason: str
    reused_tokens: int


def make_plan(
    renderer: Renderer, candidates: list[Interaction], call: ModelCall, max_context: int, *, new_branch: str
) -> Plan:
    """Render the call. candidates: what it may continue, best first (Conversation.continued_by); new_branch: the reason
    to store where there is none. Raises ContextOverflow, and BadRequest with the template's reason. Thread-safe."""
    messages = _as_recorded(candidates[0], call.messages) if candidates else call.messages
    prompt, parent, reason = None, None, ""
    for recorded in candidates:
        found = renderer.extend(recorded, messages, call.tools, call.template_kwargs)
        if not isinstance(found, Mismatch):
            prompt, parent, reason = found, recorded, ""
            break
        reason = reason or found.reason
    if prompt is None:
        prompt = renderer.render(messages, call.tools, call.template_kwargs)
        reason = reason or new_branch
    if len(prompt.ids) >= max_context:
        raise ContextOverflow(len(prompt.ids), max_context)
    reused = 0 if parent is None else len(parent.prompt_ids) + len(parent.completion.token_ids)
    credit = parent or (candidates[0] if candidates else None)
    return Plan(messages, prompt, None if credit is None else credit.id, reason, reused)


def _as_recorded(recorded: Interaction, messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages, whose leading ones are the recorded conversation, with its own assistant turns."""
    history = (*recorded.messages, recorded.reply)
    leading = zip(history, messages, strict=False)
    turns = (ours if ours.role == "assistant" else theirs for ours, theirs in leading)
    return (*turns, *messages[len(history) :])
