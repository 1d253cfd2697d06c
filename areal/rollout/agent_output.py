"""What agents print, in a file of the run: `agents-<worker>.log` beside the other logs. Bounded for each session and as a whole.

    with open_agent_log(logs / "agents-w0.log"):
        spoken = Spoken(session_id)
        spoken.line("hello")                        # 14:23:01 <session id> | hello
        spoken.last                                 # "hello": for rewards and for errors

Lines beyond LINES of one session are counted and left out; the file is turned over at FILE_BYTES, and one older file stays. Keys are
hidden as in every log. `speaking` says which session an agent's task runs for. Used by agent_runs.py, programs.py and agent_choice.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from logging.handlers import RotatingFileHandler
from pathlib import Path

from areal.base.redact import redact

LINES = 200  # of one session
LINE_CHARS = 2000
FILE_BYTES = 16 * 2**20

speaking: ContextVar[str] = ContextVar("speaking", default="-")

_log = logging.getLogger("areal_agents")  # not below `areal`, whose lines go to the terminal


class Spoken:
    """The output of one try. last: its last line that is not empty."""

    def __init__(self, session_id: str) -> None:
        self.last = ""
        self._session_id = session_id
        self._lines = 0

    def line(self, text: str) -> None:
        """Takes one line, without its end."""
        if text.strip():
            self.last = text.strip()
        self._lines += 1
        if self._lines < LINES:
            _log.info("%s | %s", self._session_id, text[:LINE_CHARS])
        elif self._lines == LINES:
            _log.info("%s | (what else it prints is left out)", self._session_id)


@contextmanager
def open_agent_log(path: Path) -> Iterator[None]:
    """Send what agents print there until the end of the block."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.touch(mode=0o600)
    handler = RotatingFileHandler(path, maxBytes=FILE_BYTES, backupCount=1, encoding="utf-8", errors="replace")
    handler.setFormatter(_Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    _log.setLevel(logging.INFO)
    _log.propagate = False
    _log.addHandler(handler)
    try:
        yield
    finally:
        _log.removeHandler(handler)
        handler.close()


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))
