"""A dialect: one public protocol (Chat Completions, Responses, Messages) as four pure translations.

    call = dialect.parse(body, headers)          # decoded JSON -> ModelCall, or BadRequest naming the field
    reply = dialect.format(answer, call)         # the non-stream answer, JSON-ready
    encoder = dialect.stream(call)               # one per streamed answer: events -> Server-Sent Events
    body = dialect.error_body(error, request_id) # the protocol's own error shape

The recorder speaks in the events below and knows no protocol; app.py knows no field of any. A new dialect is one class
in one file and one line of `DIALECTS` in __init__.py. No I/O, no state beyond one answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import msgspec

from areal.base.errors import ArealError
from areal.base.types import FinishReason, Message, ModelCall
from areal.chat.deltas import CallDelta

# Several text parts of one message become one text, in order, with this between them: the same in every dialect.
TEXT_JOINER = "\n"
# JSON has no infinity: a candidate that sampling excluded is reported with this log-probability.
LOGPROB_FLOOR = -9999.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One sampled token as a client may ask to see it. data: its bytes. top: candidates as (bytes, natural log)."""

    data: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """A finished choice. interaction_id: what it is recorded under. tokens: filled if log-probs were asked for."""

    index: int
    interaction_id: str
    message: Message
    finish_reason: FinishReason
    completion_tokens: int
    tokens: tuple[TokenLogprob, ...] = ()
    stop_text: str | None = None  # the client's stop text that ended it


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished call. created: seconds since the epoch."""

    id: str
    model: str
    created: int
    prompt_tokens: int
    choices: tuple[Choice, ...]
    cached_tokens: int = 0  # prompt tokens that continue a recorded conversation

    @property
    def completion_tokens(self) -> int:
        return sum(choice.completion_tokens for choice in self.choices)


@dataclass(frozen=True, slots=True)
class Started:
    """The first token was sampled: from here on the answer's status is 200. `answer` has no choices yet."""

    answer: Answer


class Piece(msgspec.Struct, frozen=True):
    """What one step of sampling added to a choice; any of it may be empty. A Struct, as TokenChunk is."""

    choice: int
    text: str = ""
    reasoning: str = ""
    tools: tuple[CallDelta, ...] = ()
    tokens: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceEnded:
    """A choice is complete, and in the store."""

    choice: Choice


@dataclass(frozen=True, slots=True)
class Done:
    """Every choice has ended."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Failed:
    """Nothing more comes; the error is said in-band."""

    error: ArealError


Event = Started | Piece | ChoiceEnded | Done | Failed


class StreamEncoder(Protocol):
    """The wire form of one streamed answer."""

    ping: bytes  # keeps the connection alive while nothing is sampled; clients ignore it

    def encode(self, event: Event) -> bytes:
        """The bytes of this event, possibly none."""
        ...


class Dialect(Protocol):
    """One public protocol. `routes` are paths without prefix, for example "/chat/completions"."""

    name: str
    id_prefix: str
    routes: tuple[str, ...]

    def parse(self, body: Any, headers: Mapping[str, str]) -> ModelCall:
        """Raises BadRequest with `param`."""
        ...

    def format(self, answer: Answer, call: ModelCall) -> dict[str, Any]: ...

    def stream(self, call: ModelCall) -> StreamEncoder: ...

    def error_body(self, error: ArealError, request_id: str = "") -> dict[str, Any]: ...


@runtime_checkable
class CountsTokens(Protocol):
    """A dialect that also tells how many tokens a request's prompt has, before it is sent to be answered."""

    count_routes: tuple[str, ...]  # they take the same body as `routes`

    def format_count(self, tokens: int) -> dict[str, Any]: ...
