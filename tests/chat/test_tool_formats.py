"""Tool calls of every family, read from a stream: what a client gets does not depend on how the text was cut (T016, T017)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.base.types import Message, TokenChunk, Tool, ToolCall
from areal.chat import AnswerForm, CallDelta, StreamParser, TextDelta
from areal.chat.deltas import Delta, call_id, fold
from areal.chat.reasoning import REASONING_STYLES
from areal.chat.tool_formats import TOOL_FORMATS, tool_format
from areal.config.rollout import ReasoningParser, ToolCallParser
from areal.inference.scripted.vocabulary import Vocabulary

ADD = Tool("add", "", {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "why": {"type": "string"}}})
FILE = Tool("write_file", "", {"properties": {"path": {"type": "string"}, "content": {"type": "string"}}})
TOOLS = (ADD, FILE, Tool("now"))
BYTES = Vocabulary({}, [])


@dataclass(frozen=True)
class Family:
    """How one format spells a call, several calls, and a call whose text holds the format's own closing marker."""

    one: str
    two: str
    closing: str  # may stand inside a string argument
    spelt: str  # an argument text as it comes through

    @property
    def hostile(self) -> str:
        return self.one.replace('"why": "x"', f'"why": "see {self.closing} here"').replace(
            ">x<", f">see {self.closing} here<"
        )


JSON_ARGUMENTS = '{"b": 2, "a":1, "why": "x"}'
TAGGED_ARGUMENTS = '{"b": 2, "a": 1, "why": "x"}'
CODER = "<parameter=b>\n2\n</parameter>\n<parameter=a>1</parameter>\n<parameter=why>x</parameter>"
GLM = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in (("b", 2), ("a", 1), ("why", "x")))
DEEP, DEEP_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
KIMI, KIMI_END = "<|tool_call_begin|>functions.add:{}<|tool_call_argument_begin|>", "<|tool_call_end|>"


