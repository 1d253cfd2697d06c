"""A long conversation goes on through a stand-in: the same prompt as a whole rendering gives, at the cost of what is new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal.base.types import Completion, Interaction, Message, Tool, ToolCall
from areal.chat import ChatTemplate, JinjaRenderer, Mismatch, RenderedPrompt
from areal.chat.template import CHATML
from areal.chat.window import SHORT, stand_in, whole_check_due
from areal.inference.scripted.vocabulary import Vocabulary

Models = dict[str, tuple[Path, JinjaRenderer]]
TOOL = Tool("add", "Adds.", {"type": "object"})
NEXT = Message("user", "and now?")


def chatty(turns: int) -> list[Message]:
    """user, assistant, ..., user."""
    return [Message("assistant" if k % 2 else "user", f"text {k}") for k in range(2 * turns + 1)]


def looping(rounds: int, *, thinking: bool = False) -> list[Message]:
    """One question, then calls and results."""
    messages = [Message("system", "Add."), Message("user", "2+2?")]
    for k in range(rounds):
        call = ToolCall(f"c{k}", "add", f'{{"x": {k}}}')
        messages.append(Message("assistant", reasoning=f"thought {k}" if thinking else "", tool_calls=(call,)))
        messages.append(Message("tool", str(k), tool_call_id=f"c{k}"))
    return messages


def answered(
    renderer: JinjaRenderer, messages: Sequence[Message], reply: str, tools: Sequence[Tool] = ()
) -> Interaction:
    """The interaction that is stored when this reply is sampled after these messages."""
    ids = np.array([*renderer.tokenizer.encode(reply), renderer.tokenizer.eos_ids[0]], np.int32)
    zeros = np.zeros(len(ids), np.float32)
    done = Completion(ids, zeros, np.zeros(len(ids), np.int32), np.ones(len(ids), np.float32), 1.0, "stop")
    prompt = renderer.render(messages, tools)
    return Interaction("one", "s", 0, prompt.ids, done, tuple(messages), Message("assistant", reply), tuple(tools))


class Watched(ChatTemplate):
    """Notes how many messages each rendering was given."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        self.sizes = [*getattr(self, "sizes", []), len(messages)]
        return super().render(messages, tools, kwargs, add_generation_prompt=add_generation_prompt)


@pytest.mark.parametrize("name", ["chatml_default_system", "headers_trimmed", "thinking_stripped"])
@pytest.mark.parametrize("history", [chatty(50), looping(50), [*looping(50)[:-2], Message("user", "stop it")]])
def test_a_long_conversation_goes_on_as_the_template_renders_it(
    name: str, history: list[Message], models_by_template: Models
) -> None:
    renderer = models_by_template[name][1]
    assert len(stand_in(history)) < 24
    recorded = answered(renderer, history, "text", [TOOL])
    messages = [*history, recorded.reply, NEXT]
    assert not whole_check_due(len(history), len(messages))
    prompt = renderer.extend(recorded, messages, [TOOL])
    assert isinstance(prompt, RenderedPrompt), prompt
    assert prompt.ids.tolist() == renderer.render(messages, [TOOL]).ids.tolist()


def test_the_template_sees_a_few_messages_only_and_nothing_old_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    template = Watched(CHATML)
    renderer = JinjaRenderer(Vocabulary({}, []), template)
    recorded = answered(renderer, chatty(100), "text")
    template.sizes.clear()
    tokenised: list[str] = []
    encode = renderer.tokenizer.encode
    monkeypatch.setattr(renderer.tokenizer, "encode", lambda text: tokenised.append(text) or encode(text))
    assert isinstance(renderer.extend(recorded, [*chatty(100), recorded.reply, NEXT]), RenderedPrompt)
    assert max(template.sizes) < 24
    assert sum(map(len, tokenised)) < 200


def test_a_conversation_is_rendered_whole_while_it_is_short_and_when_it_has_grown_by_half() -> None:
    sizes = range(1, 400, 2)
    due = [now for recorded, now in pairwise(sizes) if whole_check_due(recorded, now)]
    assert due == [*range(3, SHORT, 2), 33, 49, 73, 109, 163, 243, 365]


def test_a_difference_is_always_the_whole_conversations(models_by_template: Models) -> None:
    """Thoughts that a new question makes the template forget, long ago or just now, in a conversation of 200 messages."""
    renderer = models_by_template["thinking_stripped"][1]
    thoughtful = looping(1, thinking=True) + looping(98)[2:]
    for history in (looping(99, thinking=True), thoughtful):
        recorded = answered(renderer, history, "<think>\nhm\n</think>\n\ntext", [TOOL])
        outcome = renderer.extend(recorded, [*history, recorded.reply, NEXT], [TOOL])
        assert isinstance(outcome, Mismatch)
        assert outcome.name == "reasoning_stripped"


def test_a_template_that_counts_is_found_out_when_the_conversation_has_grown(models_by_template: Models) -> None:
    forgets = "{% for m in messages[-24:] %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}assistant:"
    renderer = JinjaRenderer(Vocabulary({}, []), ChatTemplate(forgets))
    history = chatty(23)
    recorded = answered(renderer, history, "text")
    messages = [*history, recorded.reply, NEXT]
    assert whole_check_due(len(history), len(messages))
    assert isinstance(renderer.extend(recorded, messages), Mismatch)


def test_a_template_with_call_ids_that_are_counted_over_the_conversation_gets_all_of_it() -> None:
    kimi = CHATML.replace("+ message.content", "+ message.content + (message.tool_calls or [{}])[0].id | default('')")
    template = Watched(kimi + "{# <|tool_calls_section_begin|> #}{{ '' if true else '<|tool_calls_section_begin|>' }}")
    renderer = JinjaRenderer(Vocabulary({}, []), template)
    history = [*looping(60), Message("assistant", "done"), NEXT]
    recorded = answered(renderer, history, "text")
    template.sizes.clear()
    prompt = renderer.extend(recorded, [*history, recorded.reply, NEXT])
    assert isinstance(prompt, RenderedPrompt), prompt
    assert min(template.sizes) >= len(history)


kinds = st.sampled_from(["user", "assistant", "thought", "call", "calls"])


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.lists(kinds, min_size=20, max_size=80))
def test_a_stand_in_has_every_kind_of_turn_and_only_seams_that_were_there(drawn: list[str]) -> None:
    history = [Message("user", "begin")]
    for k, kind in enumerate(drawn):
        if kind == "user":
            history.append(Message("user", f"{k}"))
        elif kind in ("call", "calls"):
            calls = tuple(ToolCall(f"c{k}-{n}", "add", "{}") for n in range(1 + (kind == "calls")))
            history.append(Message("assistant", tool_calls=calls))
            history += [Message("tool", f"{k}", tool_call_id=call.id) for call in calls]
        else:
            history.append(Message("assistant", f"{k}", reasoning="hm" if kind == "thought" else ""))
    short = list(stand_in(history))

    def shape(message: Message) -> tuple[str, bool, int]:
        return message.role, bool(message.reasoning), len(message.tool_calls)

    assert {shape(one) for one in short} == {shape(one) for one in history}
    assert short[:4] == history[:4]
    assert short[-12:] == history[-12:]
    seams = {(shape(a), shape(b)) for a, b in pairwise(history)}
    assert {(shape(a), shape(b)) for a, b in pairwise(short)} <= seams
    asked = {call.id for one in short for call in one.tool_calls}
    assert all(one.tool_call_id in asked for one in short if one.role == "tool")
