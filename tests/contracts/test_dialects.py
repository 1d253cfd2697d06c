"""What every public protocol of the table must do, whatever its fields are called."""

from __future__ import annotations

import json
import math

import pytest

from areal.base.errors import ArealError, BackendError, BadRequest, ContextOverflow, InvalidKey, NoCapacity
from areal.base.types import Message, ModelCall
from areal.proxy.dialects import dialects
from areal.proxy.dialects.base import (
    Answer,
    Choice,
    ChoiceEnded,
    Dialect,
    Done,
    Event,
    Failed,
    Piece,
    Started,
    TokenLogprob,
)

TABLE = [pytest.param(one, id=one.name) for one in dialects()]
CALL = ModelCall((Message("user", "hi"),), stream=True)
CHOICE = Choice(0, "id-1", Message("assistant", "Hé ✓"), "stop", 2, (TokenLogprob(b"\xc3", -math.inf),))
ANSWER = Answer("id-1", "default", 1, 3, (CHOICE,))
EVENTS: list[Event] = [
    Started(ANSWER),
    Piece(0),
    Piece(0, "Hé"),
    Piece(0, " ✓", tokens=(TokenLogprob(b"\xc3", math.nan),)),
    ChoiceEnded(CHOICE),
    Done(ANSWER),
]


@pytest.mark.parametrize("dialect", TABLE)
def test_routes_are_paths_without_a_version(dialect: Dialect) -> None:
    assert dialect.routes
    for route in dialect.routes:
        assert route.startswith("/")
        assert not route.startswith("/v1")
    assert dialect.id_prefix


@pytest.mark.parametrize("dialect", TABLE)
@pytest.mark.parametrize("body", [None, [], "text", 5, True, {}, {"messages": 5, "input": 5}])
def test_what_is_no_request_is_a_bad_request(dialect: Dialect, body: object) -> None:
    with pytest.raises(BadRequest):
        dialect.parse(body, {})


@pytest.mark.parametrize("dialect", TABLE)
def test_answers_are_strict_json_and_carry_the_text_and_the_id(dialect: Dialect) -> None:
    text = json.dumps(dialect.format(ANSWER, CALL), allow_nan=False, ensure_ascii=False)
    assert "Hé ✓" in text
    assert "id-1" in text


@pytest.mark.parametrize("dialect", TABLE)
def test_streams_are_server_sent_events_of_strict_json(dialect: Dialect) -> None:
    encoder = dialect.stream(CALL)
    wire = b"".join(encoder.encode(event) for event in EVENTS).decode()
    assert wire.endswith("\n\n")
    datas = [line.removeprefix("data: ") for line in wire.splitlines() if line.startswith("data: ")]
    for data in datas:
        if data != "[DONE]":
            json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert "Hé" in wire
    assert encoder.ping.endswith(b"\n\n")
    assert b'data: {"choices' not in encoder.ping


@pytest.mark.parametrize("dialect", TABLE)
@pytest.mark.parametrize(
    "error",
    [BadRequest("no", param="x"), ContextOverflow(9, 8), InvalidKey(), NoCapacity(1, 1), BackendError("down; retry")],
)
def test_errors_keep_their_sentence_whole_and_in_band(dialect: Dialect, error: ArealError) -> None:
    assert str(error) in json.loads(json.dumps(dialect.error_body(error)))["error"]["message"]
    encoder = dialect.stream(CALL)
    encoder.encode(Started(ANSWER))
    assert str(error) in encoder.encode(Failed(error)).decode()