def hermes(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'


def deepseek(*calls: str) -> str:
    return "<｜tool▁calls▁begin｜>" + "\n".join(calls) + "<｜tool▁calls▁end｜>"


def kimi(*arguments: str) -> str:
    calls = "".join(KIMI.format(k) + text + KIMI_END for k, text in enumerate(arguments))
    return f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"


J = JSON_ARGUMENTS
V3 = f"{DEEP}function<｜tool▁sep｜>add\n```json\n{J}\n```{DEEP_END}"
V31 = f"{DEEP}add<｜tool▁sep｜>{J}{DEEP_END}"
LLAMA = f'{{"name": "add", "parameters": {J}}}'
LISTED = f'{{"name": "add", "arguments": {J}}}'
CODED = f"<tool_call>\n<function=add>\n{CODER}\n</function>\n</tool_call>"
FAMILIES: dict[str, list[Family]] = {
    "hermes": [Family(hermes(J), hermes(J) + "\n" + hermes(J), "</tool_call>", J)],
    "qwen3_coder": [Family(CODED, CODED + "\n" + CODED, "</parameter>", TAGGED_ARGUMENTS)],
    "glm": [
        Family(
            f"<tool_call>add\n{GLM}</tool_call>",
            f"<tool_call>add\n{GLM}</tool_call>" * 2,
            "</arg_value>",
            TAGGED_ARGUMENTS,
        )
    ],
    "kimi": [Family(kimi(J), kimi(J, J), KIMI_END, J)],
    "deepseek": [
        Family(deepseek(V31), deepseek(V31, V31), DEEP_END, J),
        Family(deepseek(V3), deepseek(V3, V3), "```", J),
    ],
    "mistral": [
        Family(f"[TOOL_CALLS] [{LISTED}]", f"[TOOL_CALLS] [{LISTED}, {LISTED}]", "]", J),
        Family(f"[TOOL_CALLS]add[ARGS]{J}", f"[TOOL_CALLS]add[ARGS]{J}[TOOL_CALLS]add{J}", "[TOOL_CALLS]", J),
    ],
    "llama3_json": [
        Family(LLAMA, f"{LLAMA}; {LLAMA}", ";", J),
        Family(f"<|python_tag|>{LLAMA}", f"<|python_tag|>{LLAMA};{LLAMA}", "<|python_tag|>", J),
    ],
    "json": [
        Family(LISTED, f"[{LISTED}, {LISTED}]", "}]", J),
        Family(f"```json\n{LISTED}\n```", f"```json\n[{LISTED},\n {LISTED}]\n```", "```", J),
    ],
}
EVERY = [(name, family) for name, families in FAMILIES.items() for family in families]


def read(
    name: str, text: str, cuts: Sequence[int] = (), tools: Sequence[Tool] = TOOLS
) -> tuple[Message, list[list[Delta]]]:
    """The message and the deltas of every chunk; the text's bytes cut at `cuts`."""
    count = itertools.count(1)
    form = AnswerForm(tool_format=TOOL_FORMATS[name], tools=tuple(tools))  # type: ignore[index]
    parser = StreamParser(BYTES, form, new_id=lambda: f"id{next(count)}")
    ids = list(text.encode())
    edges = [0, *sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]
    steps = []
    for start, end in itertools.pairwise(edges):
        n = end - start
        steps.append(parser.feed(TokenChunk(tuple(ids[start:end]), (0.0,) * n, (0,) * n, (1.0,) * n)))
    steps.append(parser.finish())
    assert fold(delta for step in steps for delta in step) == parser.message()
    return parser.message(), steps


def token_by_token(name: str, text: str, tools: Sequence[Tool] = TOOLS) -> tuple[Message, list[list[Delta]]]:
    return read(name, text, range(len(text.encode())), tools)


def call(arguments: str, name: str = "add", k: int = 1) -> ToolCall:
    return ToolCall(f"id{k}", name, arguments)


@pytest.mark.parametrize(("name", "family"), EVERY)
def test_a_call_is_read_as_it_was_spelt(name: str, family: Family) -> None:
    for cut in (read, token_by_token):
        message, _ = cut(name, family.one)
        assert message == Message("assistant", tool_calls=(call(family.spelt),))


@pytest.mark.parametrize(("name", "family"), EVERY)
def test_T016_parallel_calls_have_indices_and_ids_of_their_own(name: str, family: Family) -> None:
    for cut in (read, token_by_token):
        message, steps = cut(name, family.two)
        assert message.tool_calls == (call(family.spelt, k=1), call(family.spelt, k=2))
        assert message.content == ""
        deltas = [delta for step in steps for delta in step]
        assert all(isinstance(delta, CallDelta) for delta in deltas)
        indices = [delta.index for delta in deltas if isinstance(delta, CallDelta)]
        assert indices == sorted(indices)
        for index in (0, 1):
            first, *rest = [delta for delta in deltas if isinstance(delta, CallDelta) and delta.index == index]
            assert (first.id, first.name) == (f"id{index + 1}", "add")
            assert all((delta.id, delta.name) == ("", "") and delta.arguments for delta in rest)


@pytest.mark.parametrize(("name", "family"), EVERY)
def test_T017_the_closing_marker_inside_a_string_ends_nothing(name: str, family: Family) -> None:
    assert family.hostile != family.one
    for cut in (read, token_by_token):
        message, _ = cut(name, family.hostile)
        assert message.content == ""
        assert len(message.tool_calls) == 1
        assert json.loads(message.tool_calls[0].arguments)["why"] == f"see {family.closing} here"


def test_T017_the_reported_case() -> None:
    text = (
        '<tool_call>\n{"name":"write_file","arguments":{"path":"n.md","content":"see </tool_call> here"}}\n</tool_call>'
    )
    for cut in (read, token_by_token):
        message, _ = cut("hermes", text)
        assert message.content == ""
        assert json.loads(message.tool_calls[0].arguments)["content"] == "see </tool_call> here"


@pytest.mark.parametrize(("name", "family"), EVERY)
def test_arguments_arrive_while_they_are_sampled(name: str, family: Family) -> None:
    _, steps = token_by_token(name, family.one)
    pieces = [delta for step in steps for delta in step if isinstance(delta, CallDelta)]
    assert len(pieces) >= 8
    assert max(len(piece.arguments) for piece in pieces) <= 12


@pytest.mark.parametrize(("name", "family"), EVERY)
def test_text_around_calls_stays_text(name: str, family: Family) -> None:
    if name not in ("json", "llama3_json"):
        message, _ = token_by_token(name, f"Let me see:\n{family.one}\n")
        assert (message.content, message.tool_calls) == ("Let me see:", (call(family.spelt),))
    message, _ = token_by_token(name, f"{family.one}\nI wait. ")
    assert message.content.lstrip() == "I wait. "
    assert message.tool_calls == (call(family.spelt),)
    for text in (
        " plain\n",
        "a < b and [TOOL",
        "<tool",
        "<|tool_calls_section_begin|",
        '{"a": 1}',
        "",
        "[1, 2]",
        " \n",
    ):
        for cut in (read, token_by_token):
            assert cut(name, text)[0] == Message("assistant", text)


@pytest.mark.parametrize(("name", "family"), EVERY)
def test_a_call_that_is_cut_off_keeps_what_came(name: str, family: Family) -> None:
    everything = family.one.encode()
    seen = set()
    for end in range(len(everything) + 1):
        text = everything[:end].decode("utf-8", "ignore")
        message, _ = read(name, text)
        streamed, _ = token_by_token(name, text)
        assert message == streamed
        if message.tool_calls:
            assert message.content == ""
            arguments = message.tool_calls[0].arguments
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(family.spelt, arguments)))  # noqa: B905
            rest = arguments[same:]  # a tag that was cut off is raw text
            assert text.rstrip().endswith(rest) or arguments == "{}"
            seen.add(arguments)
        else:
            assert message.content == text  # nothing vanishes
    assert family.spelt in seen
    assert len(seen) > 8


