"""What to change, by reason: sentences for masked and dropped tokens and for branches, and what is known of single clients.

    MASKED["greedy"], DROPPED["expired"], FORKED["system_changed"]
    client_advice("claude-cli/2.1 (external)", fork)          # "" where nothing more is known

A test holds that every tag and every reason of a lost branch has its sentence. Facts on clients were measured with the versions
named in docs/clients.md. Pure. Used by findings.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from areal.base.types import Fork

MASKED: Mapping[str, str] = {
    "greedy": "temperature 0 has no probabilities to learn from: let the agent name no temperature (gconfig.temperature holds then), or "
    "set rollout.agent.sampling=policy, which ignores what clients ask for",
    "aborted": "the client hung up, or its session ended, in mid-answer: raise the client's time-out, read streams to their end, and end "
    "the session after the last answer",
    "superseded": "the client asked again although an answer existed: its time-out is too short, or it repeats a stream without one",
    "side_request": "these calls name another model than the session's first and are no step of the task (titles, summaries); if they are, "
    "let them name the same model",
    "untrainable": "the backend gave no finite log-probability; the worker's log names the interactions",
    "constrained": "these tokens were chosen under a grammar (tool_choice, JSON schema); let the model choose freely what it is to learn",
    "scripted_history": "these tokens were not sampled by the policy",
    "stale": "they were older than rollout.max_head_offpolicyness when a step would have trained them",
}
DROPPED: Mapping[str, str] = {
    "expired": "the session idled out without a reward: call POST /rl/set_reward, then /rl/end_session, before the agent ends",
    "empty": "the session ended before its first answer",
    "reward_failed": "the agent or its reward failed; its own output says why",
    "evaluation": "purpose eval is never trained; start the session with purpose train",
    "excluded": "the session was taken out of training by hand",
    "late": "its group went on without it: raise rollout.group_timeout_seconds",
    "too_few_survivors": "too few sessions of its group ended well",
}
FORKED: Mapping[str, str] = {
    "new_conversation": "a session with several conversations is credited as one; give each its own session if they are separate tasks",
    "side_request": "turn off what the agent asks for beside the task (titles, suggestions), or leave it: it is masked",
    "resampled": "the agent asks the same question again: both answers are trained, and their reward is averaged before them",
    "retried": "see in the agent's output why it asked again; a longer time-out helps most",
    "system_changed": "keep what changes from turn to turn (time, memory, file lists) out of the system turn; put it into the newest user turn",
    "tools_changed": "offer the same tools in the same order in every call of a conversation",
    "history_changed": "add to the conversation and do not edit what was sent before; put reminders into the newest turn only",
    "answer_changed": "send answers back as they came: same text, same tool calls; do not turn them into text of your own",
    "fabricated_turn": "an answer that the model did not give is context only: put examples before the first answer, or into the system turn",
    "context_moved": "leave a turn where it was sent first; a trailing context that moves along makes every turn a row of its own",
    "turns_dropped": "keep answers in the history, also those without a tool call; raise the agent's own context limit if it trims",
    "compacted": "a summary begins a new row, which is as it must be; raise the agent's context limit where it comes too early",
    "reasoning_stripped": "the model's template forgets reasoning at the next question: rows end there, as they do when the model is served; "
    "a template that keeps it, or rollout.agent.export_style=individual, makes it no cost",
    "template_rewrites": "the model's chat template writes history differently once it goes on; choose one that only adds",
    "template_arguments": "send the same chat_template_kwargs with every call of a conversation",
    "not_reproducible": "an answer cut at a stop text goes on in its own tokens: let the model's end token end answers, without stop texts",
}


def client_advice(user_agent: str, fork: Fork) -> str:
    """What is known to mend this in a client, by its User-Agent and by what stands in the differing tokens."""
    shown = f"{fork.before}{fork.recorded}{fork.requested}"
    if "x-anthropic-billing-header" in shown or "cc_version" in shown:
        return "set CLAUDE_CODE_ATTRIBUTION_HEADER=0, which takes the changing billing line out of Claude Code's system turn"
    known = user_agent.lower()
    if known.startswith("claude-cli"):
        return (
            "for Claude Code set DISABLE_PROMPT_CACHING=1, CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS=1, CLAUDE_CODE_ATTRIBUTION_HEADER=0 and "
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1"
        )
    if fork.reason == "context_moved" and "internal context" in shown.lower():
        return "this is OpenClaw's trailing internal context; its Responses provider keeps the history in place"
    if known.startswith("qwencode") and fork.reason == "new_conversation":
        return "qwen-code asks for memories after an answer without a tool call; that is a conversation of its own"
    return ""
