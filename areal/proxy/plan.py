"""What a call's prompt will be: the recorded ids of the conversation it continues, or a new branch and why.

    found = conversation.continued_by(call)
    plan = make_plan(renderer, found, call, max_context, conversation.divergence(call, found))
    plan.prompt.ids, plan.prompt.parent, plan.credit_parent, plan.fork

Two parents (settled 5): token_parent (prompt.parent) is the interaction whose ids the prompt extends, credit_parent the one
whose conversation the messages continue. A template that rewrites history breaks the first and not the second. Answers that
come back are taken as they were recorded: clients drop reasoning and print arguments anew, which a template must not
see. Pure, but for the renderer's work. Used by recorder.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from areal.base.errors import ContextOverflow
from areal.base.types import Fork, Interaction, Message, ModelCall
from areal.chat.base import Mismatch, RenderedPrompt, Renderer
from areal.proxy.divergence import Divergence, describe


@dataclass(frozen=True, slots=True)
class Plan:
    """messages: the call's, with recorded answers in place of their echoes. reused_tokens: how many of the prompt's ids are
    recorded ones. fork: None if it goes on from recorded tokens and is the first that does, or is the session's first."""

    messages: tuple[Message, ...]
    prompt: RenderedPrompt
    credit_parent: str | None
    fork: Fork | None
    reused_tokens: int


def make_plan(
    renderer: Renderer,
    candidates: list[Interaction],
    call: ModelCall,
    max_context: int,
    divergence: Divergence | None = None,
) -> Plan:
    """Render the call. candidates: what it may continue, best first (Conversation.continued_by); divergence: why it starts
    a row of its own all the same, as far as the messages say. Raises ContextOverflow, and BadRequest with the template's
    reason. Thread-safe."""
    messages = _as_recorded(candidates[0], call.messages) if candidates else call.messages
    prompt, parent, unlike = None, None, divergence
    for recorded in candidates:
        found = renderer.extend(recorded, messages, call.tools, call.template_kwargs)
        if not isinstance(found, Mismatch):
            prompt, parent = found, recorded
            break
        unlike = unlike or Divergence(found.name, found.reason, recorded)
    if prompt is None:
        prompt, divergence = renderer.render(messages, call.tools, call.template_kwargs), unlike
    if len(prompt.ids) >= max_context:
        raise ContextOverflow(len(prompt.ids), max_context)
    reused = 0 if parent is None else len(parent.prompt_ids) + len(parent.completion.token_ids)
    credit = parent or (candidates[0] if candidates else None)
    fork = None if divergence is None else describe(divergence, prompt.ids, renderer.tokenizer)
    return Plan(messages, prompt, None if credit is None else credit.id, fork, reused)


def _as_recorded(recorded: Interaction, messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages, whose leading ones are the recorded conversation, with its own assistant turns; results name our calls."""
    history = (*recorded.messages, recorded.reply)
    ids: dict[str, str] = {}  # of calls: the client's -> ours
    turns: list[Message] = []
    for k, theirs in enumerate(messages):
        if k < len(history) and theirs.role == "assistant":
            turns.append(history[k])
            pairs = zip(theirs.tool_calls, history[k].tool_calls, strict=True)
            ids |= {sent.id: own.id for sent, own in pairs}
        elif theirs.role == "tool" and ids.get(theirs.tool_call_id, theirs.tool_call_id) != theirs.tool_call_id:
            turns.append(replace(theirs, tool_call_id=ids[theirs.tool_call_id]))
        else:
            turns.append(theirs)
    return tuple(turns)
