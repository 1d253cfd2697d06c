"""What a client saw, in a file that outlives it: one JSON object a line, on disk before the client goes on.

    journal = Journal(path); journal.write("answered", request="a.0", id="chatcmpl-…", text="7", logprobs=[-0.1])
    seen = read(folder)                     # the sessions of all journals of a folder: Seen("a.0", …)

Every record has `at` (seconds since the epoch), `what`, and `request`, the request_id by which the client started the session it is about.

    starting   task, after (the session that this start refreshes, or "")      started    session, key, after
    calling    call                                                           streaming  call, id: its first chunk came
    answered   call, id, text, tokens, logprobs, finish: whole, to its end      broke      call, error: any other end
    rewarding  id, value                                                      rewarded   id, value: acknowledged
    ending                                                                    ended      count: acknowledged
    sent       a request left (of whichever call)                              refused    said: an answer that trying again cannot change
    strange    said: an answer that no death explains (a 500)

A record of an acknowledgement is written after it came, one of an intention before the request leaves: so the service holds at least what
is acknowledged here, and at most what is intended.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Journal:
    """Append-only; several threads of one process may write."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._lock = threading.Lock()

    def write(self, what: str, *, request: str, **facts: Any) -> None:
        line = json.dumps({"at": time.time(), "what": what, "request": request, **facts}) + "\n"
        with self._lock:
            os.write(self._file, line.encode())
            os.fsync(self._file)


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's answer as a client got it: complete, with the log-prob of each token that was shown."""

    id: str
    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    finish: str


@dataclass(slots=True)
class Seen:
    """One session as its client saw it. after: the session whose place it takes. rewards: acknowledged, the last value for each answer.
    tried: values that were sent and not acknowledged since. leaving: its end or refresh was asked for; left: acknowledged ("ended",
    "refreshed"). counted: by the acknowledgement of its end. sent: model requests that left."""

    request: str
    task: str = ""
    session: str = ""
    key: str = ""
    after: str = ""
    answers: dict[str, Answer] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)
    tried: dict[str, set[float]] = field(default_factory=dict)
    leaving: bool = False
    left: str = ""
    counted: int | None = None
    sent: int = 0
    refused: list[str] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)


def records(path: Path, start: int = 0) -> Iterator[dict[str, Any]]:
    """Whole records from byte `start` on; a line that is still being written is left out."""
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


def read(folder: Path) -> dict[str, Seen]:
    """By request id, the sessions of all journals of a folder."""
    found: dict[str, Seen] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for record in records(path):
            _add(found.setdefault(record["request"], Seen(record["request"])), record)
    for seen in list(found.values()):
        if seen.after:
            found[seen.after].leaving = True
            found[seen.after].left = "refreshed" if seen.session else ""
    return found


def _add(seen: Seen, record: dict[str, Any]) -> None:
    match record["what"]:
        case "starting":
            seen.task, seen.after = record["task"], record["after"]
        case "started":
            seen.session, seen.key = record["session"], record["key"]
        case "sent":
            seen.sent += 1
        case "answered":
            texts = (tuple(record[name]) for name in ("tokens", "logprobs"))
            seen.answers[record["id"]] = Answer(record["id"], record["text"], *texts, record["finish"])
        case "rewarding":
            seen.tried.setdefault(record["id"], set()).add(record["value"])
        case "rewarded":
            seen.rewards[record["id"]] = record["value"]
            seen.tried[record["id"]] = set()
        case "ending":
            seen.leaving = True
        case "ended":
            seen.left, seen.counted = "ended", record["count"]
        case "refused":
            seen.refused.append(record["said"])
        case "strange":
            seen.strange.append(record["said"])
