"""Script files: fixed generations, one JSON object a line (docs/scripted.md).

    {"pieces": ["one ", "tw", {"hex": "c3"}, {"text": "x", "logprob": -0.5}], "finish": "length", "delay_ms": 20}
    {"when": "weather", "pieces": ["Sunny.", "<|im_end|>"], "fail": {"at": 1, "message": "out of memory"}}

    script = read_script(path)                    # ConfigError with file:line and what to write instead
    script.lines, script.vocabulary

A piece is one token. Which line answers a request is engine.py's. The optional first line {"settings": {...}} sets the
vocabulary's ids, the end tokens, the context length. Pure: a file in, frozen values out.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from areal.base.errors import ConfigError
from areal.inference.scripted.vocabulary import Vocabulary

DEFAULT_LOGPROB = -1.0

Candidate = tuple[str | int, float | str | None]  # token as text or id, natural log or null or "-inf"


T = TypeVar("T")


Logprob = float | Literal["nan"]  # "nan": a backend that lost it


class _Piece(msgspec.Struct, forbid_unknown_fields=True):
    text: str | None = None
    hex: str | None = None
    id: int | None = None
    logprob: Logprob | None = None
    top: list[Candidate] | None = None
    delay_ms: float | None = None


class _Fail(msgspec.Struct, forbid_unknown_fields=True):
    at: int = 0
    status: int = 503
    message: str = "a scripted failure"


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    pieces: list[str | _Piece]
    logprobs: list[Logprob] | None = None
    top: list[list[Candidate]] | None = None
    finish: Literal["stop", "length", "abort"] = "stop"
    delay_ms: float = 0.0
    fail: _Fail | None = None
    when: str | None = None


class _Settings(msgspec.Struct, forbid_unknown_fields=True):
    vocabulary: dict[str, int] = {}
    end_tokens: tuple[str, ...] = ("<|im_end|>",)
    max_context: int = 32768


class _SettingsLine(msgspec.Struct, forbid_unknown_fields=True):
    settings: _Settings


@dataclass(frozen=True, slots=True)
class Failure:
    """at: tokens sent before it; 0 = an HTTP answer of `status`, else an error event in the stream."""

    at: int
    status: int
    message: str


@dataclass(frozen=True, slots=True)
class ScriptedToken:
    """delay_s: waited before it is sent. top: candidates as (id, logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    delay_s: float


@dataclass(frozen=True, slots=True)
class ScriptedLine:
    """One generation. when: it answers prompts in which this pattern is found; None: any prompt."""

    number: int
    tokens: tuple[ScriptedToken, ...]
    finish: Literal["stop", "length", "abort"]
    failure: Failure | None
    when: re.Pattern[str] | None


@dataclass(frozen=True, slots=True)
class Script:
    """A read file. Never without a line."""

    path: str
    lines: tuple[ScriptedLine, ...]
    vocabulary: Vocabulary
    max_context: int


def read_script(path: str | Path) -> Script:
    """Raises ConfigError: no such file, or the first wrong line with its number and what it should be."""
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"rollout.scripted.path: cannot read {str(path)!r}: {error}; see docs/scripted.md") from error
    settings = _Settings()
    lines: dict[int, _Line] = {}
    seen_any = False
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        if not seen_any and '"settings"' in line:
            settings = _decode(line, _SettingsLine, path, number).settings
        else:
            lines[number] = _decode(line, _Line, path, number)
        seen_any = True
    if not lines:
        raise ConfigError(f"{path} has no generation; write at least one line such as " + '{"pieces": ["Hello"]}')
    ids = _explicit_ids(settings, path)
    pieces = {number: _pieces(line, ids, path, number) for number, line in lines.items()}
    vocabulary = _vocabulary(settings, ids, [*pieces.values()], [*lines.values()])
    played = tuple(_line(number, line, pieces[number], vocabulary, path) for number, line in lines.items())
    return Script(str(path), played, vocabulary, settings.max_context)


def _decode(line: str, kind: type[T], path: str | Path, number: int) -> T:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError as error:
        raise _wrong(path, number, str(error)) from error


def _wrong(path: str | Path, number: int, reason: str) -> ConfigError:
    return ConfigError(f"{path}:{number}: {reason}; the format is in docs/scripted.md")


def _explicit_ids(settings: _Settings, path: str | Path) -> dict[int, bytes]:
    """What settings say, checked."""
    ids = {token_id: text.encode() for text, token_id in settings.vocabulary.items()}
    if len(ids) < len(settings.vocabulary) or any(token_id < 0 for token_id in ids) or b"" in ids.values():
        raise _wrong(path, 1, "settings.vocabulary needs non-empty pieces with ids of their own, from 0")
    if not settings.end_tokens or "" in settings.end_tokens:
        raise _wrong(path, 1, "settings.end_tokens needs at least one piece, none of them empty")
    if settings.max_context < 1:
        raise _wrong(path, 1, f"settings.max_context is {settings.max_context}, it counts tokens")
    return ids