MALFORMED: list[tuple[str, str, Message]] = [
    # No call: text, markers included.
    ("hermes", "<tool_call>\nnot json\n</tool_call>", Message("assistant", "<tool_call>\nnot json\n</tool_call>")),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', Message("assistant", '<tool_call>{"arguments": {}}</tool_call>')),
    ("hermes", "<tool_call></tool_call>", Message("assistant", "<tool_call></tool_call>")),
    ("json", '{"name": "Bob", "age": 3}', Message("assistant", '{"name": "Bob", "age": 3}')),
    ("json", '{"name": "other", "arguments": {}}', Message("assistant", '{"name": "other", "arguments": {}}')),
    ("llama3_json", "<|python_tag|>print(1)", Message("assistant", "<|python_tag|>print(1)")),
    ("qwen3_coder", "<tool_call>\n<function=", Message("assistant", "<tool_call>\n<function=")),
    ("deepseek", "<｜tool▁calls▁begin｜>x", Message("assistant", "<｜tool▁calls▁begin｜>x")),
    ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.:0", Message("assistant", "<|tool_calls_section_begin|><|tool_call_begin|>functions.:0")),
    ("mistral", "[TOOL_CALLS] hm", Message("assistant", "[TOOL_CALLS] hm")),
    # A call whose arguments are no JSON: the raw text.
    ("hermes", "<tool_call>{\"name\": \"add\", \"arguments\": {'a': 1}}</tool_call> so", Message("assistant", " so", tool_calls=(call("{'a': 1}}"),))),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "x"y"}}</tool_call><tool_call>{"name": "now"}</tool_call>', Message("assistant", tool_calls=(call('{"a": "x"y"}}'), call("{}", "now", 2)))),
    ("qwen3_coder", "<tool_call><function=add>a=1</function></tool_call>", Message("assistant", tool_calls=(call("a=1"),))),
    ("qwen3_coder", "<tool_call><function=add><parameter=a>1</parameter>?</function></tool_call>", Message("assistant", tool_calls=(call('{"a": 1</parameter>?</function></tool_call>'),))),
    ("glm", "<tool_call>add\n<arg_key>a</arg_key>1</tool_call>", Message("assistant", tool_calls=(call("<arg_key>a</arg_key>1"),))),
    ("kimi", kimi("a=1"), Message("assistant", tool_calls=(call("a=1"),))),
    ("deepseek", deepseek(f"{DEEP}add<｜tool▁sep｜>a=1{DEEP_END}"), Message("assistant", tool_calls=(call("a=1"),))),
    ("mistral", "[TOOL_CALLS]add[ARGS]{a: 1}", Message("assistant", tool_calls=(call("{a: 1}"),))),
    ("json", '{"name": "add", "arguments": {"a": 1, }} then', Message("assistant", tool_calls=(call('{"a": 1, }} then'),))),
    ("llama3_json", '{"name": "add", "parameters": {"a"}}', Message("assistant", tool_calls=(call('{"a"}}'),))),
]  # fmt: skip
ODD: list[tuple[str, str, Message]] = [
    # Other spellings of the same.
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', Message("assistant", tool_calls=(call('{"a": 1}'),))),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', Message("assistant", tool_calls=(call('{"a": 1}'),))),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', Message("assistant", tool_calls=(call("{}", "now"),))),
    ("hermes", '<tool_call>{"name": "unknown"}</tool_call>', Message("assistant", tool_calls=(call("{}", "unknown"),))),
    ("hermes", '<tool_call>{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}</tool_call>', Message("assistant", tool_calls=(call('{"a": 1}'),))),
    ("hermes", '<tool_call>[{"name": "now"}, {"name": "now"}]', Message("assistant", tool_calls=(call("{}", "now"), call("{}", "now", 2)))),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}}</tool_call>', Message("assistant", "}</tool_call>", tool_calls=(call("{}", "now"),))),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', Message("assistant", tool_calls=(call('{"a": 1}'),))),
    ("hermes", '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>', Message("assistant", tool_calls=(call("{}", "\ufffd"),))),
    ("qwen3_coder", hermes(J), Message("assistant", tool_calls=(call(J),))),
    ("qwen3_coder", "<function=now>\n</function>", Message("assistant", tool_calls=(call("{}", "now"),))),
    ("qwen3_coder", '<tool_call><function=add>{"a": 1}</function></tool_call>', Message("assistant", tool_calls=(call('{"a": 1}'),))),
    ("qwen3_coder", '<function=write_file><parameter=path>\na"b\n\n</parameter></function>', Message("assistant", tool_calls=(call('{"path": "a\\"b\\n"}', "write_file"),))),
    ("qwen3_coder", "<function=add><parameter=a>one</parameter><parameter=z>3</parameter></function>", Message("assistant", tool_calls=(call('{"a": "one", "z": "3"}'),))),
    ("glm", "<tool_call>now</tool_call>", Message("assistant", tool_calls=(call("{}", "now"),))),
    ("glm", hermes(J), Message("assistant", tool_calls=(call(J),))),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]abc123[ARGS]{"a": 1}', Message("assistant", tool_calls=(call('{"a": 1}'),))),
    ("llama3_json", '{"type": "function", "name": "add", "parameters": {"a": 1}}', Message("assistant", tool_calls=(call('{"a": 1}'),))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), [*MALFORMED, *ODD])
