"""What a call's prompt will be: the recorded ids of the conversation it continues, or a new branch and why.

    plan = make_plan(renderer, live.conversation, call, max_context, side_request=False)
    plan.prompt.ids, plan.prompt.parent, plan.credit_parent, plan.branch_reason

Two parents (settled 5): token_parent (prompt.parent) is the interaction whose ids the prompt extends, credit_parent the one
whose conversation the messages continue. A template that rewrites history breaks the first and not the second. Pure,
but for the renderer's work. Used by recorder.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal.base.errors import ContextOverflow
from areal.base.types import Interaction, ModelCall
from areal.chat.base import Mismatch, RenderedPrompt, Renderer
from areal.proxy.conversation import Conversation


@dataclass(frozen=True, slots=True)
class Plan:
    """reused_tokens: how many of the prompt's ids are recorded ones. branch_reason: empty if it is a continuation."""

    prompt: RenderedPrompt
    credit_parent: str | None
    branch_reason: str
    reused_tokens: int
    side_request: bool


def make_plan(
    renderer: Renderer, conversation: Conversation, call: ModelCall, max_context: int, *, side_request: bool
) -> Plan:
    """Find the recorded conversation and render. Raises ContextOverflow, and BadRequest with the template's reason."""
    candidates = conversation.continued_by(call)
    prompt, reason = _extended(renderer, candidates, call)
    if prompt is None:
        prompt = renderer.render(call.messages, call.tools, call.template_kwargs)
        reason = reason or conversation.branch_reason(call)
    if len(prompt.ids) >= max_context:
        raise ContextOverflow(len(prompt.ids), max_context)
    parent = next((one for one in candidates if one.id == prompt.parent), candidates[0] if candidates else None)
    reused = 0
    if parent is not None and prompt.parent == parent.id:
        reused = len(parent.prompt_ids) + len(parent.completion.token_ids)
    return Plan(prompt, parent.id if parent else None, reason, reused, side_request)


def _extended(renderer: Renderer, candidates: list[Interaction], call: ModelCall) -> tuple[RenderedPrompt | None, str]:
    """The first candidate that can be continued token by token; else the first one's reason why not."""
    reason = ""
    for recorded in candidates:
        found = renderer.extend(recorded, call.messages, call.tools, call.template_kwargs)
        if not isinstance(found, Mismatch):
            return found, ""
        reason = reason or found.reason
    return None, reason
