"""A model that writes anything: text, reasoning, calls whole, malformed and cut off, in tokens that no tokenizer would choose.

    backend = RandomBackend(vocabulary_of(LINES))
    backend.sent["chatcmpl-1"]        # the tokens of this request, as sampled: (id, logprob, version)

What a request gets depends on its rng_seed alone, so a client that names a seed gets the same again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from typing import Any

from areal.base.errors import BackendError
from areal.base.types import FinishReason, GenerateRequest, TokenChunk
from areal.inference.scripted.vocabulary import Vocabulary

CALL = '<tool_call>\n{"name": "f", "arguments": {"b":2,"a":"é"}}\n</tool_call>'
TEXTS = [
    "a", "ab", "b", "I will  look ✓", ". \n", "four", " ", "\n\n", "👩‍💻", CALL, CALL, "\n" + CALL.replace('"f"', '"g"'),
    '<tool_call>\n{"name": "f", "arguments": {"x": "', "</tool_call>", '{"name": "g"', "<tool_call>", "<think>\nhm\n</think>\n\n",
    "<think>", "</think>", "<tool_response>", "user\n", "STOP",
]  # fmt: skip
LINES: list[Any] = [{"pieces": TEXTS}]  # the vocabulary: each text is a token, too
END = b"<|im_end|>"


class RandomBackend:
    """A Backend in this process."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.running = 0
        self.sent: dict[str, list[tuple[int, float, int]]] = {}

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """See Backend.generate."""
        draw = random.Random(request.rng_seed)
        tokens, finish = self._tokens(draw), "stop" if draw.random() < 0.8 else "length"
        if finish == "stop" and draw.random() < 0.9:
            tokens.append(self._vocabulary.id_of(END))
        limit = request.sampling.max_tokens or 100
        breaks_at = draw.randint(0, len(tokens)) if draw.random() < 0.08 else -1
        pause_s = draw.choice([0.0, 0.0, 0.002])
        sent = self.sent.setdefault(request.request_id, [])
        self.running += 1
        try:
            while True:
                if 0 <= breaks_at <= len(sent):
                    raise BackendError("the random model broke; try again")
                await asyncio.sleep(pause_s)
                size = min(draw.randint(1, 3), limit - len(sent))
                part = [
                    (token, -draw.randint(1, 2**20) / 2**16, len(sent) // 4) for token in tokens[len(sent) :][:size]
                ]
                sent += part
                done = len(sent) == len(tokens)
                last: FinishReason | None = finish if done else "length" if len(sent) == limit else None  # type: ignore[assignment]
                yield _chunk(part, last)
                if last is not None:
                    return
        finally:
            self.running -= 1

    def _tokens(self, draw: random.Random) -> list[int]:
        """A few texts, each as its own token, as the tokenizer would have it, or byte by byte."""
        found: list[int] = []
        for text in draw.choices(TEXTS, k=draw.randint(0, 4)):
            ways = ([self._vocabulary.id_of(text.encode())], self._vocabulary.encode(text), list(text.encode()))
            found += draw.choice(ways)
        return found


def _chunk(part: list[tuple[int, float, int]], finish: FinishReason | None) -> TokenChunk:
    return TokenChunk(
        token_ids=tuple(token for token, _, _ in part),
        logprobs=tuple(logprob for _, logprob, _ in part),
        versions=tuple(version for _, _, version in part),
        kept_mass=(1.0,) * len(part),
        finish_reason=finish,
    )