def test_calls_that_are_malformed_or_odd_neither_crash_nor_vanish(name: str, text: str, expected: Message) -> None:
    for cut in (read, token_by_token):
        assert cut(name, text)[0] == expected


PIECES = sorted({marker for form in TOOL_FORMATS.values() if form for marker in form.markers})
PIECES += ["```json\n", "```", '{"name": "add", "arguments": ', '{"name": "now"}', '{"a": 1}', '"why": "é</tool_call>"']
PIECES += [*'{}[]",:\\ \nab1', "function", "functions.add:0", "add", "null", "🙂"]


@pytest.mark.parametrize("name", FAMILIES)
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_a_batch_result_equals_the_folded_stream_for_every_split(name: str, data: st.DataObject) -> None:
    wholes = [text for family in FAMILIES[name] for text in (family.one, family.two, family.hostile)]
    pieces = st.lists(st.sampled_from(PIECES + wholes), max_size=8)
    text = "".join(data.draw(pieces))
    text = text[: data.draw(st.integers(0, len(text)))]
    batch, _ = read(name, text)
    streamed, steps = read(name, text, data.draw(st.lists(st.integers(0, 999), max_size=20)))
    single, _ = token_by_token(name, text)
    assert batch == streamed == single
    assert all(delta.text for step in steps for delta in step if isinstance(delta, TextDelta))
    assert len({one.id for one in batch.tool_calls}) == len(batch.tool_calls)
    assert all(one.name for one in batch.tool_calls)


