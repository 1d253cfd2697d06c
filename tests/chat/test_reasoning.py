"""Reasoning is told from the answer, whether the prompt or the model opens the block, for every cut of the stream (T051)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.base.types import Message, TokenChunk, Tool, ToolCall
from areal.chat import AnswerForm, ChatTemplate, JinjaRenderer, ReasoningDelta, StreamParser
from areal.chat.deltas import Delta
from areal.chat.reasoning import REASONING_STYLES, ReasoningStyle, reasoning_style
from areal.chat.template import CHATML
from areal.chat.tool_formats import TOOL_FORMATS
from areal.inference.scripted.vocabulary import Vocabulary

BYTES = Vocabulary({}, [])
NOW = (Tool("now"),)


def read(style: str, text: str, *, opened: bool = False, cuts: Sequence[int] = ()) -> tuple[Message, list[Delta]]:
    form = AnswerForm(REASONING_STYLES[style], opened, TOOL_FORMATS["hermes"], NOW)  # type: ignore[index]
    parser = StreamParser(BYTES, form, new_id=lambda: "id")
    ids = list(text.encode())
    edges = [0, *sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]
    deltas: list[Delta] = []
    for start, end in itertools.pairwise(edges):
        n = end - start
        deltas += parser.feed(TokenChunk(tuple(ids[start:end]), (0.0,) * n, (0,) * n, (1.0,) * n))
    deltas += parser.finish()
    return parser.message(), deltas


CALL = '<tool_call>{"name": "now"}</tool_call>'
CALLED = (ToolCall("id", "now", "{}"),)
CASES: list[tuple[str, bool, Message]] = [
    ("<think>\nadd\n</think>\n\n4", False, Message("assistant", "4", reasoning="add")),
    ("\n<think>add</think>4 ", False, Message("assistant", "4 ", reasoning="add")),
    ("add\n</think>\n\n4", True, Message("assistant", "4", reasoning="add")),
    ("<think>\nadd\n</think>4", True, Message("assistant", "4", reasoning="add")),  # opened twice
    ("<think>\n\n</think>\n\n4", False, Message("assistant", "4")),
    ("<think>one\n\ntwo < 3</thi", False, Message("assistant", reasoning="one\n\ntwo < 3</thi")),
    ("cut off", True, Message("assistant", reasoning="cut off")),
    ("4 <think>no</think>", False, Message("assistant", "4 <think>no</think>")),
    (" 4\n", False, Message("assistant", " 4\n")),
    ("<thin", False, Message("assistant", "<thin")),
    ("", True, Message("assistant")),
    (f"<think>{CALL}</think>{CALL}", False, Message("assistant", reasoning=CALL, tool_calls=CALLED)),
    (f"<think>hm</think>\n\n{CALL}", False, Message("assistant", reasoning="hm", tool_calls=CALLED)),
]


@pytest.mark.parametrize(("text", "opened", "expected"), CASES)
def test_reasoning_is_what_stands_between_the_markers(text: str, opened: bool, expected: Message) -> None:
    assert read("qwen3", text, opened=opened)[0] == expected
    assert read("qwen3", text, opened=opened, cuts=range(len(text)))[0] == expected


def test_reasoning_arrives_while_it_is_sampled() -> None:
    deltas = read("qwen3", "<think>one two three</think>4", cuts=range(40))[1]
    assert sum(isinstance(delta, ReasoningDelta) for delta in deltas) >= len("onetwothree")


pieces = ["<think>", "</think>", "<think", "[THINK]", "[/THINK]", "◁think▷", "◁/think▷", CALL, "a", " ", "\n", "é", "<"]


@pytest.mark.parametrize("style", [name for name, style in REASONING_STYLES.items() if style])
@settings(deadline=None, max_examples=80)
@given(st.lists(st.sampled_from(pieces), max_size=8), st.booleans(), st.lists(st.integers(0, 99), max_size=8))
def test_a_batch_result_equals_the_folded_stream_for_every_split(
    style: str, parts: list[str], opened: bool, cuts: list[int]
) -> None:
    text = "".join(parts)
    whole = read(style, text, opened=opened)[0]
    assert whole == read(style, text, opened=opened, cuts=cuts)[0]
    assert whole == read(style, text, opened=opened, cuts=range(len(text.encode())))[0]


def test_the_prompt_says_whether_the_block_is_open() -> None:
    think = ReasoningStyle("<think>", "</think>")
    assert think.opened_by("<|im_start|>assistant\n<think>\n")
    assert not think.opened_by("<|im_start|>assistant\n")
    assert not think.opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    always = REASONING_STYLES["deepseek_r1"]
    assert always is not None
    assert always.opened_by("<|Assistant|>")
    assert not always.opened_by("<|Assistant|></think>")


def test_the_default_follows_the_template() -> None:
    assert reasoning_style("qwen3", "... [THINK] ... [/THINK]") == REASONING_STYLES["mistral"]
    assert reasoning_style("qwen3", "... ◁think▷◁/think▷") == REASONING_STYLES["kimi"]
    assert (
        reasoning_style("qwen3", "<think></think>") == reasoning_style("qwen3", "nothing") == REASONING_STYLES["qwen3"]
    )
    assert reasoning_style("none", "<think></think>") is None


def test_the_renderer_knows_from_its_own_prompt() -> None:
    opening = JinjaRenderer(
        BYTES, ChatTemplate(CHATML.replace('assistant\\n" }}{% endif', 'assistant\\n<think>\\n" }}{% endif'))
    )
    for renderer, text in (
        (opening, "add</think>4"),
        (JinjaRenderer(BYTES, ChatTemplate(CHATML)), "<think>add</think>4"),
    ):
        prompt = renderer.render([Message("user", "2+2?")])
        parser = renderer.parser(prompt.text)
        ids = tuple(text.encode())
        n = len(ids)
        parser.feed(TokenChunk(ids, (0.0,) * n, (0,) * n, (1.0,) * n))
        parser.finish()
        assert parser.message() == Message("assistant", "4", reasoning="add")


def test_markers_that_are_special_tokens_are_seen_and_others_show_nothing() -> None:
    class Special(Vocabulary):
        """[THINK] and [/THINK] as tokens without text, as Mistral's are."""

        def piece(self, token_id: int) -> bytes:
            data = super().piece(token_id)
            return b"" if data.startswith(b"[") and len(data) > 1 else data

    vocabulary = Special({}, [b"[THINK]", b"[/THINK]", b"[OTHER]"])
    ids = tuple(vocabulary.encode("[THINK]hm[/THINK]4[OTHER]"))
    n = len(ids)
    chunk = TokenChunk(ids, (0.0,) * n, (0,) * n, (1.0,) * n)
    for style, expected in (
        ("mistral", Message("assistant", "4", reasoning="hm")),
        ("none", Message("assistant", "hm4")),
    ):
        parser = StreamParser(vocabulary, AnswerForm(REASONING_STYLES[style]))  # type: ignore[index]
        parser.feed(chunk)
        parser.finish()
        assert parser.message() == expected
