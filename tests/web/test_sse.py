"""Event streams decode the same however the network cuts them (T104)."""

from __future__ import annotations

import itertools

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.base.errors import BackendError
from areal.web.sse import DONE, DONE_EVENT, PING, SseDecoder, SseEvent, encode_event

UPSTREAM = (
    b": PROCESSING\n\n"
    b'data: {"n":1,"text":"a\xe2\x82\xac"}\r\n\r\ndata: {"n":2}\n\n'
    b"event: named\rid: 7\rdata: line one\rdata:line two\r\r"
    b"retry: 10\nunknown\ndata\n\n"
    b"data: [DONE]\r\n\r\n"
)
EVENTS = [
    SseEvent(b'{"n":1,"text":"a\xe2\x82\xac"}'),
    SseEvent(b'{"n":2}'),
    SseEvent(b"line one\nline two", "named", "7"),
    SseEvent(b"", "message", "7"),
    SseEvent(DONE, "message", "7"),
]


def decode(chunks: list[bytes]) -> list[SseEvent]:
    decoder = SseDecoder()
    return [event for chunk in chunks for event in decoder.feed(chunk)] + decoder.close()


@given(st.lists(st.integers(0, len(UPSTREAM)), max_size=12))
def test_T104_any_split_gives_the_same_events(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(UPSTREAM)]
    assert decode([UPSTREAM[a:b] for a, b in itertools.pairwise(edges)]) == EVENTS


def test_T104_byte_by_byte_and_with_a_byte_order_mark() -> None:
    assert decode([bytes([byte]) for byte in b"\xef\xbb\xbf" + UPSTREAM]) == EVENTS


def test_T104_an_event_is_given_as_soon_as_it_is_complete() -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: 1\n") == []
    assert decoder.feed(b"\n") == [SseEvent(b"1")]
    assert decoder.feed(b"data: 2\r\n\r") == []
    assert decoder.feed(b"\n") == [SseEvent(b"2")]


def test_T104_a_line_that_looks_whole_belongs_to_what_came_before_it() -> None:
    whole = [b"data: 1\n\n", b"event: n\n", b"data: 2\n\n", b"id: 9\n\n", b"data: 3\n\n"]
    assert decode(whole) == [SseEvent(b"1"), SseEvent(b"2", "n"), SseEvent(b"3", "message", "9")]
    assert decode([b"data: 1\n\n", b"data: 2\n", b"data: 3\n\n"]) == [SseEvent(b"1"), SseEvent(b"2\n3")]
    assert decode([b"data: 1\n\n", b"data: 2\r", b"data: 3\n\n"]) == [SseEvent(b"1"), SseEvent(b"2\n3")]
    assert decode([b"data: 1\n\n", b"data: \n\n", b"data: 2\n\n"]) == [SseEvent(b"1"), SseEvent(b""), SseEvent(b"2")]


def test_a_stream_cut_before_its_last_blank_line_gives_what_it_held() -> None:
    for tail in (b"data: x", b"data: x\n", b"data: x\r"):
        assert decode([b"data: 1\n\n", tail]) == [SseEvent(b"1"), SseEvent(b"x")]
    assert decode([b""]) == []


@given(st.text(), st.none() | st.from_regex(r"[a-z_.]{1,20}", fullmatch=True))
def test_encoded_events_decode_to_themselves(text: str, name: str | None) -> None:
    data = text.encode()
    expected = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    assert decode([PING + encode_event(data, name) + DONE_EVENT]) == [
        SseEvent(expected, name or "message"),
        SseEvent(DONE),
    ]


def test_json_passes_untouched() -> None:
    body = {"choices": [{"delta": {"content": "line\nbreak 🙂"}}]}
    [event] = decode([encode_event(orjson.dumps(body))])
    assert orjson.loads(event.data) == body


def test_what_is_no_event_stream_is_refused() -> None:
    decoder = SseDecoder()
    decoder.feed(b"x" * 2**24)
    with pytest.raises(BackendError, match="event stream"):
        decoder.feed(b"x")


@pytest.mark.timeout(120)  # which a decoder that copies what it holds at every piece does not keep: 10^12 bytes
def test_a_line_in_many_pieces_costs_what_it_is_long() -> None:
    decoder, line = SseDecoder(), b"data: " + b"x" * 8_000_000
    for at in range(0, len(line), 16):
        assert decoder.feed(line[at : at + 16]) == []
    assert decoder.feed(b"\r") == []
    [event] = decoder.feed(b"\n\r\n")
    assert event.data == line[6:]
    assert [one.data for one in decoder.feed(b"data: a\n\ndata: b") + decoder.close()] == [b"a", b"b"]
