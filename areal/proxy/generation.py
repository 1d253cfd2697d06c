"""One choice while it is sampled: chunks of tokens in, pieces for the client out, the record kept beside them.

    choice = Generation(renderer.tokenizer, sampling, renderer.parser(prompt.text, call.tools, stop=sampling.stop), index=0)
    async for chunk in chunks:
        piece = choice.feed(chunk)            # what a client sees of it
        if choice.finished: break             # also when a stop text is complete: the caller aborts the backend
    piece = choice.finish()
    completion, message = choice.completion(), choice.message()

What is recorded are the backend's own ids, log-probs and versions, taken before any parser sees them (T020). Ids end at the
token that completes a stop text (settled 14). A log-prob that is missing, NaN or infinite makes the choice untrainable; it
is never replaced by a number (T009, T054). No I/O. Used by recorder.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
import numpy as np

from areal.base.types import BoolArray, Completion, FinishReason, FloatArray, Message, SamplingParams, Tag, TokenChunk
from areal.chat.base import Tokenizer
from areal.chat.deltas import CallDelta, Delta, ReasoningDelta, TextDelta
from areal.chat.stream_parser import StreamParser
from areal.proxy.dialects.base import Piece, TokenLogprob


class Generation:
    """State of one choice. sampling: complete, no None left in it. parser: fresh, of this choice alone (T010)."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, parser: StreamParser, *, index: int) -> None:
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._index = index
        self._parser = parser
        self._chunks: list[TokenChunk] = []
        self._shown: list[TokenLogprob] = []

    @property
    def finished(self) -> bool:
        """Nothing more of this choice is wanted."""
        return self._parser.finish_reason is not None  # a complete stop text is one

    @property
    def tokens(self) -> int:
        """How many sampled tokens belong to the answer."""
        return self._parser.kept

    @property
    def shown(self) -> tuple[TokenLogprob, ...]:
        """One entry per token, if the client asked for log-probs."""
        return tuple(self._shown)

    @property
    def stop_text(self) -> str | None:
        return self._parser.stop_text

    def feed(self, chunk: TokenChunk) -> Piece:
        """What this chunk adds for the client."""
        before = self._parser.kept
        deltas = self._parser.feed(chunk)
        added = self._parser.kept - before
        chunk = _of_one_length(chunk, len(chunk.token_ids))
        if added < len(chunk.token_ids):  # a stop text was complete inside the chunk
            chunk = _cut(chunk, added)
        self._chunks.append(chunk)
        if not self._sampling.want_logprobs:
            return self._piece(deltas)
        tokens = self._logprobs(chunk)
        self._shown.extend(tokens)
        return self._piece(deltas, tokens)

    def finish(self) -> Piece:
        """What was held back: text that might have become a stop text or a call, an incomplete last character."""
        return self._piece(self._parser.finish())

    def message(self) -> Message:
        return self._parser.message()

    def finish_reason(self) -> FinishReason:
        """As the client hears it: a call that was cut off says length; abort where nothing ended the stream."""
        reason = self._parser.finish_reason or "abort"
        return "tool_calls" if reason == "stop" and self._parser.has_calls() else reason

    def tags(self, completion: Completion) -> tuple[Tag, ...]:
        """What else is to be said of the record."""
        tags: list[Tag] = []
        if not np.isfinite(completion.logprobs).all():
            tags.append("untrainable")
        if self._sampling.temperature == 0:
            tags.append("greedy")
        if self._sampling.constraint is not None:
            tags.append("constrained")
        return tuple(tags)

    def completion(self, finish_reason: FinishReason | None = None) -> Completion:
        """The record so far; also of a choice that was aborted."""
        chunks = self._chunks
        return Completion(
            token_ids=np.array([one for chunk in chunks for one in chunk.token_ids], np.int32),
            logprobs=_floats([one for chunk in chunks for one in chunk.logprobs]),
            versions=np.array([one for chunk in chunks for one in chunk.versions], np.int32),
            kept_mass=_floats([one for chunk in chunks for one in chunk.kept_mass]),
            temperature=1.0 if self._sampling.temperature is None else self._sampling.temperature,
            finish_reason=finish_reason or self.finish_reason(),
            constrained=self._constrained(),
        )

    def _constrained(self) -> BoolArray | None:
        """Which tokens a grammar had a hand in; None where the backend does not say so of all of them."""
        flags = [chunk.constrained for chunk in self._chunks if chunk.token_ids]
        known = [one for one in flags if one is not None]
        return np.array([one for flag in known for one in flag]) if known and len(known) == len(flags) else None

    def _piece(self, deltas: list[Delta], tokens: tuple[TokenLogprob, ...] = ()) -> Piece:
        if len(deltas) == 1 and isinstance(deltas[0], TextDelta):  # almost every token
            return Piece(self._index, text=deltas[0].text, tokens=tokens)
        return Piece(
            self._index,
            text="".join(delta.text for delta in deltas if isinstance(delta, TextDelta)),
            reasoning="".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta)),
            tools=_calls(deltas),
            tokens=tokens,
        )

    def _logprobs(self, chunk: TokenChunk) -> tuple[TokenLogprob, ...]:
        top = chunk.top or ((),) * len(chunk.token_ids)
        return tuple(
            TokenLogprob(self._bytes(token), logprob, tuple((self._bytes(other), value) for other, value in candidates))
            for token, logprob, candidates in zip(chunk.token_ids, chunk.logprobs, top, strict=True)
        )

    def _bytes(self, token_id: int) -> bytes:
        """A token's own bytes; special tokens, which have none in the text, by their name."""
        return self._tokenizer.piece(token_id) or self._tokenizer.decode([token_id], skip_special=False).encode()


def _calls(deltas: Iterable[Delta]) -> tuple[CallDelta, ...]:
    """One for each call: clients fold by index, and some of them badly where an index stands twice in one chunk."""
    found: dict[int, CallDelta] = {}
    for delta in deltas:
        if isinstance(delta, CallDelta):
            begun = found.setdefault(delta.index, CallDelta(delta.index, delta.id, delta.name))
            found[delta.index] = msgspec.structs.replace(begun, arguments=begun.arguments + delta.arguments)
    return tuple(found.values())


def _of_one_length(chunk: TokenChunk, length: int) -> TokenChunk:
    """A backend that names fewer numbers than tokens: the rest is unknown (NaN, version -1), never invented."""
    if len(chunk.logprobs) == len(chunk.versions) == len(chunk.kept_mass) == length:
        return chunk
    return msgspec.structs.replace(
        chunk,
        logprobs=(math.nan,) * length,
        versions=(-1,) * length if len(chunk.versions) != length else chunk.versions,
        kept_mass=(1.0,) * length if len(chunk.kept_mass) != length else chunk.kept_mass,
        top=(),
    )


def _cut(chunk: TokenChunk, length: int) -> TokenChunk:
    return msgspec.structs.replace(
        chunk,
        token_ids=chunk.token_ids[:length],
        logprobs=chunk.logprobs[:length],
        versions=chunk.versions[:length],
        kept_mass=chunk.kept_mass[:length],
        top=chunk.top[:length],
        constrained=None if chunk.constrained is None else chunk.constrained[:length],
    )


def _floats(values: list[float]) -> FloatArray:
    with np.errstate(over="ignore"):  # a backend may name a number beyond float32: then it is infinite
        return np.array(values, np.float32)
