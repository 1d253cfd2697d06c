"""Random conversations with tools and reasoning: a call is continued from its own sampled tokens, however it is echoed (T055)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.base.types import Completion, Interaction, Message, ModelCall, TokenChunk, Tool, ToolCall
from areal.chat import ChatTemplate, JinjaRenderer
from areal.chat.template import CHATML
from areal.inference.scripted.vocabulary import Vocabulary
from areal.proxy.conversation import Conversation
from areal.proxy.dialects.openai_chat import OpenAIChat
from areal.proxy.plan import Plan, make_plan

TOOL = Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}})
STRIPPING = Path(__file__).parents[1] / "chat" / "templates" / "thinking_stripped.jinja"
# In the manner of Qwen3-Coder: goes through the arguments, so they have to be an object (T004).
CODER = r"""
{%- if tools %}{{ "<|im_start|>system\n" + (tools | tojson) + "<|im_end|>\n" }}{% endif %}
{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "\n" }}
    {%- if message.reasoning_content %}{{ "<think>" + message.reasoning_content + "</think>" }}{% endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- "\n<tool_call>\n<function=" + call.function.name + ">\n" }}
        {%- for key, value in call.function.arguments.items() %}
            {{- "<parameter=" + key + ">\n" + (value if value is string else value | tojson) + "\n</parameter>\n" }}
        {%- endfor %}
        {{- "</function>\n</tool_call>" }}
    {%- endfor %}
    {{- "<|im_end|>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}
"""
RENDERERS = {
    "no tools section": JinjaRenderer(Vocabulary({}, []), ChatTemplate(CHATML)),
    "stripping": JinjaRenderer(Vocabulary({}, []), ChatTemplate(STRIPPING.read_text())),
    "coder": JinjaRenderer(Vocabulary({}, []), ChatTemplate(CODER)),
}
KEEPING = ["no tools section", "coder"]

texts = st.text(st.sampled_from("ab 4\né"), min_size=1, max_size=6)
values = st.dictionaries(st.sampled_from("ab"), st.text("x<é", max_size=3) | st.integers(0, 9), max_size=2)


def as_hermes(arguments: dict[str, object], spaced: bool) -> str:
    spelt = json.dumps(arguments, separators=(", ", " : ") if spaced else None, ensure_ascii=spaced)
    return f'<tool_call>\n{{"name": "add", "arguments": {spelt}}}\n</tool_call>'


def as_coder(arguments: dict[str, object], spaced: bool) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function=add>\n{inner}</function>{' ' if spaced else ''}\n</tool_call>"


@st.composite
def answers(draw: st.DrawFn, spell: str) -> str:
    """Reasoning, text and calls, any of them missing or malformed."""
    write = as_coder if spell == "coder" else as_hermes
    calls = [write(arguments, draw(st.booleans())) for arguments in draw(st.lists(values, max_size=3))]
    if draw(st.integers(0, 4)) == 0:
        calls.append('<tool_call>\n{"name": "add", "arguments": {"a": "x"y"}}\n</tool_call>')
    thought = draw(st.sampled_from(["", "<think>\nhm é\n</think>\n\n"]))
    return thought + draw(st.sampled_from(["", "Let me look."])) + "\n".join(calls)


def sampled(renderer: JinjaRenderer, plan: Plan, call: ModelCall, text: str, index: int) -> Interaction:
    """The interaction that the recorder stores if this text is sampled."""
    tokenizer = renderer.tokenizer
    ids = np.array([*tokenizer.encode(text), tokenizer.eos_ids[0]], dtype=np.int32)
    n = len(ids)
    zeros, ones = np.zeros(n, np.float32), np.ones(n, np.float32)
    parser = renderer.parser(plan.prompt.text, call.tools)
    parser.feed(TokenChunk(tuple(ids.tolist()), (0.0,) * n, (0,) * n, (1.0,) * n))
    parser.finish()
    completion = Completion(ids, zeros, np.zeros(n, np.int32), ones, 1.0, "stop")
    return Interaction(
        f"i{index}",
        "s",
        index,
        plan.prompt.ids,
        completion,
        plan.messages,
        parser.message(),
        call.tools,
        token_parent=plan.prompt.parent,
        credit_parent=plan.credit_parent,
    )


@st.composite
def echoes(draw: st.DrawFn, reply: Message) -> Message:
    """The reply as some client sends it back (clients were measured): reasoning dropped, arguments and ids written anew."""
    calls = list(reply.tool_calls)
    if draw(st.booleans()):
        calls = [replace(call, id=f"call_{call.id}_fc_0") for call in calls]
    if draw(st.booleans()):
        for k, call in enumerate(calls):
            try:
                value = json.loads(call.arguments)
            except ValueError:
                continue
            again = json.dumps(dict(reversed(value.items())), separators=(",", ":"), ensure_ascii=False)
            calls[k] = replace(call, arguments=again)
    reasoning = draw(st.sampled_from(["", reply.reasoning]))
    return replace(reply, tool_calls=tuple(calls), reasoning=reasoning)


def planned(renderer: JinjaRenderer, talk: Conversation, call: ModelCall) -> Plan:
    found = talk.continued_by(call)
    return make_plan(renderer, found, call, 100_000, talk.divergence(call, found))


def results(data: st.DataObject, calls: Sequence[ToolCall]) -> list[Message]:
    found = [Message("tool", data.draw(texts), tool_call_id=call.id) for call in calls]
    return data.draw(st.permutations(found))


@pytest.mark.parametrize("name", RENDERERS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_T055_any_tool_conversation_goes_on_from_its_sampled_tokens(name: str, data: st.DataObject) -> None:
    renderer, talk = RENDERERS[name], Conversation()
    messages = [Message("user", data.draw(texts))]
    last: Interaction | None = None
    for index in range(data.draw(st.integers(2, 5))):
        call = ModelCall(tuple(messages), tools=(TOOL,))
        plan = planned(renderer, talk, call)
        if last is not None:
            assert plan.credit_parent == last.id
            asked_anew = any(message.role == "user" for message in messages[len(last.messages) + 1 :])
            if name in KEEPING or not asked_anew:
                assert plan.fork is None
            if plan.prompt.parent is not None:
                kept = [*last.prompt_ids.tolist(), *last.completion.token_ids.tolist()]
                assert plan.prompt.ids[: len(kept)].tolist() == kept
                assert plan.reused_tokens == len(kept)
            else:
                assert plan.fork is not None
        last = sampled(renderer, plan, call, data.draw(answers(name)), index)
        talk.add(last)
        echo = data.draw(echoes(last.reply))
        more = results(data, echo.tool_calls) or [Message("user", data.draw(texts))]
        if data.draw(st.integers(0, 3)) == 0:
            more = [*more, Message("user", data.draw(texts))]
        messages = [*messages, echo, *more]


def test_of_two_equal_answers_the_one_goes_on_whose_ids_come_back() -> None:
    renderer, talk = RENDERERS["no tools section"], Conversation()
    call = ModelCall((Message("user", "2+2?"),), tools=(TOOL,))
    twins = [sampled(renderer, planned(renderer, talk, call), call, as_hermes({"a": "x"}, False), k) for k in (0, 1)]
    for one in twins:
        talk.add(one)

    def after(turn: Message, result_of: str) -> Plan:
        result = Message("tool", "4", tool_call_id=result_of)
        return planned(renderer, talk, replace(call, messages=(*call.messages, turn, result)))

    for one in twins:
        plan = after(one.reply, one.reply.tool_calls[0].id)
        assert plan.prompt.parent == one.id
    renamed = replace(one.reply, tool_calls=(replace(one.reply.tool_calls[0], id="its_own"),))
    plan = after(renamed, "its_own")
    assert plan.prompt.parent == twins[1].id
    assert plan.messages[-1].tool_call_id == twins[1].reply.tool_calls[0].id


def test_T051_a_thought_dropped_by_the_client_is_not_dropped_from_the_history() -> None:
    """A template that strips reasoning at the next question is seen to do so although the client sends none back."""
    renderer, talk = RENDERERS["stripping"], Conversation()
    question, tool = Message("user", "2+2?"), ModelCall((Message("user", "2+2?"),), tools=(TOOL,))
    plan = planned(renderer, talk, tool)
    one = sampled(renderer, plan, tool, "<think>\nhm\n</think>\n\n" + as_hermes({"a": "x"}, False), 0)
    talk.add(one)
    assert (one.reply.reasoning, one.reply.content) == ("hm", "")
    echo = replace(one.reply, reasoning="")
    result = Message("tool", "4", tool_call_id=one.reply.tool_calls[0].id)
    second = ModelCall((question, echo, result), tools=(TOOL,))
    plan = planned(renderer, talk, second)
    assert (plan.prompt.parent, plan.messages[1].reasoning) == (one.id, "hm")
    two = sampled(renderer, plan, second, "4", 1)
    talk.add(two)
    third = ModelCall((question, echo, result, two.reply, Message("user", "thanks")), tools=(TOOL,))
    plan = planned(renderer, talk, third)
    assert (plan.prompt.parent, plan.credit_parent) == (None, two.id)  # the earlier thought is no longer in the prompt
    assert "hm" not in plan.prompt.text
    assert plan.fork is not None
    assert (plan.fork.reason, plan.fork.against) == ("reasoning_stripped", two.id)
    assert "hm" in plan.fork.recorded


def test_T004_a_template_that_goes_through_arguments_gets_an_object_always() -> None:
    renderer = RENDERERS["coder"]
    for text, shown in (
        ('{"a": "3", "b": 18}', "<parameter=b>\n18\n"),
        ('{"a', '<parameter=arguments>\n{"a\n'),
        ("", "=add>\n</"),
    ):
        turn = Message("assistant", tool_calls=(ToolCall("c1", "add", text),))
        prompt = renderer.render([Message("user", "?"), turn, Message("tool", "54", tool_call_id="c1")], [TOOL])
        assert shown in prompt.text


@pytest.mark.parametrize("name", RENDERERS)
def test_T002_T003_a_turn_with_calls_is_the_same_however_its_content_is_missing(name: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_n", "arguments": "{}"}}
    spellings = [{"content": None}, {}, {"content": []}, {"content": "", "function_call": None, "refusal": None}]
    texts = set()
    for content in spellings:
        body = {
            "messages": [
                {"role": "user", "content": "secret?"},
                {"role": "assistant", **content, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "42"},
            ],
            "tools": [{"type": "function", "function": {"name": "get_n", "parameters": {"type": "object"}}}],
        }
        parsed = OpenAIChat().parse(body, {})
        texts.add(RENDERERS[name].render(parsed.messages, parsed.tools).text)
    (text,) = texts
    assert text.index("secret?") < text.rindex("get_n") < text.index("42")