@settings(deadline=None, max_examples=100)
@given(
    arguments=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=8,
    ).filter(lambda value: isinstance(value, dict)),
    indent=st.sampled_from([None, 2]),
    escaped=st.booleans(),
)
def test_any_json_comes_through_character_by_character(arguments: Any, indent: int | None, escaped: bool) -> None:
    spelt = json.dumps(arguments, indent=indent, ensure_ascii=escaped)
    for name, wrapped in (("hermes", hermes(spelt)), ("kimi", kimi(spelt)), ("mistral", f"[TOOL_CALLS]add{spelt}")):
        message, _ = token_by_token(name, wrapped)
        assert message == Message("assistant", tool_calls=(call(spelt),))


def test_brackets_without_end_do_not_exhaust_the_stack() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 20_000
    message, _ = read("hermes", text)
    assert message.tool_calls[0].arguments == '{"a": ' + "[" * 20_000
    again = '<tool_call>{"function": ' * 2_000
    assert read("hermes", again)[0].content == again.rstrip()[: len(again)] + " " * (len(again) - len(again.rstrip()))


TEMPLATE_MARKS = [
    ("qwen3_coder", "... <tool_call>\n<function=example>\n<parameter=p> ..."),
    ("glm", "... <tool_call>{name}<arg_key> ..."),
    ("kimi", "... <|tool_calls_section_begin|> ..."),
    ("deepseek", "... <｜tool▁calls▁begin｜> ..."),
    ("mistral", "... [TOOL_CALLS] ..."),
    ("llama3_json", "... <|python_tag|> ..."),
    ("hermes", "... <tool_call> ..."),
]


def test_the_default_follows_the_template() -> None:
    for name, source in TEMPLATE_MARKS:
        assert type(tool_format("qwen", source)) is type(TOOL_FORMATS[name])  # type: ignore[index]
        assert tool_format("json", source) is TOOL_FORMATS["json"]
        assert tool_format("none", source) is None
    assert type(tool_format("qwen", "{{ messages }}")) is type(TOOL_FORMATS["hermes"])


def test_tables_and_config_name_the_same() -> None:
    assert set(TOOL_FORMATS) == set(get_args(ToolCallParser))
    assert set(REASONING_STYLES) == set(get_args(ReasoningParser))
    assert set(FAMILIES) == set(TOOL_FORMATS) - {"qwen", "none"}


def test_ids_are_letters_and_digits_and_never_the_same() -> None:
    ids = {call_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(one.isascii() and one.isalnum() and len(one) == 24 for one in ids)
    parser = StreamParser(BYTES, AnswerForm(tool_format=TOOL_FORMATS["mistral"], tools=TOOLS))
    ids9 = tuple(b"[TOOL_CALLS]now{}")
    n = len(ids9)
    parser.feed(TokenChunk(ids9, (0.0,) * n, (0,) * n, (1.0,) * n))
    assert len(parser.message().tool_calls[0].id) == 9
