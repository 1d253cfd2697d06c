"""Reasoning: the part of an answer between think markers, before what the client is to read.

    style = reasoning_style("qwen3", template_source)
    reader = read_reasoning(source, sink, style, opened=style.opened_by(prompt_text))     # then the rest is the answer

`qwen3` (the default) knows <think>…</think> whether the prompt opens it or the model does, and the markers of another family
where the chat template shows them. `deepseek_r1` takes every answer to begin inside the reasoning, for models whose template
does not open it although they always think. Only a block at the start of an answer is reasoning; white space around it is
markup. An answer that ends inside the block is all reasoning. Used by stream_parser.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal.chat.deltas import DeltaSink
from areal.chat.source import SPACES, Reading, Source
from areal.config.rollout import ReasoningParser


@dataclass(frozen=True, slots=True)
class ReasoningStyle:
    """The two markers. always: answers begin inside the block although no prompt says so."""

    opening: str
    closing: str
    always: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.opening, self.closing)

    def opened_by(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins inside the block."""
        prompt = prompt.rstrip()
        return prompt.endswith(self.opening) or (self.always and not prompt.endswith(self.closing))


REASONING_STYLES: dict[ReasoningParser, ReasoningStyle | None] = {
    "qwen3": ReasoningStyle("<think>", "</think>"),
    "deepseek_r1": ReasoningStyle("<think>", "</think>", always=True),
    "mistral": ReasoningStyle("[THINK]", "[/THINK]"),
    "kimi": ReasoningStyle("◁think▷", "◁/think▷"),
    "none": None,
}


def reasoning_style(name: ReasoningParser, template: str) -> ReasoningStyle | None:
    """The named style; of the default the one that the template's source shows."""
    shown = (style for style in REASONING_STYLES.values() if style is not None and style.closing in template)
    style = REASONING_STYLES[name]
    return next(shown, style) if name == "qwen3" else style


def read_reasoning(source: Source, sink: DeltaSink, style: ReasoningStyle, *, opened: bool) -> Reading[None]:
    """Reads the block, if there is one, and the white space behind it; what is left in the source is the answer."""
    start = source.at
    yield from source.spaces()
    found = yield from source.accept(style.opening)
    if not found and not opened:
        source.at = start
        return
    yield from source.spaces()
    held = ""
    while not (yield from source.accept(style.closing)):
        if not (yield from source.peek()):
            return
        text = held + (source.run(style.closing[0]) or source.take())
        shown = text.rstrip(SPACES)
        held = text[len(shown) :]
        sink.reasoning(shown)
        source.settle()
    yield from source.spaces()
