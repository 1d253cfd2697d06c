"""Messages <-> tokens: chat templates, tokenizers, token-exact continuation, incremental text. No torch, no transformers.

renderer = load_renderer("/models/smollm2")        # a Hugging Face model folder: tokenizer.json and its neighbours
prompt = renderer.render(messages)
parser = StreamParser(renderer.tokenizer, stop=("END",))
"""

from __future__ import annotations

from pathlib import Path

from areal.chat.base import Mismatch, RenderedPrompt, Renderer, Tokenizer
from areal.chat.renderer import JinjaRenderer, end_of_turn
from areal.chat.scripted import scripted_renderer
from areal.chat.stream_parser import StreamParser, TextDelta
from areal.chat.template import ChatTemplate
from areal.chat.tokenizer import HfTokenizer


def load_renderer(folder: str | Path) -> JinjaRenderer:
    """Template and tokenizer of a model folder. Completions end at every id its files name, and at the template's own
    end of turn. Raises ConfigError when the folder's files cannot be used."""
    tokenizer = HfTokenizer.load(folder)
    template = ChatTemplate.load(folder, tokenizer.special_tokens)
    return JinjaRenderer(tokenizer.with_eos(end_of_turn(template, tokenizer)), template)


__all__ = [
    "ChatTemplate",
    "HfTokenizer",
    "JinjaRenderer",
    "Mismatch",
    "RenderedPrompt",
    "Renderer",
    "StreamParser",
    "TextDelta",
    "Tokenizer",
    "load_renderer",
    "scripted_renderer",
]
