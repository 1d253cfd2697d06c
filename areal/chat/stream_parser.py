"""One sampled answer, token by token, as what a client sees of it.

    parser = StreamParser(tokenizer, stop=("END",))
    async for chunk in chunks:
        for delta in parser.feed(chunk):          # TextDelta now; reasoning and tool calls are further Delta types
            ...
        if parser.stopped:                        # a stop text is complete: abort the backend
            break
    deltas = parser.finish()
    message, kept = parser.message(), parser.kept # the folded deltas; how many of the sampled tokens are the answer

End tokens stay in the ids and are trained, but show no text (T056). Ids end at the token that completes a stop text; what
came in the same chunk behind it is not kept. Feeding a whole answer at once gives the same text as feeding it token by
token. Built from detokenizer.py and stop.py. Used by proxy/recorder.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from areal.base.types import FinishReason, Message, TokenChunk
from areal.chat.base import Tokenizer
from areal.chat.detokenizer import Detokenizer
from areal.chat.stop import StopMatcher


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer's text; never empty."""

    text: str


Delta = TextDelta


class StreamParser:
    """State of one answer."""

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = ()) -> None:
        self._ends = frozenset(tokenizer.eos_ids)
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = StopMatcher(stop)
        self._deltas: list[Delta] = []
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
        shown: list[str] = []
        for token_id in chunk.token_ids.tolist():
            if self.stopped:
                break
            self.kept += 1
            if token_id not in self._ends:
                shown.append(self._stop.feed(self._detokenizer.feed(token_id)))
        self.finish_reason = "stop" if self.stopped else chunk.finish_reason
        return self._emit(shown)

    def finish(self) -> list[Delta]:
        """The rest: text held back for a stop text that did not come, an incomplete last character."""
        if self.stopped:
            return []
        last = self._stop.feed(self._detokenizer.finish())
        if self.stopped:
            self.finish_reason = "stop"
            return self._emit([last])
        return self._emit([last, self._stop.finish()])

    def message(self) -> Message:
        """All deltas so far, folded."""
        return fold(self._deltas)

    def _emit(self, shown: Iterable[str]) -> list[Delta]:
        text = "".join(shown)
        deltas = [TextDelta(text)] if text else []
        self._deltas += deltas
        return deltas


def fold(deltas: Iterable[Delta]) -> Message:
    """The assistant message that a stream of deltas makes."""
    return Message("assistant", content="".join(delta.text for delta in deltas))
