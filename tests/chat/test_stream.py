"""Text of token streams: characters (T013), stop texts (T014), end tokens (T056), and that no split changes a thing."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.base.types import FinishReason, Message, TokenChunk
from areal.chat import StreamParser, TextDelta
from areal.chat.detokenizer import Detokenizer
from areal.chat.stop import StopMatcher
from areal.chat.stream_parser import fold
from areal.inference.scripted.vocabulary import Vocabulary

BYTES = Vocabulary({}, [])
END = BYTES.id_of(b"<|im_end|>")


def chunk(ids: list[int], finish: FinishReason | None = None) -> TokenChunk:
    n = len(ids)
    return TokenChunk(tuple(ids), (0.0,) * n, (0,) * n, (1.0,) * n, (), finish)


def pieces(vocabulary: Vocabulary, *texts: str) -> list[int]:
    return [vocabulary.id_of(text.encode()) for text in texts]


def stream(parser: StreamParser, ids: list[int], cuts: list[int]) -> list[str]:
    """Shown texts, one per chunk that showed any; ids cut at `cuts`. Stops feeding once the parser has stopped."""
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    shown: list[TextDelta] = []
    for start, end in itertools.pairwise(edges):
        if not parser.stopped:
            shown += parser.feed(chunk(ids[start:end], "length" if end == len(ids) else None))
    shown += parser.finish()
    return [delta.text for delta in shown]


@pytest.mark.parametrize(
    ("cut", "text"),
    [
        (["c4", "8f", "c3a1", "62656c736b", "c3", "a9"], "ďábelské"),
        (["f0", "9f", "91", "a9", "e2", "80", "8d", "f0", "9f", "92", "bb"], "👩‍💻"),
    ],
)
def test_T013_characters_are_never_shown_in_halves(cut: list[str], text: str) -> None:
    tokens = [bytes.fromhex(piece) for piece in cut]
    vocabulary = Vocabulary({}, tokens)
    parser = StreamParser(vocabulary)
    shown = stream(parser, [vocabulary.id_of(token) for token in tokens], list(range(len(tokens))))
    assert "".join(shown) == text
    assert not [delta for delta in shown if "\ufffd" in delta]
    assert parser.kept == len(tokens)
    assert parser.message() == Message("assistant", text)


def test_T013_a_stream_that_ends_inside_a_character_shows_one_mark_at_the_end() -> None:
    detokenizer = Detokenizer(BYTES)
    assert [detokenizer.feed(byte) for byte in b"a\xf0\x9f\x91"] == ["a", "", "", ""]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


@given(st.binary(max_size=24))
def test_the_incremental_text_equals_the_decoded_whole(data: bytes) -> None:
    detokenizer = Detokenizer(BYTES)
    assert "".join(map(detokenizer.feed, data)) + detokenizer.finish() == BYTES.decode(list(data))


@pytest.mark.parametrize(
    ("cut", "text", "kept"),
    [
        (["one ", "tw", "o thr", "ee four"], "one ", 4),
        (["one ", "tw", "ist"], "one twist", 3),
        (["one ", "two three", " four", " five"], "one ", 2),
        (["one two thre"], "one two thre", 1),
    ],
)
def test_T014_stop_texts_across_tokens(cut: list[str], text: str, kept: int) -> None:
    vocabulary = Vocabulary({}, [piece.encode() for piece in cut])
    for cuts in ([], list(range(len(cut)))):  # in one chunk, and token by token
        parser = StreamParser(vocabulary, stop=("two three",))
        assert "".join(stream(parser, pieces(vocabulary, *cut), cuts)) == text
        assert parser.kept == kept
        stopped = "two three" in "".join(cut)
        assert parser.finish_reason == ("stop" if stopped else "length")
        assert parser.stop_text == ("two three" if stopped else None)
        if stopped:
            assert parser.feed(chunk([97])) == []
            assert parser.kept == kept


def test_T014_held_text_is_released_as_soon_as_it_cannot_match() -> None:
    matcher = StopMatcher(("abcd", "bx"))
    assert [matcher.feed(text) for text in ("zab", "c", "c", "b", "x", "more")] == ["z", "", "abcc", "", "", ""]
    assert (matcher.matched, matcher.finish()) == ("bx", "")


alphabet = st.text("ab", min_size=1, max_size=4)


@given(st.text("abc", max_size=16), st.lists(alphabet, max_size=3), st.lists(st.integers(0, 99), max_size=6))
def test_stop_texts_end_an_answer_at_the_same_place_for_every_split(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    whole, parts = StopMatcher(stops), StopMatcher(stops)
    expected = whole.feed(text) + whole.finish()
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    shown = ""
    for start, end in itertools.pairwise(edges):
        shown += parts.feed(text[start:end])
        assert expected.startswith(shown)
    assert shown + parts.finish() == expected
    assert parts.matched == whole.matched
    # The definition: cut before the stop text that is complete first, the longest of those.
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    naive = text
    if ends:
        naive = text[: ends[0] - max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))]
    assert expected == naive


@given(
    st.binary(max_size=20), st.lists(st.text("aé", min_size=1, max_size=3), max_size=2), st.lists(st.integers(0, 99))
)
def test_a_batch_result_equals_the_folded_stream_for_every_split(
    data: bytes, stops: list[str], cuts: list[int]
) -> None:
    ids = [*data, END]
    batch, streamed = StreamParser(BYTES, stop=stops), StreamParser(BYTES, stop=stops)
    once = [TextDelta(text) for text in stream(batch, ids, [])]
    many = [TextDelta(text) for text in stream(streamed, ids, cuts)]
    assert fold(once) == fold(many) == batch.message() == streamed.message()
    assert (batch.kept, batch.stop_text, batch.finish_reason) == (
        streamed.kept,
        streamed.stop_text,
        streamed.finish_reason,
    )
    assert all(delta.text for delta in many)


def test_T056_the_end_token_is_kept_and_not_shown() -> None:
    toy = Vocabulary({11: b"x", 12: b"y", 2: b"END"}, [], end_tokens=("END",))
    parser = StreamParser(toy)
    assert parser.feed(chunk([11, 12, 2], "stop")) == [TextDelta("xy")]
    assert parser.finish() == []
    assert (parser.kept, parser.finish_reason) == (3, "stop")


def test_an_empty_answer_is_an_empty_message() -> None:
    parser = StreamParser(BYTES, stop=("",))
    assert parser.feed(chunk([END], "stop")) == []
    assert (parser.finish(), parser.kept, parser.message()) == ([], 1, Message("assistant"))
