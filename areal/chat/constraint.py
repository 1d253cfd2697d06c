"""A constraint on an answer as the grammar that keeps it, in the way this model writes reasoning, calls and JSON.

    text = constrained_grammar(constraint, form, tokenizer, template=source)     # goes with the request to the server

What is sampled under it is read back by stream_parser.py as what was asked for. A model whose chat template knows reasoning may think
first, freely; the constraint holds from the end of its thoughts on. Several calls are at most 16. Raises BadRequest where the
call has no such tool, or this model's format no way to write it. Used by renderer.py.
"""

from __future__ import annotations

from areal.base.errors import BadRequest
from areal.base.types import Constraint, Tool
from areal.chat.base import Tokenizer
from areal.chat.grammar import Rules
from areal.chat.stream_parser import AnswerForm

MOST_CALLS = 16
_LINES = "/\\n{0,2}/"  # between reasoning and answer


def constrained_grammar(
    constraint: Constraint, form: AnswerForm, tokenizer: Tokenizer, *, template: str, prompt: str
) -> str:
    """form: how the answer will be read. template: the chat template's source. prompt: the rendered prompt."""
    rules = Rules(tokenizer)
    answers = []
    tools = _forced(constraint, form.tools)
    if tools and form.tool_format is not None:
        most = MOST_CALLS if constraint.parallel else 1
        answers.append(form.tool_format.required(rules, tools, most=most, template=template))
    elif tools and constraint.schema is None:
        raise BadRequest(
            "tool_choice cannot force a call: rollout.agent.tool_call_parser is `none`, so no format of calls is known; "
            "send auto or none, or configure the parser",
            param="tool_choice",
        )
    if constraint.schema is not None:
        answers.append(rules.json(constraint.schema, lenient=constraint.lenient))
    answer = answers[0] if len(answers) == 1 else rules.either(*answers)
    if rules.gap():  # also before the whole of it
        answer = rules.rule(rules.gap(), answer)
    return rules.text(_after_reasoning(rules, answer, form, template, prompt))


def _forced(constraint: Constraint, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """The tools that may be called under it. Raises BadRequest."""
    if constraint.calls is None:
        return ()
    if not tools and constraint.schema is None:
        raise BadRequest("tool_choice needs `tools` to choose from", param="tool_choice")
    known = {tool.name: tool for tool in tools}
    missing = [name for name in constraint.calls if name not in known]
    if missing:
        raise BadRequest(
            f"tool_choice names {missing[0][:60]!r}, but the tools of this call are {', '.join(known)[:300] or 'none'}; name one of "
            "them, or send auto",
            param="tool_choice",
        )
    return tuple(known[name] for name in constraint.calls) or tuple(known.values())


def _after_reasoning(rules: Rules, answer: str, form: AnswerForm, template: str, prompt: str) -> str:
    style = form.reasoning
    if style is None:
        return answer
    if form.in_reasoning:
        return rules.rule(rules.until(style.closing), _LINES, answer)
    if style.closing not in template or prompt.rstrip().endswith(style.closing):
        return answer  # a model without reasoning, or one that was told to answer at once
    thoughts = rules.rule(rules.marker(style.opening), rules.until(style.closing), _LINES)
    return rules.rule(f"{thoughts}?", answer)
