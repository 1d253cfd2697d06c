"""Tokenizers: ids equal the library's, bytes of tokens add up to its texts, all end ids are known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.base.errors import ConfigError
from areal.chat import HfTokenizer, load_renderer

KINDS = ("byte_level", "sentence_piece")


@pytest.fixture(scope="session")
def both(folder: Callable[..., Path]) -> dict[str, HfTokenizer]:
    return {kind: HfTokenizer.load(folder(None, kind)) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(text=st.text(st.characters(exclude_characters="\u2581"), max_size=40))  # it is SentencePiece's space
def test_ids_and_texts_equal_the_librarys(
    kind: str, text: str, both: dict[str, HfTokenizer], trained: dict[str, tokenizers.Tokenizer]
) -> None:
    ours, reference = both[kind], trained[kind]
    text = text.encode("utf-8", "replace").decode()
    ids = ours.encode(text)
    assert ids == reference.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids) == text
    assert ours.decode(ids) == reference.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_ids_decode_as_the_library_decodes_them(
    kind: str, data: st.DataObject, both: dict[str, HfTokenizer], trained: dict[str, tokenizers.Tokenizer]
) -> None:
    ours, reference = both[kind], trained[kind]
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=12))
    valid = "\ufffd" not in ours.decode(ids)  # of broken characters the library makes its own number of U+FFFD
    if valid:
        assert ours.decode(ids) == reference.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_written_as_text_are_known_and_not_shown(kind: str, both: dict[str, HfTokenizer]) -> None:
    tokenizer = both[kind]
    ids = tokenizer.encode("<|im_start|>user<|im_end|>")
    assert tokenizer.piece(ids[0]) == tokenizer.piece(ids[-1]) == b""
    assert tokenizer.decode(ids).strip() == "user"
    assert tokenizer.decode(ids, skip_special=False).replace(" ", "") == "<|im_start|>user<|im_end|>"
    [think] = [token for token in tokenizer.encode("<think>") if tokenizer.piece(token) != b" "]
    assert tokenizer.piece(think) == b"<think>"
    assert tokenizer.piece(10**6) == tokenizer.piece(-1) == b""


def test_bytes_of_single_byte_tokens(both: dict[str, HfTokenizer]) -> None:
    for tokenizer in both.values():
        assert {tokenizer.piece(token) for token in range(tokenizer.vocab_size)} >= {bytes([b]) for b in range(256)}


def test_T053_every_end_id_counts(folder: Callable[..., Path], both: dict[str, HfTokenizer]) -> None:
    ids = {text: both["byte_level"].encode(text)[0] for text in ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "</s>")}
    path = folder(
        "chatml_default_system",
        eos="<|endoftext|>",
        generation_config={"eos_token_id": [ids["</s>"], ids["<|eot_id|>"]]},
        config={"eos_token_id": ids["</s>"]},
    )
    tokenizer = HfTokenizer.load(path)
    assert tokenizer.eos_ids == (ids["</s>"], ids["<|eot_id|>"], ids["<|endoftext|>"])
    # A base model's files do not name the end of a turn; the template does.
    assert load_renderer(path).tokenizer.eos_ids == (*tokenizer.eos_ids, ids["<|im_end|>"])


def _break(path: Path, name: str, content: Any) -> Path:
    (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_folders_that_cannot_be_used_say_why(folder: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json; save it once"):
        HfTokenizer.load(tmp_path)
    with pytest.raises(ConfigError, match="no tokenizer that this version"):
        HfTokenizer.load(_break(folder(None), "tokenizer.json", "{}"))
    with pytest.raises(ConfigError, match="is not JSON"):
        HfTokenizer.load(_break(folder(None), "generation_config.json", "{"))
    with pytest.raises(ConfigError, match="holds a list"):
        HfTokenizer.load(_break(folder(None), "config.json", []))
    path = folder(None)
    spec = json.loads((path / "tokenizer.json").read_text())
    spec["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(ConfigError, match="WordPiece"):
        HfTokenizer.load(_break(path, "tokenizer.json", spec))
