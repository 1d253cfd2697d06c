"""Text of a token stream as it comes: what a client may see now, never half a character.

    detokenizer = Detokenizer(tokenizer)
    text = detokenizer.feed(token_id)      # "" while a character is incomplete
    text += detokenizer.finish()           # one U+FFFD if the stream ended inside a character

Special tokens have no text, except those given as `shown_special`. Bytes that can never become a character turn into U+FFFD at once; the result equals Tokenizer.decode of all ids, for every
way of cutting the stream. Used by stream_parser.py.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping

from areal.chat.base import Tokenizer


class Detokenizer:
    """State of one stream."""

    def __init__(self, tokenizer: Tokenizer, shown_special: Mapping[int, bytes] | None = None) -> None:
        self._tokenizer = tokenizer
        self._shown_special = shown_special or {}
        self._begun = b""  # bytes of a character that is not complete
        self._drop_space = tokenizer.strips_first_space

    def feed(self, token_id: int) -> str:
        """The text that this token completes."""
        data = self._begun + (self._shown_special.get(token_id) or self._tokenizer.piece(token_id))
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._begun = data[used:]
        return self._trimmed(text) if self._drop_space else text

    def finish(self) -> str:
        """The rest, once, at the end of the stream."""
        begun, self._begun = self._begun, b""
        return self._trimmed(begun.decode("utf-8", "replace"))

    def _trimmed(self, text: str) -> str:
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text
