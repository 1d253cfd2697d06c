"""Tokenizers of Hugging Face model folders, without transformers: text <-> ids, and the bytes of every token.

    tokenizer = HfTokenizer.load("/models/smollm2")       # needs tokenizer.json there
    ids = tokenizer.encode("<|im_start|>user\\nhi")         # special tokens written as text become their ids; no BOS added
    tokenizer.piece(ids[-1])                               # b"hi"; b"" for special tokens

A token's bytes do not depend on its neighbours, which is what streaming needs: byte-level BPE stores bytes as printable
characters, SentencePiece vocabularies store spaces as U+2581 and single bytes as `<0xNN>`. Other decoders (WordPiece)
are refused with a sentence. The incremental text of a stream is detokenizer.py's. Used by chat/ and inference/native/grammars.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers

from areal.base.errors import ConfigError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class _Decoding:
    """How the vocabulary spells bytes. byte_level: printable characters stand for bytes; else SentencePiece spelling."""

    byte_level: bool
    strips_first_space: bool


class HfTokenizer:
    """A chat.base.Tokenizer over the `tokenizers` library. Immutable; safe to share between threads."""

    def __init__(
        self, backend: Any, *, decoding: _Decoding, eos_ids: Iterable[int], special_tokens: Mapping[str, str]
    ) -> None:
        self._backend = backend
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.special_tokens = dict(special_tokens)
        self.strips_first_space = decoding.strips_first_space
        vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self._pieces = [b""] * self.vocab_size
        self._shown_special: dict[int, bytes] = {}
        added = backend.get_added_tokens_decoder()
        for token, token_id in vocabulary.items():
            if token_id not in added:
                self._pieces[token_id] = _spelled(token, decoding.byte_level)
        for token_id, token in added.items():
            if token.special:
                self._shown_special[token_id] = token.content.encode()
            else:
                self._pieces[token_id] = token.content.encode()

    @classmethod
    def load(cls, folder: str | Path) -> HfTokenizer:
        """From a model folder. Raises ConfigError when its tokenizer cannot be used here."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{folder} has no tokenizer.json; save it once with transformers: "
                "AutoTokenizer.from_pretrained(PATH).save_pretrained(PATH)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ConfigError(f"{path} is no tokenizer that this version of `tokenizers` reads: {error}") from error
        spec = json.loads(path.read_bytes())
        backend.no_padding()
        backend.no_truncation()
        special_tokens = _special_tokens(folder)
        return cls(
            backend,
            decoding=_decoding(spec.get("decoder"), path),
            eos_ids=_eos_ids(folder, special_tokens, backend),
            special_tokens=special_tokens,
        )

    def with_eos(self, ids: Iterable[int]) -> HfTokenizer:
        """The same tokenizer with further ids that end a completion, for example the template's end-of-turn token."""
        other = object.__new__(HfTokenizer)
        other.__dict__.update(self.__dict__)
        other.eos_ids = tuple(dict.fromkeys((*self.eos_ids, *ids)))
        return other

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Special tokens written as text become their ids; nothing is added."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def piece(self, token_id: int) -> bytes:
        """What this token adds to the text: b"" for special tokens and for ids the vocabulary does not have."""
        return self._pieces[token_id] if 0 <= token_id < self.vocab_size else b""

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids. A SentencePiece vocabulary's leading space is dropped, as its own decoder does."""
        pieces = map(self.piece, ids) if skip_special else (self._shown_special.get(k) or self.piece(k) for k in ids)
        text = b"".join(pieces).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_first_space else text


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, {} if there is no such file. Raises ConfigError if it is something else."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}; download the model again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, not an object; download the model again")
    return content


def _special_tokens(folder: Path) -> dict[str, str]:
    """`bos_token` and the like, as text. tokenizer_config.json wins over the older special_tokens_map.json."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in read_json(folder / name).items():
            if key.endswith("_token"):
                text = value.get("content") if isinstance(value, dict) else value
                if isinstance(text, str):
                    found[key] = text
    return found


def _eos_ids(folder: Path, special_tokens: Mapping[str, str], backend: Any) -> list[int]:
    """All ids any of the model's files calls an end; a model trained to stop with several has them all."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        ids += [value] if isinstance(value, int) else [one for one in value or [] if isinstance(one, int)]
    named = backend.token_to_id(special_tokens.get("eos_token", ""))
    return ids if named is None else [*ids, named]


def _decoding(decoder: Mapping[str, Any] | None, path: Path) -> _Decoding:
    """What the decoder section of tokenizer.json says. Raises ConfigError for a kind whose tokens have no fixed bytes."""
    steps = _steps(decoder)
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _Decoding(byte_level=True, strips_first_space=False)
    if kinds and kinds <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        strips = any(
            (step["type"] == "Strip" and step.get("start", 0) > 0)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
            for step in steps
        )
        return _Decoding(byte_level=False, strips_first_space=strips)
    known = "byte-level BPE and SentencePiece (metaspace, byte fallback)"
    raise ConfigError(f"{path} decodes with {sorted(kinds) or 'nothing'}; areal reads {known}: choose such a model")


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps(part)]
    return [decoder]


def _spelled(token: str, byte_level: bool) -> bytes:
    """The bytes of an ordinary vocabulary entry."""
    if byte_level:
        table = _byte_of_character()
        if all(character in table for character in token):
            return bytes(table[character] for character in token)
        return token.encode()
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_METASPACE, " ").encode()


@cache
def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE's spelling: printable Latin-1 bytes stand for themselves, the other 68 for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + k): byte for k, byte in enumerate(others)}
