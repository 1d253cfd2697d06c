"""Messages <-> tokens: what the proxy needs to know of a model's text, and nothing of its weights.

    prompt = renderer.render(call.messages, call.tools)                       # a new branch
    prompt = renderer.extend(recorded, call.messages, call.tools)             # or the recorded ids + the new messages
    parser = renderer.parser(prompt.text, call.tools, stop=("END",))          # chat/stream_parser.py
    for delta in parser.feed(chunk): ...

Renderers: chat/renderer.py (Jinja chat templates with the token-exact bridge). No torch, no transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from areal.base.types import BranchReason, Constraint, IntArray, Interaction, Message, Tool

if TYPE_CHECKING:
    from areal.chat.stream_parser import StreamParser


class Tokenizer(Protocol):
    """Text <-> ids of one model. `encode` adds no BOS/EOS of its own but knows special tokens written as text."""

    vocab_size: int
    eos_ids: tuple[int, ...]  # every id that ends a completion (generation_config may name several)
    strips_first_space: bool  # SentencePiece: a text's leading space belongs to its first token, not to the text

    def encode(self, text: str) -> list[int]: ...

    def piece(self, token_id: int) -> bytes:
        """The bytes this token adds to the text; empty for special tokens (they are never shown to a client)."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """ids: what the backend gets. text: of a new branch the whole prompt, of a continuation what stands behind the recorded
    ids; either way it ends as the prompt ends. parent: the interaction whose ids it extends, or None."""

    ids: IntArray
    text: str
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Why a recorded conversation cannot be continued token-exactly: the reason in words, and its name."""

    reason: str
    name: BranchReason


class Renderer(Protocol):
    """Chat template + tokenizer of one model."""

    tokenizer: Tokenizer

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), kwargs: Mapping[str, Any] | None = None
    ) -> RenderedPrompt:
        """Template with the generation prompt, tokenised once. Raises BadRequest with the template's own reason."""
        ...

    def extend(
        self,
        recorded: Interaction,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt | Mismatch:
        """recorded.prompt_ids + recorded.completion.token_ids + only what the new messages add, verified against the
        template; Mismatch where the template rewrites history (for example strips earlier reasoning)."""
        ...

    def parser(self, prompt_text: str, tools: Sequence[Tool] = (), *, stop: Sequence[str] = ()) -> StreamParser:
        """The reader of one answer to this prompt: reasoning always, tool calls where there are tools."""
        ...

    def grammar(self, prompt_text: str, tools: Sequence[Tool], constraint: Constraint) -> str:
        """What masks the sampling of an answer to this prompt so that the parser finds in it what the constraint wants
        (chat/grammar.py). Raises BadRequest for what this model's format cannot write."""
        ...
