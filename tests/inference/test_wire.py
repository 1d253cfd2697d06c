"""The wire's bodies: what one end writes the other reads back, and what makes no sense is an error with a reason."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.base.errors import (
    ArealError,
    BackendError,
    BackendTimeout,
    BadRequest,
    ContextOverflow,
    Unavailable,
)
from areal.base.types import GenerateRequest, SamplingParams, TokenChunk
from areal.inference import wire
from areal.inference.backend import BackendHealth
from areal.web.sse import SseDecoder

ids = st.integers(0, 2**31 - 1)
logprobs = st.floats(-1e4, 0, width=32)


@st.composite
def chunks(draw: st.DrawFn) -> TokenChunk:
    n = draw(st.integers(0, 4))
    candidate = st.tuples(ids, st.one_of(st.just(-math.inf), st.floats(-1e4, 0)))
    return TokenChunk(
        token_ids=tuple(draw(st.lists(ids, min_size=n, max_size=n))),
        logprobs=tuple(draw(st.lists(logprobs, min_size=n, max_size=n))),
        versions=tuple(draw(st.lists(ids, min_size=n, max_size=n))),
        kept_mass=tuple(draw(st.lists(st.floats(0, 1, width=32), min_size=n, max_size=n))),
        top=tuple(tuple(draw(st.lists(candidate, max_size=3))) for _ in range(n)) if draw(st.booleans()) else (),
        finish_reason=draw(st.sampled_from([None, "stop", "length", "abort"])),
    )


@given(chunks())
def test_a_chunk_survives_the_wire_bit_for_bit(chunk: TokenChunk) -> None:
    [event] = SseDecoder().feed(wire.encode_chunk(chunk))
    assert wire.decode_chunk(event.data) == chunk


@given(
    st.lists(ids, min_size=1, max_size=8),
    st.integers(0, 2**64 - 1),
    st.floats(0, 2),
    st.floats(0.01, 1),
    st.integers(0, 100),
)
def test_a_request_survives_the_wire(
    prompt: list[int], seed: int, temperature: float, top_p: float, top_k: int
) -> None:
    sampling = SamplingParams(
        max_tokens=7,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop_token_ids=(2, 7),
        top_logprobs=3,
    )
    request = GenerateRequest("r", "s", np.array(prompt, dtype=np.int32), sampling, seed, grammar='start: "a"')
    read = wire.decode_request(wire.encode_request(request))
    np.testing.assert_array_equal(read.prompt_ids, request.prompt_ids)
    assert (read.sampling, read.rng_seed, read.grammar) == (sampling, seed, request.grammar)
    assert (read.request_id, read.session_id) == ("r", "s")


def test_the_request_has_the_documented_shape() -> None:
    request = GenerateRequest(
        "r", "s", np.array([1, 2], dtype=np.int32), SamplingParams(max_tokens=3, temperature=0.5), 9
    )
    assert msgspec.json.decode(wire.encode_request(request)) == {
        "request_id": "r",
        "session_id": "s",
        "token_ids": [1, 2],
        "sampling_params": {
            "max_tokens": 3,
            "temperature": 0.5,
            "top_p": 1.0,
            "top_k": 0,
            "seed": 9,
            "stop_token_ids": [],
            "logprobs": 0,
            "structured_outputs": None,
        },
    }


def test_a_request_without_a_limit_is_a_bug_of_the_caller() -> None:
    request = GenerateRequest("r", "s", np.array([1], dtype=np.int32), SamplingParams(), 0)
    with pytest.raises(ValueError, match="max_tokens and temperature"):
        wire.encode_request(request)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not a generate request"),
        (
            b'{"request_id": "r", "session_id": "s", "token_ids": [], "sampling_params": {"max_tokens": 1}}',
            "token_ids is",
        ),
        (
            b'{"request_id": "r", "session_id": "s", "token_ids": [1], "sampling_params": {"max_tokens": 0}}',
            "at least 1",
        ),
        (
            b'{"request_id": "r", "session_id": "s", "token_ids": [1], "stream": false, "sampling_params": {"max_tokens": 1}}',
            "streams only",
        ),
        (
            b'{"request_id": "r", "session_id": "s", "token_ids": [99999999999], "sampling_params": {"max_tokens": 1}}',
            "no token id",
        ),
        (b'{"request_id": "r", "session_id": "s", "token_ids": [1], "sampling_params": {"max_token": 1}}', "max_token"),
    ],
)
def test_a_wrong_request_is_named(body: bytes, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        wire.decode_request(body)


@pytest.mark.parametrize(
    "event",
    [
        b"not json",
        b"[]",
        b'{"token_ids": ["a"]}',
        b'{"token_ids": [99999999999]}',
        b'{"token_ids": [1], "finish_reason": "done"}',
    ],
)
def test_an_event_that_is_no_chunk_is_refused(event: bytes) -> None:
    with pytest.raises(BackendError, match="no chunk"):
        wire.decode_chunk(event)


@pytest.mark.parametrize("logprobs", ["[]", "[-1, -2]", "[null, null, null]"])
def test_T054_what_a_server_leaves_out_stays_unknown(logprobs: str) -> None:
    read = wire.decode_chunk(f'{{"token_ids": [1, 2, 3], "logprobs": {logprobs}, "finish_reason": "stop"}}')
    assert read.token_ids == (1, 2, 3)
    assert np.isnan(read.logprobs).all()
    assert len(read.logprobs) == 3
    assert read.versions == (-1, -1, -1)
    assert read.kept_mass == (1, 1, 1)


def test_T009_a_logprob_that_is_no_number_stays_none_and_the_others_stand() -> None:
    n = 2
    sent = TokenChunk((1, 2), (-1.0, math.nan), (0,) * n, (1.0,) * n)
    assert b"NaN" not in wire.encode_chunk(sent)
    [event] = SseDecoder().feed(wire.encode_chunk(sent))
    np.testing.assert_array_equal(wire.decode_chunk(event.data).logprobs, sent.logprobs)


@pytest.mark.parametrize(
    ("status", "error", "becomes"),
    [
        (400, ContextOverflow(70, 64), ContextOverflow),
        (400, BadRequest("top_p is 3"), BadRequest),
        (502, BackendError("broken"), BackendError),
        (504, BackendTimeout("slow"), BackendTimeout),
        (503, Unavailable("draining"), BackendError),
    ],
)
def test_an_error_keeps_its_type_and_reason(status: int, error: ArealError, becomes: type[ArealError]) -> None:
    read = wire.decode_error(status, wire.encode_error(error))
    assert type(read) is becomes
    assert str(error) in str(read)
    assert read.status == status
    assert (read.retry_after_s is not None) == (status == 503)


def test_an_answer_that_is_no_json_is_shown_in_part() -> None:
    assert "<html>" in str(wire.decode_error(502, b"<html>" + b"x" * 10_000))
    assert len(str(wire.decode_error(502, b"x" * 10_000))) < 500


def test_another_protocol_version_is_refused() -> None:
    health = BackendHealth("m", 3, 100, 0, 0, 100)
    assert wire.decode_health(wire.encode_health(health)) == health
    other = wire.encode_health(health).replace(b'"protocol":2', b'"protocol":3')
    with pytest.raises(BackendError, match="protocol 3"):
        wire.decode_health(other)
    with pytest.raises(BackendError, match="no inference server"):
        wire.decode_health(b"{}")
