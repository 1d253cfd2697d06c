"""Grammars over one model's vocabulary: compiled aside, then asked at every step which tokens may come next.

    grammars = Grammars(model_dir, vocab_size=config.vocab_size, eos_ids=frozenset(config.eos_ids))
    matcher = await grammars.matcher(request.grammar, request.sampling.stop_token_ids)    # the state of one answer
    allowed = allowed_tokens([matcher, ...], vocab_size)                                  # bool [n, vocabulary], for the sampler
    complete = matcher.accept(token)

The llguidance library does the work: an Earley parser over the bytes of the tokens, in Rust, without torch. A grammar is compiled
in a thread of this module's own, within bounds of size and work, and kept for whoever sends it again, a refused one too; so a schema made to
be expensive costs others nothing but a place in that queue. An end token is allowed exactly where the grammar accepts. The tokenizer is
read at the first request that needs it. Neighbours: runner.py (compiles), engine.py (asks), sampler.py (applies the mask).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import llguidance
import numpy as np

from areal.base.errors import BadRequest, ConfigError
from areal.base.types import BoolArray
from areal.models.tokenizer import HfTokenizer

MOST_KEPT = 32  # compiled grammars; the longest unused one is forgotten first
# A compilation then ends within about a second, a step within some tens of milliseconds, and both keep a few MB at most.
_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=400_000,
    step_lexer_fuel=100_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
_PLACE = re.compile(r"^at [0-9]+\([0-9]+\): ")
_DUMP = re.compile(r"\n\s*[0-9]+ \| |\n<state>")  # from here on it shows our own grammar, or its state
_WORD = 32  # bits; the library writes masks in words
_JSON = b'{}[]":,'  # no call and no schema does without them


class Matcher:
    """The state of one answer. ends: token ids that end it, where the grammar accepts. failure: why it cannot go on."""

    def __init__(self, state: llguidance.LLMatcher, ends: Sequence[int]) -> None:
        self.state = state
        self.ends = np.array(sorted(ends), np.int64)
        self.failure = ""

    def accept(self, token: int) -> bool:
        """This token was sampled; it was allowed, and is no end. True: the answer is complete, and there is no end to say so."""
        if not self.state.consume_token(token):
            self.failure = f"its grammar failed ({_short(self.state.get_error())})"
            return False
        return len(self.ends) == 0 and bool(self.state.is_stopped())


class Grammars:
    """Of one model. Made and used in one event loop; `close` when done."""

    def __init__(self, model_dir: Path, *, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._kept: OrderedDict[str, llguidance.LLMatcher | BadRequest] = OrderedDict()  # the thread's alone
        self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="grammars")

    async def matcher(self, grammar: str, stop_token_ids: Iterable[int]) -> Matcher:
        """At the beginning of an answer. Raises BadRequest with what is wrong with the grammar."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._matcher, grammar, frozenset(stop_token_ids))

    def close(self) -> None:
        """Wait for nothing; what is being compiled is dropped."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    # The thread.

    def _matcher(self, grammar: str, stop_token_ids: frozenset[int]) -> Matcher:
        known = self._kept.pop(grammar, None)
        if known is None:
            known = self._compile(grammar)
        self._kept[grammar] = known
        if len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        if isinstance(known, BadRequest):
            raise known
        silent = {token for token in stop_token_ids if token < self._vocab_size and not self._tokenizer.piece(token)}
        return Matcher(known.deep_copy(), tuple(self._eos_ids | silent))

    def _compile(self, grammar: str) -> llguidance.LLMatcher | BadRequest:
        try:
            vocabulary = self._vocabulary
        except ConfigError as error:
            return _unable(str(error))
        if "%json" in grammar and (missing := [chr(byte) for byte in _JSON if byte not in self._spelled]):
            return _unable(
                f"its vocabulary has no token for {' '.join(missing)}; ask a model that can write JSON (the bundled tiny nets cannot)"
            )
        state = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)
        if state.is_error():
            return _refusal(_short(state.get_error()))
        first = Matcher(state.deep_copy(), tuple(self._eos_ids))
        # What fails at once is the request's fault, and known before it is queued.
        allowed_tokens([first], self._vocab_size)
        return _refusal(first.failure) if first.failure else state

    @cached_property
    def _tokenizer(self) -> HfTokenizer:
        return HfTokenizer.load(self._model_dir)

    @cached_property
    def _spelled(self) -> frozenset[int]:
        """Every byte that some token spells."""
        return frozenset(byte for token in range(self._vocab_size) for byte in self._tokenizer.piece(token))

    @cached_property
    def _vocabulary(self) -> llguidance.LLTokenizer:
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Spelling(self._tokenizer, self._vocab_size)))


def allowed_tokens(matchers: Sequence[Matcher], vocab_size: int) -> BoolArray:
    """[len(matchers), vocab_size]: which tokens may come next. A matcher that cannot go on gets its `failure`, and everything."""
    width = -(-(vocab_size + 1) // _WORD)
    words = np.zeros((len(matchers), width), np.uint32)
    for row, matcher in enumerate(matchers):
        matcher.state.unsafe_compute_mask_ptr(words[row].ctypes.data, width * 4)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").astype(np.bool_)
    allowed = bits[:, :vocab_size]
    for row, matcher in enumerate(matchers):
        allowed[row, matcher.ends] = bits[row, vocab_size]  # the end that the library knows
        error = matcher.state.get_error() if matcher.state.is_error() else ""
        if "NoExtension" in error or not allowed[row].any():
            matcher.failure = "no token of this model's vocabulary can go on with it"
        elif error:
            matcher.failure = f"it became too complex to go on with ({_short(error)})"
        if matcher.failure:
            allowed[row] = True
    return allowed


class _Spelling:
    """The vocabulary as the library wants it: the bytes of every token, special ones marked, and one end beyond them all.

    The model's own ends are many or none, and some of them may be ordinary text; the library's only end is none of them."""

    def __init__(self, tokenizer: HfTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = vocab_size
        self.bos_token_id = None
        pieces = [tokenizer.piece(token) for token in range(vocab_size)]
        self.tokens = [piece or b"<token %d>" % token for token, piece in enumerate(pieces)] + [b"<end of grammar>"]
        self.special_token_ids = [token for token, piece in enumerate(pieces) if not piece] + [vocab_size]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace"))


def _short(text: str) -> str:
    """What the library says, on one line and without the place in our own text."""
    line = " ".join(_DUMP.split(_PLACE.sub("", text.strip()))[0].split())
    return line if len(line) <= 300 else f"{line[:297]}..."


def _unable(reason: str) -> BadRequest:
    return BadRequest(f"the output of this model cannot be constrained: {reason}", code="unsupported_parameter")


def _refusal(reason: str) -> BadRequest:
    return BadRequest(
        f"the format of this call cannot be kept: {reason}; leave out of the schema what is not supported, or send strict: false",
        code="invalid_schema",
    )
