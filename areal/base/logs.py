"""Log lines: one grammar for people, grep and the plot tool; the same lines on the terminal and in a file.

    with open_log(log_dir / "train.log", run_id="my-exp/trial-0/1764439200"):
        Log("train").line(step=119, updated=32, loss=0.41812)     # [train] step=119 updated=32 loss=0.41812 ts=14:23:01.335
        announce("RLTrainer", "Proxy gateway available at …")     # (AReaL) RLTrainer INFO: Proxy gateway available at …
        warn("RLTrainer", "queue is full: …")                     # (AReaL) RLTrainer WARNING: queue is full: …
    parse_line("[train] step=119 loss=0.41812").facts             # {"step": 119, "loss": 0.41812}

Built on the standard `logging` tree (logger `areal`), so lines of any thread arrive whole and libraries can join in.
A file is appended to, flushed line by line, begins with a header line that names the run, and never holds a secret
(redact.py). The terminal is whatever sys.stdout is at that moment, which lets a progress display take it over.
Used by everything that reports; read back by tools/plot_metrics.py. No torch.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from areal.base.errors import ConfigError
from areal.base.redact import redact

Fact = str | int | float | bool | None
Level = Literal["debug", "info", "warning", "error"]
LEVELS: dict[Level, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

# The fields that stand before `ts`, in this order, whatever order the caller names them in. Other parts: all before ts.
FIRST_FIELDS: Mapping[str, tuple[str, ...]] = {
    "rollout": ("step", "generated", "tokens"),
    "train": ("step", "updated", "loss"),
    "throughput": ("step", "samples_per_second", "tokens_per_second"),
    "taotoken": ("model", "model_id", "status", "elapsed_ms", "attempts"),
}

_ROOT = logging.getLogger("areal")
_LINE = re.compile(r"\[([a-z][\w-]*)\](.*)", re.DOTALL)
_FACT = re.compile(r'\s+([A-Za-z_][\w./-]*)=("(?:[^"\\]|\\.)*"|[^\s"]*)')
_PLAIN_TEXT = re.compile(r"[^\s\"=\\\x00-\x1f\x7f]+")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?|inf|nan)")
_WORDS: Mapping[str, Fact] = {"true": True, "false": False, "null": None}


class Log:
    """Writes the lines of one part. Cheap to create; holds nothing but the name."""

    def __init__(self, part: str) -> None:
        if not re.fullmatch(r"[a-z][\w-]*", part):
            raise ValueError(f"log part {part!r} must be a lower-case word")
        self.part = part

    def line(self, **facts: Any) -> None:
        """One line. Facts are numbers, text, booleans or None; put the unit in the name (`elapsed_ms`)."""
        _ROOT.info(format_line(self.part, facts, time.time()), extra={"areal_verbatim": True})


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line read back. facts includes `ts` as text; numbers are int or float again."""

    part: str
    facts: dict[str, Fact]


def format_line(part: str, facts: Mapping[str, Any], at: float) -> str:
    """`[part] a=1 b=2 ts=HH:MM:SS.mmm more=…`, local time of `at` (seconds since the epoch)."""
    first = FIRST_FIELDS.get(part)
    if first is None:
        before, after = list(facts), []
    else:
        before = [name for name in first if name in facts]
        after = [name for name in facts if name not in first]
    seconds, milliseconds = divmod(round(at * 1000), 1000)
    stamp = f"{time.strftime('%H:%M:%S', time.localtime(seconds))}.{milliseconds:03d}"
    words = [f"{name}={_format(facts[name])}" for name in before]
    words.append(f"ts={stamp}")
    words += [f"{name}={_format(facts[name])}" for name in after]
    return f"[{part}] " + " ".join(words)


def parse_line(text: str) -> LogLine | None:
    """The inverse of `format_line`; None for a line of another kind (header, plain message)."""
    line = _LINE.fullmatch(text.rstrip("\r\n"))
    if line is None:
        return None
    facts: dict[str, Fact] = {}
    at = 0
    for found in _FACT.finditer(line[2]):
        if found.start() != at:
            return None
        facts[found[1]] = _parse(found[2])
        at = found.end()
    return LogLine(line[1], facts) if not line[2][at:].strip() else None


def announce(logger_name: str, text: str) -> None:
    """`(AReaL) <logger_name> INFO: <text>`, the shape in which the service reports what a person waits for."""
    logging.getLogger(f"areal.{logger_name}").info("%s", text)


def warn(logger_name: str, text: str) -> None:
    """`(AReaL) <logger_name> WARNING: <text>`: something a person should change; the text ends with the remedy."""
    logging.getLogger(f"areal.{logger_name}").warning("%s", text)


@contextmanager
def open_log(*paths: Path, run_id: str, terminal: bool = True, level: Level = "info") -> Iterator[None]:
    """Send the lines of this process to files (created at once, with a header line each) and the terminal.

    Folders are made as needed (mode 0700), files have mode 0600. May be nested: inner files are added. Raises ConfigError for a file that
    cannot be written."""
    handlers: list[logging.Handler] = [_open_file(path, run_id) for path in paths]
    if terminal:
        handlers.append(_Terminal())
    level_before, propagate_before = _ROOT.level, _ROOT.propagate
    _ROOT.setLevel(LEVELS[level])
    _ROOT.propagate = False  # the root logger belongs to the host program; a line must not appear twice
    for handler in handlers:
        handler.setFormatter(_Formatter())
        _ROOT.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            _ROOT.removeHandler(handler)
            handler.close()
        _ROOT.setLevel(level_before)
        _ROOT.propagate = propagate_before


class _Formatter(logging.Formatter):
    """Lines of `Log` as they are, everything else as `(AReaL) name LEVEL: message`; both redacted, tracebacks too."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if not getattr(record, "areal_verbatim", False):
            text = f"(AReaL) {record.name.removeprefix('areal.')} {record.levelname}: {text}"
        return redact(text)


class _Terminal(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stdout, flush=True)
        except (OSError, ValueError):  # the terminal is gone (`| head`, closed stream); the files still get the line
            return


def _open_file(path: Path, run_id: str) -> logging.Handler:
    header = f"# run_id={run_id} pid={os.getpid()} started={time.strftime('%Y-%m-%dT%H:%M:%S%z')}\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    except OSError as error:
        raise ConfigError(
            f"cannot write the log {path} ({error.strerror}); choose a folder where you may write (--log-dir, logging.log_dir)"
        ) from None
    try:
        os.write(handle, redact(header).encode())
    finally:
        os.close(handle)
    return logging.FileHandler(path, mode="a", encoding="utf-8", errors="backslashreplace")


def _format(value: Any) -> str:
    if hasattr(value, "item") and not isinstance(value, str):  # a numpy or torch scalar
        value = value.item()
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int):
        return str(value)
    text = str(value)
    if _PLAIN_TEXT.fullmatch(text) and text not in _WORDS and not _NUMBER.fullmatch(text):
        return text
    return json.dumps(text, ensure_ascii=False)


def _parse(word: str) -> Fact:
    if word.startswith('"'):
        return str(json.loads(word))
    if word in _WORDS:
        return _WORDS[word]
    if _NUMBER.fullmatch(word):
        return int(word) if re.fullmatch(r"[+-]?\d+", word) else float(word)
    return word