def _pieces(line: _Line, ids: dict[int, bytes], path: str | Path, number: int) -> list[bytes]:
    """Bytes of each piece; ids that pieces choose for themselves are added to `ids`."""
    found = []
    for index, piece in enumerate(line.pieces):
        data = _bytes(piece, path, number, index)
        own_id = None if isinstance(piece, str) else piece.id
        if own_id is not None and (own_id < 0 or ids.setdefault(own_id, data) != data):
            raise _wrong(path, number, f"piece {index}: id {own_id} is negative or stands for another piece already")
        found.append(data)
    return found


def _bytes(piece: str | _Piece, path: str | Path, number: int, index: int) -> bytes:
    text = piece if isinstance(piece, str) else piece.text
    digits = None if isinstance(piece, str) else piece.hex
    if (text is None) == (digits is None):
        raise _wrong(path, number, f'piece {index} needs either "text" or "hex"')
    try:
        data = bytes.fromhex(digits or "") if text is None else text.encode("utf-8", "surrogatepass")
    except ValueError:
        raise _wrong(path, number, f'piece {index}: "hex" is {digits!r}, not hexadecimal bytes') from None
    if not data:
        raise _wrong(path, number, f"piece {index} is empty; a token has at least one byte, leave it out")
    return data


def _vocabulary(
    settings: _Settings, ids: dict[int, bytes], pieces: list[list[bytes]], lines: list[_Line]
) -> Vocabulary:
    candidates = [
        token.encode()
        for line in lines
        for row in [*(line.top or []), *(piece.top or [] for piece in line.pieces if isinstance(piece, _Piece))]
        for token, _ in row
        if isinstance(token, str) and token
    ]
    every = [piece for row in pieces for piece in row]
    return Vocabulary(ids, [*every, *candidates], end_tokens=settings.end_tokens)


def _line(number: int, line: _Line, pieces: list[bytes], vocabulary: Vocabulary, path: str | Path) -> ScriptedLine:
    count = len(pieces)
    for name, given in (("logprobs", line.logprobs), ("top", line.top)):
        if given is not None and len(given) != count:
            raise _wrong(path, number, f'"{name}" has {len(given)} entries for {count} pieces')
    tokens = []
    for index, piece in enumerate(pieces):
        said = line.pieces[index]
        own = said if isinstance(said, _Piece) else _Piece()
        logprob = own.logprob
        if logprob is None:
            logprob = line.logprobs[index] if line.logprobs else DEFAULT_LOGPROB
        if logprob != "nan" and not (math.isfinite(logprob) and logprob <= 0):
            raise _wrong(path, number, f"piece {index}: logprob {logprob} is no natural logarithm of a probability")
        rows = own.top if own.top is not None else (line.top[index] if line.top else [])
        delay_ms = line.delay_ms if own.delay_ms is None else own.delay_ms
        if not (math.isfinite(delay_ms) and delay_ms >= 0):
            raise _wrong(path, number, f"piece {index}: delay_ms is {delay_ms}; write milliseconds from 0")
        top = tuple(_candidate(row, vocabulary, path, number) for row in rows)
        token_id = vocabulary.id_of(piece) if own.id is None else own.id
        tokens.append(ScriptedToken(token_id, float(logprob), top, delay_ms / 1000))
    return ScriptedLine(
        number, tuple(tokens), line.finish, _failure(line, count, path, number), _pattern(line, path, number)
    )


def _candidate(row: Candidate, vocabulary: Vocabulary, path: str | Path, number: int) -> tuple[int, float]:
    token, value = row
    if token == "":
        raise _wrong(path, number, "a candidate in top is empty; name a token")
    if isinstance(value, str) and value != "-inf":
        raise _wrong(path, number, f'a candidate\'s logprob is {value!r}; write a number, null or "-inf"')
    token_id = vocabulary.id_of(token.encode()) if isinstance(token, str) else token
    return token_id, float(value) if isinstance(value, int | float) else -math.inf


def _failure(line: _Line, count: int, path: str | Path, number: int) -> Failure | None:
    if line.fail is None:
        return None
    if not 0 <= line.fail.at <= count:
        raise _wrong(path, number, f"fail.at is {line.fail.at}; this line can fail at 0 to {count} tokens")
    if not 400 <= line.fail.status <= 599:
        raise _wrong(path, number, f"fail.status is {line.fail.status}; errors are 400 to 599")
    return Failure(line.fail.at, line.fail.status, line.fail.message)


def _pattern(line: _Line, path: str | Path, number: int) -> re.Pattern[str] | None:
    if line.when is None:
        return None
    try:
        return re.compile(line.when, re.DOTALL)
    except re.error as error:
        raise _wrong(path, number, f'"when" is no regular expression: {error}') from error
