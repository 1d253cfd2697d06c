"""Script files: what they may say, and that a wrong line is named with its number and a remedy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.base.errors import ConfigError
from areal.inference.scripted.script import DEFAULT_LOGPROB, Script, read_script
from areal.inference.scripted.vocabulary import SPECIAL_TOKENS, Vocabulary


def script(folder: Path, *lines: Any) -> Script:
    path = folder / "script.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return read_script(path)


def test_a_line_in_full(tmp_path: Path) -> None:
    read = script(
        tmp_path,
        {"settings": {"max_context": 99, "end_tokens": ["<|im_end|>", "<|endoftext|>"]}},
        "",
        {
            "pieces": [
                "Hi ",
                {"hex": "f09f"},
                {"text": "x", "logprob": -0.5, "top": [["x", -0.5], ["y", "-inf"]], "delay_ms": 7},
            ],
            "delay_ms": 2.5,
            "finish": "length",
            "when": "a.b",
            "fail": {"at": 3, "status": 500, "message": "why"},
        },
    )
    [line] = read.lines
    vocabulary = read.vocabulary
    assert read.max_context == 99
    assert vocabulary.eos_ids == (vocabulary.id_of(b"<|im_end|>"), vocabulary.id_of(b"<|endoftext|>"))
    assert [vocabulary.piece(token.token_id) for token in line.tokens] == [b"Hi ", b"\xf0\x9f", b"x"]
    assert [token.logprob for token in line.tokens] == [DEFAULT_LOGPROB, DEFAULT_LOGPROB, -0.5]
    assert [token.delay_s for token in line.tokens] == [0.0025, 0.0025, 0.007]
    assert line.tokens[2].top == ((ord("x"), -0.5), (ord("y"), -math.inf))
    assert (line.number, line.finish) == (3, "length")
    assert line.when is not None
    assert line.when.search("a\nb")
    assert line.failure is not None
    assert (line.failure.at, line.failure.status, line.failure.message) == (3, 500, "why")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "2: "),
        ("[]", "2: Expected `object`"),
        ({}, "2: Object missing required field `pieces`"),
        ({"pieces": ["a"], "delay": 3}, "unknown field `delay`"),
        ({"pieces": [{"text": "a", "hex": "61"}]}, 'piece 0 needs either "text" or "hex"'),
        ({"pieces": [{"hex": "6"}]}, "piece 0: \"hex\" is '6'"),
        ({"pieces": ["a", ""]}, "piece 1 is empty"),
        ({"pieces": ["a"], "logprobs": []}, '"logprobs" has 0 entries for 1 pieces'),
        ({"pieces": ["a"], "top": [[], []]}, '"top" has 2 entries for 1 pieces'),
        ({"pieces": ["a"], "logprobs": [0.1]}, "logprob 0.1"),
        ({"pieces": [{"text": "a", "top": [["b", "small"]]}]}, "'small'"),
        ({"pieces": [{"text": "a", "top": [["", -1]]}]}, "candidate in top is empty"),
        ({"pieces": ["a"], "finish": "done"}, "Invalid enum value 'done'"),
        ({"pieces": ["a"], "fail": {"at": 2}}, "fail.at is 2"),
        ({"pieces": ["a"], "fail": {"at": 0, "status": 200}}, "fail.status is 200"),
        ({"pieces": ["a"], "when": "("}, "no regular expression"),
        ({"pieces": ["a"], "delay_ms": -1}, "delay_ms is -1"),
        ({"settings": {}}, "2: "),
        ({"pieces": [{"text": "a", "id": 7}, {"text": "b", "id": 7}]}, "piece 1: id 7"),
        ({"pieces": [{"text": "a", "id": -1}]}, "piece 0: id -1"),
        ({"pieces": ["a"], "logprobs": ["none"]}, "'none'"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: Any, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        script(tmp_path, {"pieces": ["fine"]}, line)
    assert f"{tmp_path / 'script.jsonl'}:2: " in str(error.value)
    assert says in str(error.value)
    assert "docs/scripted.md" in str(error.value)


@pytest.mark.parametrize(
    "settings", [{"vocabulary": {"a": 1, "b": 1}}, {"vocabulary": {"": 1}}, {"end_tokens": []}, {"max_context": 0}]
)
def test_wrong_settings_are_named(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r":1: settings\."):
        script(tmp_path, {"settings": settings}, {"pieces": ["a"]})


def test_no_file_and_no_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.scripted\.path"):
        read_script(tmp_path / "missing.jsonl")
    with pytest.raises(ConfigError, match="no generation"):
        script(tmp_path, "")


def test_T050_a_toy_vocabulary_takes_the_longest_match() -> None:
    vocabulary = Vocabulary({1: b"a", 2: b"b", 3: b"ab"}, [])
    assert vocabulary.encode("ab") == [3]
    assert vocabulary.encode("ba") == [2, 1]
    assert (vocabulary.decode([1, 2]), vocabulary.decode([3])) == ("ab", "ab")


@given(st.text(), st.lists(st.binary(min_size=1, max_size=6), max_size=8))
def test_the_vocabulary_spells_every_text_and_knows_every_piece(text: str, pieces: list[bytes]) -> None:
    vocabulary = Vocabulary({1: b"a", 2: b"b", 3: b"ab"}, pieces)
    text = text.encode("utf-8", "replace").decode()
    assert vocabulary.decode(vocabulary.encode(text), skip_special=False) == text
    for piece in pieces:
        assert vocabulary.piece(vocabulary.id_of(piece)) == piece


def test_a_piece_may_bring_its_id_and_lose_its_logprob(tmp_path: Path) -> None:
    pieces = [{"id": 11, "text": "x", "logprob": -0.1}, {"id": 12, "text": "x"}, {"id": 2, "text": "<|im_end|>"}]
    read = script(tmp_path, {"pieces": pieces, "logprobs": [-1, "nan", -2]}, {"pieces": ["x"]})
    assert [token.token_id for token in read.lines[0].tokens] == [11, 12, 2]
    assert read.lines[0].tokens[0].logprob == -0.1
    assert math.isnan(read.lines[0].tokens[1].logprob)
    vocabulary = read.vocabulary
    assert vocabulary.eos_ids == (2,)
    assert (vocabulary.encode("xx"), vocabulary.decode([11, 12, 2])) == ([11, 11], "xx")
    assert read.lines[1].tokens[0].token_id == 11


def test_without_explicit_ids_a_byte_is_its_own_id() -> None:
    vocabulary = Vocabulary({}, [b"Hello"])
    assert vocabulary.encode("az") == [97, 122]
    assert [vocabulary.id_of(text.encode()) for text in SPECIAL_TOKENS] == [256, 257, 258]
    assert vocabulary.id_of(b"Hello") == 259
    assert vocabulary.piece(257) == b""
    assert vocabulary.decode([257], skip_special=False) == "<|im_end|>"
