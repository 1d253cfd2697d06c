"""The scripted backend's own small vocabulary: bytes, ChatML's special tokens, and one token per scripted piece.

    vocabulary = Vocabulary({1: b"a", 2: b"b", 3: b"ab"}, pieces=[b"one ", b"tw"])
    vocabulary.encode("ab")          # [3]: longest match
    vocabulary.id_of(b"tw")          # the one token of this piece

A pure function of the script file, so the proxy and the server agree without talking. Without explicit ids, byte b has
id b, special tokens follow at 256 and pieces after them in order of appearance. Implements chat.base.Tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


class Vocabulary:
    """Immutable. `explicit`: ids chosen by the script, each with its piece; everything else takes the lowest free ids.

    Several ids may stand for one piece; text is encoded to the first of them."""

    strips_first_space = False

    def __init__(
        self, explicit: Mapping[int, bytes], pieces: Iterable[bytes], *, end_tokens: Sequence[str] = ("<|im_end|>",)
    ) -> None:
        self._bytes_of: dict[int, bytes] = {}
        self._id_of: dict[bytes, int] = {}
        self._special_ids: set[int] = set()
        self._next_free = 0
        for token_id, piece in explicit.items():
            self._put(piece, token_id)
        for byte in range(256):
            self.intern(bytes([byte]))
        for text in SPECIAL_TOKENS:
            self._special_ids.add(self.intern(text.encode()))
        for piece in pieces:
            self.intern(piece)
        ends = {text.encode() for text in end_tokens}
        for piece in ends:
            self.intern(piece)
        self.eos_ids = tuple(token_id for token_id, piece in self._bytes_of.items() if piece in ends)
        self._special_ids.update(self.eos_ids)
        self.vocab_size = max(self._bytes_of) + 1
        self._lengths = sorted({len(piece) for piece in self._id_of}, reverse=True)

    def intern(self, piece: bytes) -> int:
        """The id of a piece, taken now if it has none. Only called while the vocabulary is built."""
        if piece not in self._id_of:
            while self._next_free in self._bytes_of:
                self._next_free += 1
            self._put(piece, self._next_free)
        return self._id_of[piece]

    def id_of(self, piece: bytes) -> int:
        """The one token of a piece of the script. Raises KeyError for any other bytes."""
        return self._id_of[piece]

    def encode(self, text: str) -> list[int]:
        """Ids by longest match; special tokens written as text are known."""
        data = text.encode("utf-8", "replace")
        ids: list[int] = []
        at = 0
        while at < len(data):
            for length in self._lengths:
                token_id = self._id_of.get(data[at : at + length])
                if token_id is not None:
                    ids.append(token_id)
                    at += length
                    break
        return ids

    def piece(self, token_id: int) -> bytes:
        """The bytes a token adds to the text; b"" for special tokens and unknown ids."""
        return b"" if token_id in self._special_ids else self._bytes_of.get(token_id, b"")

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD."""
        of = self.piece if skip_special else (lambda token_id: self._bytes_of.get(token_id, b""))
        return b"".join(map(of, ids)).decode("utf-8", "replace")

    def _put(self, piece: bytes, token_id: int) -> None:
        self._id_of.setdefault(piece, token_id)
        self._bytes_of[token_id] = piece
