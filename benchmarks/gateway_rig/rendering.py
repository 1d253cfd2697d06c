"""What a turn of a long conversation costs before the model is asked: 100 turns, 27k tokens, real tokenizer.

The proxy's own code in this process, as the recorder runs it: find the recorded conversation, then render what is new and
check it against the template. CPU time of this thread. Two templates: the bundled model's, and one that strips reasoning and shows tool
calls, as Qwen3's does.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from areal.base.types import Completion, Interaction, Message, ModelCall, Tool, ToolCall
from areal.chat import ChatTemplate, JinjaRenderer, load_renderer
from areal.models.fetch import resolve
from areal.proxy.conversation import Conversation
from areal.proxy.plan import Plan, make_plan
from gateway_rig.client import WORDS
from gateway_rig.report import Report

TURNS = 100
QUESTION_WORDS, ANSWER_WORDS = 120, 130
MAX_CONTEXT = 1 << 20
STRIPPING = Path(__file__).parents[2] / "tests" / "chat" / "templates" / "thinking_stripped.jinja"
TOOL = Tool("lookup", "Looks something up.", {"type": "object", "properties": {"words": {"type": "string"}}})


@dataclass(slots=True)
class _Counting:
    """How many tokens were made of text."""

    encode: Callable[[str], list[int]]
    tokens: int = 0

    def __call__(self, text: str) -> list[int]:
        ids = self.encode(text)
        self.tokens += len(ids)
        return ids


def run(report: Report, *, quick: bool) -> None:
    folder = resolve("smollm2-135m")
    own = load_renderer(folder)
    stripping = JinjaRenderer(own.tokenizer, ChatTemplate(STRIPPING.read_text("utf-8"), own.tokenizer.special_tokens))
    repeats = 5 if quick else 30
    report.heading(f"Rendering turn {TURNS} of a long conversation, median of {repeats}")
    for name, renderer, tools in (("ChatML", own, ()), ("stripping, with tool calls", stripping, (TOOL,))):
        _measure(report, name, renderer, tools, repeats)


def _measure(report: Report, name: str, renderer: JinjaRenderer, tools: tuple[Tool, ...], repeats: int) -> None:
    counting = renderer.tokenizer.encode = _Counting(renderer.tokenizer.encode)
    talk, draw = Conversation(), random.Random(1)
    messages: list[Message] = [Message("system", "You look things up and say what they are about.")]
    times: dict[int, float] = {}
    for turn in range(1, TURNS + 1):
        called = bool(tools) and turn % 2 == 0
        said = " ".join(draw.choices(WORDS, k=QUESTION_WORDS))
        messages.append(Message("tool", said, tool_call_id=f"call{turn - 1}") if called else Message("user", said))
        call = ModelCall(tuple(messages), tools)
        counting.tokens = 0
        again = partial(_planned, renderer, talk, call)
        plan, times[turn] = _timed(again, repeats if turn in (10, TURNS) else 1)
        new = counting.tokens // (repeats if turn in (10, TURNS) else 1)
        one = _sampled(renderer, plan, call, draw, turn, calls=bool(tools) and turn % 2 == 1)
        talk.add(one)
        messages.append(one.reply)
    report.note(f"{name}: tokens of the prompt", f"{len(plan.prompt.ids):10}, continues {plan.prompt.parent}")
    whole, seconds = _timed(partial(renderer.render, call.messages, call.tools), repeats)
    report.note(f"{name}: turn 10", f"{times[10] * 1e3:10.2f} ms")
    report.note(f"{name}: rendering it whole", f"{seconds * 1e3:10.2f} ms, {len(whole.ids)} tokens made of text")
    report.figure(f"{name}: turn {TURNS}", times[TURNS] * 1e3, "ms", at_most=5)
    report.figure(
        f"{name}: dearest turn after the first ten", max(times[k] for k in times if k > 10) * 1e3, "ms", at_most=50
    )
    report.figure(f"{name}: tokens made of text in turn {TURNS}", new, at_most=2 * QUESTION_WORDS)
    renderer.tokenizer.encode = counting.encode


def _planned(renderer: JinjaRenderer, talk: Conversation, call: ModelCall) -> Plan:
    found = talk.continued_by(call)
    return make_plan(renderer, found, call, MAX_CONTEXT, talk.divergence(call, found))


def _timed(work: Callable[[], Plan], repeats: int) -> tuple[Plan, float]:
    spent = []
    for _ in range(repeats):
        began = time.thread_time()
        result = work()
        spent.append(time.thread_time() - began)
    return result, statistics.median(spent)


def _sampled(
    renderer: JinjaRenderer, plan: Plan, call: ModelCall, draw: random.Random, turn: int, *, calls: bool
) -> Interaction:
    """What the recorder would store: an answer, or a tool call, that ends with the model's end token."""
    said = " ".join(draw.choices(WORDS, k=ANSWER_WORDS))
    text, reply = said, Message("assistant", said)
    if calls:
        arguments = json.dumps({"words": said})
        text = f'<tool_call>\n{{"name": "lookup", "arguments": {arguments}}}\n</tool_call>'
        reply = Message("assistant", tool_calls=(ToolCall(f"call{turn}", "lookup", arguments),))
    ids = np.array([*renderer.tokenizer.encode(text), renderer.tokenizer.eos_ids[-1]], dtype=np.int32)
    none, ones = np.zeros(len(ids), np.float32), np.ones(len(ids), np.float32)
    done = Completion(ids, none, np.zeros(len(ids), np.int32), ones, 1.0, "stop")
    return Interaction(
        f"turn-{turn}", "s", turn, plan.prompt.ids, done, plan.messages, reply, call.tools,
        token_parent=plan.prompt.parent, credit_parent=plan.credit_parent,
    )  # fmt: skip
