"""One sampled answer, token by token, as what a client sees of it: text, reasoning and tool calls.

    parser = renderer.parser(prompt.text, tools=call.tools, stop=("END",))
    async for chunk in chunks:
        for delta in parser.feed(chunk): ...      # TextDelta | ReasoningDelta | CallDelta (deltas.py)
        if parser.stopped:                        # a stop text is complete: abort the backend
            break
    deltas = parser.finish()
    message, kept = parser.message(), parser.kept # the folded deltas; how many of the sampled tokens are the answer

End tokens stay in the ids and are trained, but show no text (T056). Ids end at the token that completes a stop text; what
came in the same chunk behind it is not kept. Stop texts are matched in all that was sampled, reasoning and calls included.
Feeding a whole answer at once gives the same message as feeding it token by token (source.py says why). Special tokens
show no text, but those that mark reasoning or calls do, so that a marker in the wrong place does not vanish. Built from
detokenizer.py, stop.py, reasoning.py, tool_formats/. Made by renderer.py, used by proxy/generation.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from areal.base.types import FinishReason, Message, TokenChunk, Tool
from areal.chat.base import Tokenizer
from areal.chat.deltas import CallDelta, Delta, DeltaSink, ReasoningDelta, TextDelta, call_id, fold
from areal.chat.detokenizer import Detokenizer
from areal.chat.grammar import special_token
from areal.chat.reasoning import ReasoningStyle, read_reasoning
from areal.chat.source import Reading, Source
from areal.chat.stop import StopMatcher
from areal.chat.tool_formats.base import ToolFormat

_ENDED = object()  # what a reader never yields


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What to look for in one answer; the default is nothing but text. in_reasoning: the prompt opened the block."""

    reasoning: ReasoningStyle | None = None
    in_reasoning: bool = False
    tool_format: ToolFormat | None = None
    tools: tuple[Tool, ...] = ()

    def special_markers(self, tokenizer: Tokenizer) -> dict[int, bytes]:
        """Texts that are one special token and must show all the same, by its id."""
        reasoning = self.reasoning.markers if self.reasoning else ()
        markers = (*reasoning, *(self.tool_format.markers if self.tool_format else ()))
        found = ((special_token(tokenizer, marker), marker.encode()) for marker in markers)
        return {token: text for token, text in found if token is not None}

    def read(self, source: Source, sink: DeltaSink) -> Reading[None]:
        """The reader of what has a form; where it ends, all that comes is text."""
        if self.reasoning is not None:
            yield from read_reasoning(source, sink, self.reasoning, opened=self.in_reasoning)
        if self.tool_format is not None:
            yield from self.tool_format.read(source, sink, {tool.name: tool for tool in self.tools})


class StreamParser:
    """State of one answer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        form: AnswerForm | None = None,
        *,
        stop: Sequence[str] = (),
        special: Mapping[int, bytes] | None = None,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        """special: the form's `special_markers`, where they are known."""
        form = form or AnswerForm()
        length = form.tool_format.id_length if form.tool_format else 0
        self._ends = frozenset(tokenizer.eos_ids)
        self._detokenizer = Detokenizer(tokenizer, form.special_markers(tokenizer) if special is None else special)
        self._stop = StopMatcher(stop)
        self._source = Source()
        self._sink = DeltaSink(new_id or (lambda: call_id(length)), calls=form.tool_format is not None)
        self._reader: Reading[None] | None = form.read(self._source, self._sink)  # until it has ended
        self._deltas: list[Delta] = []
        self._message: Message | None = None  # of these deltas
        self.kept = 0
        self.finish_reason: FinishReason | None = None

    @property
    def stopped(self) -> bool:
        """A stop text is complete; nothing that comes later belongs to the answer."""
        return self._stop.stopped

    @property
    def stop_text(self) -> str | None:
        """The stop text that ended the answer."""
        return self._stop.matched

    def feed(self, chunk: TokenChunk) -> list[Delta]:
        """What the chunk adds. Tokens after a complete stop text are dropped."""
        stop, shown = self._stop, ""
        for token_id in () if stop.stopped else chunk.token_ids:
            self.kept += 1
            if token_id not in self._ends:
                shown += stop.feed(self._detokenizer.feed(token_id))
                if stop.stopped:
                    break
        self.finish_reason = "stop" if stop.stopped else chunk.finish_reason
        return self._read(shown)

    def finish(self) -> list[Delta]:
        """The rest: text held back for a stop text, a marker or a call that did not come, an incomplete last character."""
        shown = ""
        if not self.stopped:
            shown = self._stop.feed(self._detokenizer.finish())
            if self.stopped:
                self.finish_reason = "stop"
            else:
                shown += self._stop.finish()
        self._source.end()
        return self._read(shown)

    def message(self) -> Message:
        """All deltas so far, folded."""
        if self._message is None:
            self._message = fold(self._deltas)
        return self._message

    def has_calls(self) -> bool:
        return any(isinstance(delta, CallDelta) for delta in self._deltas)

    def _read(self, shown: str) -> list[Delta]:
        if self._reader is not None:
            self._source.feed(shown)
            if next(self._reader, _ENDED) is None:
                shown = ""
            else:
                self._reader, shown = None, self._source.unread()
        if shown:
            self._sink.text(shown)
        if self._source.ended:
            self._sink.finish()
        deltas = self._sink.take()
        self._deltas += deltas
        self._message = None
        return deltas


__all__ = ["AnswerForm", "CallDelta", "Delta", "ReasoningDelta", "StreamParser", "TextDelta", "fold"]
