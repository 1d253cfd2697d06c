"""A grammar takes the words a model of that family would write, in the tokens in which it writes them, whatever its vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal.base.errors import BadRequest
from areal.base.types import Constraint, Message, Tool
from areal.chat import JinjaRenderer, load_renderer
from areal.inference.native.grammars import Grammars, allowed_tokens

ADD = Tool("add", "", {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}})
SAY = Tool("say", "", {"properties": {"what": {"type": "string"}, "how": {"enum": ["low", "2"]}}, "required": ["what"]})
ARGUMENTS = '{"x": 1, "y": 2}'
FOOTER = "<|tool_call_end|><|tool_calls_section_end|>"
NATURAL = {
    "hermes": [
        f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>',
        '<tool_call>\n{"name":"say","arguments":{"what":"naïve \\"東京\\" </tool_call>"}}\n</tool_call>',
        f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>\n<tool_call>\n{{"name": "add", "arguments": {{}}}}\n</tool_call>',
    ],
    "qwen3_coder": [
        "<tool_call>\n<function=add>\n<parameter=x>\n1\n</parameter>\n<parameter=y>\n2\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=say>\n<parameter=what>\nHello </p>\n\n<b>\n</parameter>\n<parameter=how>\n\"2\"\n</parameter>\n</function>\n</tool_call>",
    ],
    "glm": [
        "<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "<tool_call>say\n<arg_key>what</arg_key>\n<arg_value>a\nb</arg_value>\n<arg_key>how</arg_key>\n<arg_value>low</arg_value>\n</tool_call>",
    ],
    "kimi": [
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{ARGUMENTS}{FOOTER}",
    ],
    "deepseek": [f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"],
    "mistral": [f'[TOOL_CALLS][{{"name": "add", "arguments": {ARGUMENTS}}}]', f'[TOOL_CALLS] [{{"name": "add", "arguments": {ARGUMENTS}}}]'],
    "llama3_json": [f'{{"name": "add", "parameters": {ARGUMENTS}}}; {{"name": "add", "parameters": {{}}}}'],
    "json": [f'{{"name": "add", "arguments": {ARGUMENTS}}}', f'[{{"name": "add", "arguments": {ARGUMENTS}}}]'],
}  # fmt: skip
WORDS = [(name, text) for name, texts in NATURAL.items() for text in texts]
# The families whose models have SentencePiece vocabularies; they write the space behind a marker as a part of the next token.
PIECES = [
    (name, text)
    for name, text in WORDS
    if name in ("hermes", "llama3_json", "json") or text.startswith("[TOOL_CALLS][")
]
EVERY = [("byte_level", *one) for one in WORDS] + [("sentence_piece", *one) for one in PIECES]


async def follow(folder: Path, renderer: JinjaRenderer, grammar: str, text: str) -> bool:
    """Whether each token of the text was allowed, no end before its end, and one there."""
    tokenizer = renderer.tokenizer
    grammars = Grammars(folder, vocab_size=tokenizer.vocab_size, eos_ids=frozenset(tokenizer.eos_ids))
    matcher = await grammars.matcher(grammar, ())
    for token in tokenizer.encode(text):
        [allowed] = allowed_tokens([matcher], tokenizer.vocab_size)
        if not allowed[token] or matcher.failure:
            return False
        matcher.accept(token)
    [allowed] = allowed_tokens([matcher], tokenizer.vocab_size)
    grammars.close()
    return not matcher.failure and bool(allowed[np.array(tokenizer.eos_ids)].all())


@pytest.mark.parametrize(("tokenizer", "name", "text"), EVERY)
async def test_calls_as_the_family_writes_them_are_allowed(folder: Any, tokenizer: str, name: str, text: str) -> None:
    path = folder("chatml_default_system", tokenizer, "</s>")
    renderer = load_renderer(path, tool_call_parser=name)  # type: ignore[arg-type]
    grammar = renderer.grammar(renderer.render([Message("user", "hi")]).text, (ADD, SAY), Constraint(calls=()))
    assert await follow(path, renderer, grammar, text)
    assert not await follow(path, renderer, grammar, text + " ")
    assert not await follow(path, renderer, grammar, "Sure. " + text)


@pytest.mark.parametrize("tokenizer", ["byte_level", "sentence_piece"])
async def test_json_is_allowed_on_one_line_with_single_spaces(folder: Any, tokenizer: str) -> None:
    path = folder("chatml_default_system", tokenizer, "</s>")
    renderer = load_renderer(path)
    grammar = renderer.grammar("", (), Constraint(schema={"type": "object"}))
    for text in ('{"a": [1, 2], "b": "ď 東"}', '{"a":[1,2],"b":null}', "{}"):
        assert await follow(path, renderer, grammar, text)
    for text in ('{"a" : 1}', '{\n"a": 1}', '{"a":  1}', "[1]", '{"a": 1'):
        assert not await follow(path, renderer, grammar, text)


@pytest.mark.parametrize("name", ["a b", "a>b", 'a"b', "a:b", "x" * 201])
def test_a_name_that_could_not_be_read_back_is_refused_where_names_stand_bare(folder: Any, name: str) -> None:
    tool, path = Tool(name), folder("chatml_default_system")
    for parser in ("qwen3_coder", "glm", "kimi", "deepseek"):
        with pytest.raises(BadRequest, match="cannot be forced"):
            load_renderer(path, tool_call_parser=parser).grammar("", (tool,), Constraint(calls=()))  # type: ignore[arg-type]
    assert load_renderer(path).grammar("", (tool,), Constraint(calls=()))


def test_where_no_format_of_calls_is_known_none_can_be_forced(folder: Any) -> None:
    renderer = load_renderer(folder("chatml_default_system"), tool_call_parser="none")
    with pytest.raises(BadRequest, match="tool_call_parser"):
        renderer.grammar("", (ADD,), Constraint(calls=()))
    assert "add" not in renderer.grammar("", (ADD,), Constraint(schema={"const": 1}, calls=()))


def test_references_of_a_tools_schema_stay_inside_it(folder: Any) -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "top": {"$ref": "#"}}}
    schema = {
        "$schema": "x",
        "$id": "http://y",
        "properties": {"list": {"$ref": "#/$defs/node"}},
        "$defs": {"node": node},
    }
    text = load_renderer(folder("chatml_default_system")).grammar(
        "", (ADD, Tool("walk", "", schema)), Constraint(calls=())
    )
    assert '"$ref": "#/$defs/tool1/$defs/node"' in text
    assert '"top": {"$ref": "#/$defs/tool1"}' in text
    assert "http://y" not in text
