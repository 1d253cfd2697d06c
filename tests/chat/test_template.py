"""Chat templates: the text transformers' apply_chat_template makes, inside a sandbox with bounds."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2.sandbox
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import areal.chat.sandbox as sandbox_module
import areal.chat.template as template_module
from areal.base.errors import BadRequest, ConfigError
from areal.base.types import Message, Tool, ToolCall
from areal.chat import ChatTemplate, JinjaRenderer, load_renderer, scripted_renderer
from areal.chat.template import CHATML
from areal.chat.template_input import (
    TemplateNeeds,
    one_call_a_turn,
    template_input,
    template_messages,
    template_tools,
)

TOOL = Tool("add", "Adds <two> numbers & says so.", {"type": "object", "properties": {"é": {"type": "number"}}})
CALL = ToolCall("call1", "add", '{"y": 2, "x": "é"}')
CONVERSATIONS: dict[str, list[Message]] = {
    "one question": [Message("user", "2 + 2?")],
    "system": [Message("system", "Be kind."), Message("user", " spaces \n")],
    "answered": [Message("user", "2 + 2?"), Message("assistant", " 4\n"), Message("user", "東京 & <b>")],
    "thinking": [
        Message("user", "2 + 2?"),
        Message("assistant", "<think>\nadd\n</think>\n\n4"),
        Message("user", "and 3 + 3?"),
        Message("assistant", "6", reasoning="add again"),
    ],
    "tools": [
        Message("user", "add"),
        Message("assistant", tool_calls=(CALL,)),
        Message("tool", '{"sum": 3}', tool_call_id="call1"),
    ],
}
KWARGS: list[dict[str, Any]] = [{}, {"enable_thinking": False}]
Models = dict[str, tuple[Path, JinjaRenderer]]


@pytest.fixture(scope="session")
def references(models_by_template: Models) -> dict[str, Any]:
    from transformers import PreTrainedTokenizerFast

    return {name: PreTrainedTokenizerFast.from_pretrained(path) for name, (path, _) in models_by_template.items()}


def reference_text(reference: Any, messages: list[Message], tools: list[Tool], **options: Any) -> str | Exception:
    shown, listed = template_input(messages, tools, TemplateNeeds.of(reference.chat_template))
    try:
        return str(reference.apply_chat_template(shown, tools=listed or None, tokenize=False, **options))
    except Exception as error:
        return error


@pytest.mark.parametrize(
    "name", ["chatml_default_system", "headers_trimmed", "instructions_alternating", "thinking_stripped"]
)
@pytest.mark.parametrize("prompted", [True, False])
def test_the_text_equals_transformers(name: str, prompted: bool, models_by_template: Models, references: Any) -> None:
    renderer = models_by_template[name][1]
    compared = 0
    for messages in CONVERSATIONS.values():
        for tools in ([], [TOOL]):
            for kwargs in KWARGS:
                expected = reference_text(references[name], messages, tools, add_generation_prompt=prompted, **kwargs)
                if isinstance(expected, Exception):
                    with pytest.raises(BadRequest):
                        renderer.template.render(messages, tools, kwargs, add_generation_prompt=prompted)
                    continue
                assert renderer.template.render(messages, tools, kwargs, add_generation_prompt=prompted) == expected
                compared += 1
    assert compared >= 16


@pytest.mark.parametrize("name", ["chatml_default_system", "headers_trimmed", "thinking_stripped"])
@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(contents=st.lists(st.text(max_size=12), min_size=1, max_size=5))
def test_random_text_equals_transformers(
    name: str, contents: list[str], models_by_template: Models, references: Any
) -> None:
    messages = [Message("assistant" if k % 2 else "user", text) for k, text in enumerate(contents)]
    expected = reference_text(references[name], messages, [], add_generation_prompt=True)
    assert models_by_template[name][1].render(messages).text == expected


def test_T052_bos_stands_once(models_by_template: Models, references: Any) -> None:
    for name in ("headers_trimmed", "instructions_alternating"):
        prompt = models_by_template[name][1].render(CONVERSATIONS["answered"])
        bos = references[name].bos_token_id
        assert prompt.ids[0] == bos
        assert prompt.ids.tolist().count(bos) == 1
        expected = references[name].apply_chat_template(
            template_messages(CONVERSATIONS["answered"]), tokenize=True, add_generation_prompt=True, return_dict=False
        )
        assert prompt.ids.tolist() == expected


def test_messages_reach_templates_as_they_expect_them() -> None:
    messages = [
        Message("user", "hi", name="bob"),
        Message("assistant", reasoning="hm", tool_calls=(CALL, ToolCall("c2", "f", "[1"), ToolCall("c3", "g", "[1]"))),
        Message("tool", "3", tool_call_id="call1"),
    ]
    user, assistant, tool = template_messages(messages)
    assert user == {"role": "user", "content": "hi", "name": "bob"}
    assert assistant["reasoning_content"] == "hm"
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [{"y": 2, "x": "é"}, "[1", "[1]"]
    assert list(assistant["tool_calls"][0]["function"]["arguments"]) == ["y", "x"]
    assert tool == {"role": "tool", "content": "3", "tool_call_id": "call1", "name": "add"}
    assert "tool_calls" not in user


def test_the_template_is_found_where_models_keep_it(
    folder: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    messages = [Message("user", "hi")]
    path = folder("chatml_default_system")
    config = json.loads((path / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": config["chat_template"]}]
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    assert load_renderer(path).render(messages).text.startswith("<|im_start|>system\nBe brief.")
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named[:1]}))
    with pytest.raises(ConfigError, match=r"\['tool_use'\], none is `default`"):
        load_renderer(path)
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert load_renderer(path).render(messages).text == "hi!"
    with caplog.at_level(logging.INFO, "areal"):
        renderer = load_renderer(folder(None))
    assert [record.getMessage() for record in caplog.records if "ChatML" in record.getMessage()]
    assert renderer.render(messages).text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_of_ones_own_stands_in_for_the_models(folder: Callable[..., Path], tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text(
        "{{ eos_token }}{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}{{ messages[0].content }}\n"
    )
    path, messages, tools = folder("chatml_default_system"), [Message("user", "hi")], [Tool("add", "", {})]
    eos = load_renderer(path).tokenizer.special_tokens["eos_token"]
    assert load_renderer(path, chat_template=own).render(messages, tools).text == f"{eos}[add]hi"
    script = tmp_path / "script.jsonl"
    script.write_text('{"pieces": ["yes"]}')
    assert scripted_renderer(script, chat_template=own).render(messages, tools).text == "[add]hi"
    own.write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"own\.jinja, line 1"):
        load_renderer(path, chat_template=own)
    with pytest.raises(ConfigError, match=r"chat_template: cannot read .*gone.* or take it out"):
        load_renderer(path, chat_template=tmp_path / "gone.jinja")


def test_the_default_chatml_shows_tools_calls_and_results() -> None:
    messages = [
        Message("system", "Be kind."),
        Message("user", "add"),
        Message("assistant", "ok", reasoning="hm", tool_calls=(CALL, CALL)),
        Message("tool", "3", tool_call_id="call1"),
        Message("tool", "4", tool_call_id="call1"),
    ]
    text = ChatTemplate(CHATML).render(messages, [TOOL], add_generation_prompt=True)
    assert text.count("<|im_start|>system\nBe kind.\n\n") == 1
    assert json.dumps(template_tools([TOOL])[0], ensure_ascii=False) in text
    call = '<tool_call>\n{"name": "add", "arguments": {"y": 2, "x": "é"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n<think>\nhm\n</think>\n\nok\n{call}\n{call}<|im_end|>\n" in text
    results = "<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>"
    assert text.endswith(f"<|im_start|>user\n{results}<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ ().__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update({}) }}", "unsafe"),
        ("{{ 'a' * 10 ** 12 }}", "range"),
        ("{{ 9 ** 9 ** 9 }}", "range"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "range"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_a_template_that_fails_is_a_400_with_its_reason(source: str, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason) as error:
        ChatTemplate(source).render([Message("user", "hi")], add_generation_prompt=True)
    assert error.value.status == 400


DOUBLED = "{%% set n = namespace(x=%s) %%}{%% for i in range(60) %%}{%% set n.x = %s %%}{%% endfor %%}{{ %s }}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' | center(10 ** 9) }}",
        "{{ 'a'.ljust(10 ** 9) }}",
        "{{ 'a'.zfill(width=10 ** 9) if false else 'a'.zfill(10 ** 9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10 ** 9, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{w}}'.format(1, w=10 ** 9) }}",
        "{{ 'a\n' | indent(10 ** 9, true) }}",
        "{{ messages | tojson(indent=10 ** 8) }}",
        "{{ [1] | batch(10 ** 9, 0) | list | length }}",
        "{{ [1] | slice(10 ** 9) | list | length }}",
        "{{ (1).to_bytes(10 ** 9, 'big') | length }}",
        "{{ ('a\t' * 10 ** 5).expandtabs(10 ** 5) }}",
        "{{ ('a' * 10 ** 7) | wordwrap(1) }}",
        "{{ ('a' * 6000).replace('a', 'b' * 10 ** 7) | length }}",
        "{{ ('a' * 6000).split('a') | join('b' * 10 ** 7) | length }}",
        "{{ ''.join(['a' * 10 ** 6] * 1000) | length }}",
        "{{ ('a' * 6000).translate({97: 'b' * 10 ** 7}) | length }}",
        "{{ (1, 2) * 10 ** 8 }}",
        "{{ range(99999) | map('center', 99999) | list | length }}",
        DOUBLED % ("'a'", "n.x ~ n.x", "n.x | length"),
        DOUBLED % ("'a'", "n.x + n.x", "n.x | length"),
        DOUBLED % ("'a'", "[n.x, n.x] | join", "n.x | length"),
        DOUBLED % ("'a'", "n.x.replace('a', 'aaaa')", "n.x | length"),
        DOUBLED % ("'a'", "n.x + 'b' + n.x", "n.x | length"),
        DOUBLED % ("[1]", "n.x + n.x", "n.x | length"),
        DOUBLED % ("[1]", "n.x + [2] + n.x", "n.x | length"),
        DOUBLED % ("2", "n.x * n.x", "n.x % 7"),
        DOUBLED % ("[1]", "[n.x, n.x]", "n.x"),
        DOUBLED % ("[1]", "[n.x, n.x]", "n.x | string"),
        DOUBLED % ("[1]", "[n.x, n.x]", "n.x | tojson"),
        "{% set x = 'a' * 10 ** 7 %}{% set y %}{% for i in range(999) %}{{ x }}{% endfor %}{% endset %}{{ y | length }}",
        "{% set n = namespace(l=[], x='a' * 10 ** 7) %}{% for i in range(999) %}{% set n.l = n.l + [n.x[1:]] %}{% endfor %}",
    ],
)
def test_what_explodes_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(sandbox_module, "MAX_MADE_CHARACTERS", 20_000_000)
    with pytest.raises(BadRequest, match=r"out of (the )?range"):
        ChatTemplate(source).render([Message("user", "hi")], add_generation_prompt=True)


def test_texts_of_many_kinds_are_made_as_jinja_makes_them() -> None:
    source = (
        "{% macro m(a, b=2) %}{{ a }}-{{ b }}{% endmacro %}{% set c %}{{ m('x') }}{% endset %}{{ c ~ 1 ~ none ~ [1, 'é'] }}|"
        "{{ '%s %5.2f' % ('a', 3.14159) }}|{{ '{:>4}{a}'.format(7, a='é') }}|{{ ['a', 1] | join(', ') }}|{{ 'a-b'.replace('-', '+') }}|"
        "{{ {'a': [1, '<é>']} | tojson(indent=1) }}|{{ 'ab' * 2 + 'c' }}|{{ [1] + [2] }}|{{ 2 * 3 ** 2 }}|{{ 7 % 4 }}|{{ 'abc'[::-1] }}|"
        "{{ messages | map(attribute='content') | join }}|{{ 'a b' | title }}|{{ 'x' | center(5) }}|{{ 'long text' | truncate(255) }}|"
        "{{ missing ~ 'z' }}|{{ ', '.join(['p', 'q']) }}|{{ 1700000000 | string }}|{{ '%d' % 1700000000 }}"
    )
    made = ChatTemplate(source).render([Message("user", "hi")], add_generation_prompt=True)
    assert made.split("|") == [
        *("x-21None[1, 'é']", "a  3.14", "   7é", "a, 1", "a+b", '{\n "a": [\n  1,\n  "<é>"\n ]\n}', "ababc", "[1, 2]"),
        *("18", "3", "cba", "hi", "A B", "  x  ", "long text", "z", "p, q", "1700000000", "1700000000"),
    ]


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' + ('b' + 'c') + ('d' ~ 1) + messages[0].role }}",
        "{{ 1 + 2 + 3 * 4 + 0.5 }}|{{ [1] + [2, 3] + messages | map(attribute='role') | list }}|{{ (1,) + (2,) + (3,) }}",
        "{{ '<a>' + ('<b>' | escape) + '<c>' }}|{{ ('<b>' | escape) + '<c>' + '<d>' }}|{{ '<a>' + '<b>' + ('<c>' | escape) }}",
        "{{ messages[0].items + messages[0].get('none', '-') + messages[0]['keys'] if false else {'items': 1, 'x': 2}.items() | list }}{{ {'items': 1, 'x': 2}.x }}",
        "{% for m in messages %}{{ loop.index0 + loop.length + 1 }}{{ loop.first }}{{ (loop.previtem or m).role }}{{ m.role }}{{ m.x }}{% endfor %}",
    ],
)
def test_sums_and_attributes_mean_what_they_mean_in_jinja(source: str) -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(source).render(messages=said)
    messages = [Message("user", "hi"), Message("assistant", "yes")]
    assert ChatTemplate(source).render(messages, add_generation_prompt=True) == plain


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ 'a' + 1 + 'b' }}", "str"),
        ("{{ 'a' + 'b' + missing }}", "'missing' is undefined"),
        ("{{ messages[0].pop + 'a' + 'b' }}", "unsafe"),
        ("{% for m in messages %}{{ loop._iterator }}{{ loop._iterator.x }}{% endfor %}", "unsafe|undefined"),
    ],
)
def test_sums_and_attributes_that_jinja_refuses_are_refused(source: str, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        ChatTemplate(source).render([Message("user", "hi")], add_generation_prompt=True)


def test_endless_loops_and_texts_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "MAX_CPU_S", 0.05)
    silent = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    deep = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    for source in (silent, deep):
        with pytest.raises(BadRequest, match="CPU time"):
            ChatTemplate(source).render([Message("user", "hi")], add_generation_prompt=True)
    monkeypatch.setattr(template_module, "MAX_TEXT_CHARACTERS", 1000)
    with pytest.raises(BadRequest, match="grew over 1000 characters"):
        ChatTemplate("{% for i in range(999) %}ab{% endfor %}").render([], add_generation_prompt=True)
    monkeypatch.setattr(template_module, "MAX_SOURCE_CHARACTERS", 10)
    with pytest.raises(ConfigError, match="11 characters"):
        ChatTemplate("x" * 11)


def test_tool_arguments_that_nest_too_deep_stay_text() -> None:
    deep = '{"a":' * 5000 + "1" + "}" * 5000
    call = Message("assistant", "", tool_calls=(replace(CALL, arguments=deep),))
    assert deep in ChatTemplate(CHATML).render([Message("user", "hi"), call], add_generation_prompt=True)


def test_a_request_cannot_bring_its_own_template_or_messages() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ add_generation_prompt }}{{ mood }}")
    with pytest.raises(BadRequest, match="chat_template"):
        template.render([Message("user", "hi")], (), {"chat_template": "x"}, add_generation_prompt=True)
    kwargs = {"messages": [{"content": "other"}], "add_generation_prompt": 7, "mood": "!"}
    assert template.render([Message("user", "hi")], (), kwargs, add_generation_prompt=True) == "hiTrue!"


def test_a_template_that_is_no_jinja_is_named_with_its_line() -> None:
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("{{ messages }}\n{% if %}")


PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
LISTS_NO_TOOLS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and m['content'] is none %}"
    "{% for c in m.tool_calls %}{{ '[' + c.function.name + ' ' + c.function.arguments + ']' }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def test_a_template_without_a_tools_section_gets_the_default_tools_prompt() -> None:
    messages = [
        Message("user", "2 + 2?"),
        Message("assistant", "I see.", reasoning="hm", tool_calls=(CALL, ToolCall("c2", "now", "[bad"))),
        Message("tool", "3", tool_call_id="call1"),
        Message("tool", "noon", tool_call_id="c2"),
    ]
    listed = json.dumps(template_tools([TOOL])[0], ensure_ascii=False)
    prompt = (
        f"You can call these functions:\n<tools>\n{listed}\n</tools>\nTo call one, write\n"
        '<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>'
    )
    talk = (
        "<user>2 + 2?<assistant><think>\nhm\n</think>\n\nI see."
        '\n<tool_call>\n{"name": "add", "arguments": {"y": 2, "x": "é"}}\n</tool_call>'
        '\n<tool_call>\n{"name": "now", "arguments": [bad}\n</tool_call>'
        "<user><tool_response>\n3\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    )
    template = ChatTemplate(PLAIN)
    assert template.render(messages, [TOOL], add_generation_prompt=True) == f"<system>{prompt}{talk}"
    assert (
        template.render(messages, [], add_generation_prompt=True) == talk
    )  # the calls stay, whatever tools there are now
    kind = [Message("system", "Be kind."), *messages]
    assert template.render(kind, [TOOL], add_generation_prompt=True) == f"<system>Be kind.\n\n{prompt}{talk}"


def test_a_template_that_shows_calls_and_lists_no_tools_gets_the_list_only() -> None:
    messages = [
        Message("user", "?"),
        Message("assistant", tool_calls=(CALL,)),
        Message("tool", "3", tool_call_id="call1"),
    ]
    text = ChatTemplate(LISTS_NO_TOOLS).render(messages, [TOOL], add_generation_prompt=True)
    assert text.startswith("<system>You can call these functions:\n<tools>\n")
    # It puts texts together, so it gets the arguments as they were sent; it shows calls only beside a null content (T002).
    assert text.endswith(f"</tools><user>?<assistant>[add {CALL.arguments}]<tool>3")


def test_a_model_that_numbers_its_calls_sees_its_own_ids() -> None:
    source = (
        "{# <|tool_calls_section_begin|> #}{{ tools | length }}{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "<|tool_calls_section_begin|>{{ c.id }};{% endfor %}{{ m.tool_call_id }};{% endfor %}"
    )
    messages = [
        Message("assistant", tool_calls=(CALL, ToolCall("c2", "now", "{}"))),
        Message("tool", "3", tool_call_id="c2"),
        Message("tool", "4", tool_call_id="elsewhere"),
    ]
    text = ChatTemplate(source).render(messages, [TOOL], add_generation_prompt=True)
    begin = "<|tool_calls_section_begin|>"
    assert text == f"1{begin}functions.add:0;{begin}functions.now:1;;functions.now:1;elsewhere;"


@pytest.mark.parametrize("arguments", ["{bad", "[1]", '"text"', "", "null", '{"x": "\\ud83d"}'])
def test_malformed_arguments_never_fail_a_template(arguments: str) -> None:
    message = Message("assistant", tool_calls=(ToolCall("c1", "f", arguments),))
    for source in (
        "{% for k, v in messages[0].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }}{% endfor %}{{ tools }}",
        "{% for k, v in messages[0].tool_calls[0].function.arguments | items %}{{ k }}={{ v }}{% endfor %}{{ tools }}",
        "{{ messages[0].tool_calls[0].function.arguments | tojson }}{{ tools }}",
        "{{ '' + messages[0].tool_calls[0].function.arguments }}{{ tools }}",
        PLAIN,
    ):
        ChatTemplate(source).render([message], add_generation_prompt=True).encode()


def test_a_template_that_refuses_parallel_calls_gets_them_one_after_the_other(models_by_template: Models) -> None:
    calls = Message("assistant", "both", tool_calls=(CALL, ToolCall("c2", "now", "{}")))
    results = [Message("tool", "noon", tool_call_id="c2"), Message("tool", "3", tool_call_id="call1")]
    later = [Message("assistant", tool_calls=(ToolCall("c3", "now", "{}"),)), Message("tool", "one", tool_call_id="c3")]
    assert one_call_a_turn([Message("user", "?"), calls, *results, *later]) == [
        Message("user", "?"),
        Message("assistant", "both", tool_calls=(CALL,)),
        results[1],
        Message("assistant", tool_calls=(ToolCall("c2", "now", "{}"),)),
        results[0],
        *later,
    ]
    renderer = models_by_template["headers_trimmed"][1]
    text = renderer.render([Message("user", "?"), calls, *results], [TOOL]).text
    places = [
        text.index(part) for part in ('"name": "add", "parameters"', '"3"', '"name": "now", "parameters"', '"noon"')
    ]
    assert places == sorted(places)
    alone = replace(calls, tool_calls=(CALL,))  # a refusal of another kind keeps its own words
    with pytest.raises(BadRequest, match="take turns"):
        models_by_template["instructions_alternating"][1].render(
            [Message("user", "?"), Message("user", "?"), alone, calls]
        )
