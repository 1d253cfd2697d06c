"""Stop texts: end an answer where one of them appears, however tokens cut it (settled 14).

    matcher = StopMatcher(("two three",))
    matcher.feed("one tw")      # "one "      "tw" may still become a stop text, so it is held back
    matcher.feed("o three")     # ""          matcher.stopped is now True, `matched` names the text
    matcher.finish()            # what was held back, when the answer ends without a stop

The stop text itself and what follows it are not part of the answer. The first stop text to be complete wins, the longest
of those that complete at the same character; so the result does not depend on how the text was cut. Used by stream_parser.py.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """State of one answer. Without stop texts it lets everything through."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted({stop for stop in stops if stop}, key=len, reverse=True)
        self._held = ""
        self.matched: str | None = None
        self.stopped = False

    def feed(self, text: str) -> str:
        """What may be shown now. After a stop: nothing any more."""
        if not self._stops:
            return text
        if self.stopped:
            return ""
        text = self._held + text
        found = [(text.find(stop) + len(stop), stop) for stop in self._stops if stop in text]
        if found:
            end, self.matched = min(found, key=lambda match: (match[0], -len(match[1])))
            self._held, self.stopped = "", True
            return text[: end - len(self.matched)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """The text held back, when no more can come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
