"""Messages <-> tokens: chat templates, tokenizers, token-exact continuation, incremental text. No torch, no transformers.

renderer = load_renderer("/models/smollm2")        # a Hugging Face model folder: tokenizer.json and its neighbours
prompt = renderer.render(messages)
parser = renderer.parser(prompt.text, tools, stop=("END",))
"""

from __future__ import annotations

from pathlib import Path

from areal.chat.base import Mismatch, RenderedPrompt, Renderer, Tokenizer
from areal.chat.deltas import CallDelta, ReasoningDelta, TextDelta
from areal.chat.renderer import JinjaRenderer, end_of_turn
from areal.chat.scripted import scripted_renderer
from areal.chat.stream_parser import AnswerForm, StreamParser
from areal.chat.template import ChatTemplate
from areal.config.rollout import ReasoningParser, ToolCallParser
from areal.models.tokenizer import HfTokenizer


def load_renderer(
    folder: str | Path,
    *,
    chat_template: str | Path | None = None,
    tool_call_parser: ToolCallParser = "qwen",
    reasoning_parser: ReasoningParser = "qwen3",
) -> JinjaRenderer:
    """Template and tokenizer of a model folder; chat_template: a file to use in place of the folder's own template.
    Completions end at every id its files name, and at the template's own end of turn. Raises ConfigError when the files
    cannot be used."""
    tokenizer = HfTokenizer.load(folder)
    special = tokenizer.special_tokens
    template = ChatTemplate.read(chat_template, special) if chat_template else ChatTemplate.load(folder, special)
    return JinjaRenderer(
        tokenizer.with_eos(end_of_turn(template, tokenizer)),
        template,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
    )


__all__ = [
    "AnswerForm",
    "CallDelta",
    "ChatTemplate",
    "HfTokenizer",
    "JinjaRenderer",
    "Mismatch",
    "ReasoningDelta",
    "RenderedPrompt",
    "Renderer",
    "StreamParser",
    "TextDelta",
    "Tokenizer",
    "load_renderer",
    "scripted_renderer",
]
