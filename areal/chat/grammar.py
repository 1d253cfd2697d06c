"""A grammar of an answer, put together piece by piece, for a server that masks the sampling with it.

    rules = Rules(tokenizer)
    call = rules.rule(rules.marker("<tool_call>"), rules.json(schema), rules.marker("</tool_call>"))
    text = rules.text(rules.several(call, rules.literal("\\n"), 16))

The text is in the Lark notation of the llguidance library, which vLLM and SGLang understand too. Every method but `text` returns an
expression: a part of a rule's right-hand side. A marker that is one special token of the model is that token, any other the bytes of its
text. JSON is written in one line, with at most one space behind a comma or a colon: free white space is where models never
stop. Nothing is compiled here; the server that has the vocabulary does (inference/native/grammars.py). Used by constraint.py
and tool_formats/.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from areal.base.errors import BadRequest
from areal.chat.base import Tokenizer

MOST_CHARACTERS = 200_000  # of a grammar; it is compiled for whoever sends it
_LONGEST = 10_000  # repetitions that a text's length limits may ask for; beyond them a text is as free as without
_UNSPELLABLE = re.compile(r'[\s"{}\[\]<>|｜:]')
# Separators are patterns. Without white space elsewhere JSON has the lexemes of its surroundings, so tokens may span both.
# Else, where only one text can follow, only the tokenizer's own way of cutting it is allowed: more is forbidden than need be.
_OPTIONS = '%llguidance {"no_forcing": true}'
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


class Rules:
    """The rules of one grammar."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lines: list[str] = []

    def literal(self, text: str) -> str:
        """Exactly this text; not empty."""
        return json.dumps(text, ensure_ascii=False)

    def marker(self, text: str) -> str:
        """A marker of the model's format, as its vocabulary has it."""
        token = special_token(self._tokenizer, text)
        return self.literal(text) if token is None else f"<[{token}]>"

    def gap(self) -> str:
        """The space that SentencePiece puts before the text behind a marker, where the vocabulary is of that kind."""
        return "/ ?/" if self._tokenizer.strips_first_space else ""

    def rule(self, *parts: str) -> str:
        """These, one after the other."""
        return self._named("r", " ".join(parts))

    def either(self, *parts: str) -> str:
        """One of these."""
        return self._named("r", " | ".join(parts))

    def several(self, one: str, between: str, most: int) -> str:
        """1 to `most` of them."""
        return one if most == 1 else self.rule(one, f"({between} {one}){{0,{most - 1}}}")

    def json(self, schema: Mapping[str, Any], *, lenient: bool = True) -> str:
        """A JSON value of this schema. lenient: keywords that the server's library does not know are ignored, not refused."""
        options = {**_COMPACT, **({"lenient": True} if lenient else {})}
        return self._named("r", "%json " + json.dumps({**schema, "x-guidance": options}))

    def until(self, closing: str, *, low: int = 0, high: int | None = None, line_end: bool = False) -> str:
        """Text without the marker `closing`, of low to high characters, then the marker. line_end: with a line end before it."""
        bounds = f"{{{min(low, _LONGEST)},{high if high is not None and high <= _LONGEST else ''}}}"
        free = "/(?s:.*)/" if bounds == "{0,}" else f"/(?s:.{bounds})/"
        end = self.literal("\n") if line_end else ""
        token = special_token(self._tokenizer, closing)
        if token is not None:  # no text can hold it
            return self.rule(self._named("T", f"{free} {end}"), f"<[{token}]>")
        text = self.literal(closing)
        terminal = self._named("T", f"({free} & ~(/(?s:.*)/ {text} /(?s:.*)/)) {end} {text}")
        return self._named("r", terminal, options="[lazy]")

    def name(self, text: str) -> str:
        """A name that stands bare between markers. Raises BadRequest for one that could not be read back."""
        if not text or len(text) > 200 or _UNSPELLABLE.search(text):
            raise BadRequest(
                f"the name {text[:60]!r} cannot be forced: this model writes names bare, so they may hold no white space and "
                'none of " { } [ ] < > | : ; rename it, or send tool_choice auto',
                param="tools",
            )
        return self.literal(text)

    def text(self, start: str) -> str:
        """The whole grammar. Raises BadRequest if it is too large to be compiled for a request."""
        text = "\n".join([_OPTIONS, f"start: {start}", *self._lines, ""])
        if len(text) > MOST_CHARACTERS:
            raise BadRequest(
                f"the schemas of this call make a grammar of {len(text)} characters, more than {MOST_CHARACTERS}; force one "
                "tool by name, or send smaller schemas",
                code="schema_too_large",
            )
        return text

    def _named(self, kind: str, body: str, options: str = "") -> str:
        name = f"{kind}{len(self._lines)}"
        self._lines.append(f"{name}{options}: {body}")
        return name


def special_token(tokenizer: Tokenizer, marker: str) -> int | None:
    """The id of a marker that is one special token, which has no text of its own; None if it is ordinary text."""
    special = [one for one in tokenizer.encode(marker) if not tokenizer.piece(one)]
    if len(special) == 1 and tokenizer.decode(special, skip_special=False).strip() == marker:
        return special[0]
    return None
