"""Text that is still coming, for readers that are written as if it were all there.

    def reader(source: Source) -> Reading[str]:
        yield from source.begins("<a>", "<b>")      # waits exactly as long as either may still come
        return source.take()

    running = reader(source)
    next(running, None); source.feed("<"); next(running, None); source.feed("a>"); ...

A reader is a generator: it yields where it has to wait for more text, and is resumed when more has come. It therefore decides
by what the text is, never by how it was cut, and that makes the streamed result equal to the whole one. A reader may
look ahead and go back: `at` can be remembered and set again. Used by reasoning.py, json_text.py, tool_formats/.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]

SPACES = " \t\r\n"
_COMPACT = 4096  # characters read before they are let go


class Source:
    """The unread rest of one stream of text."""

    def __init__(self) -> None:
        self._text = ""
        self.at = 0  # where reading goes on
        self.ended = False

    def feed(self, text: str) -> None:
        self._text += text

    def end(self) -> None:
        """No more text comes."""
        self.ended = True

    def settle(self) -> None:
        """What was read is decided, nobody goes back before this place."""
        if self.at > _COMPACT:
            self._text, self.at = self._text[self.at :], 0

    def take(self, count: int = 1) -> str:
        """The next characters, of those that have come."""
        taken = self._text[self.at : self.at + count]
        self.at += len(taken)
        return taken

    def since(self, at: int) -> str:
        """What was read since that place."""
        return self._text[at : self.at]

    def run(self, stops: str) -> str:
        """All that has come up to the first of the characters in `stops`."""
        found = [end for stop in stops if (end := self._text.find(stop, self.at)) >= 0]
        return self.take(min(found, default=len(self._text)) - self.at)

    def unread(self) -> str:
        """All that has come."""
        return self.take(len(self._text) - self.at)

    def peek(self) -> Reading[str]:
        """The next character, not taken; "" at the end of the stream."""
        while self.at == len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self.at]

    def spaces(self) -> Reading[str]:
        """The white space that comes next, all of it."""
        start = self.at
        while (yield from self.peek()) and self._text[self.at] in SPACES:
            self.at += 1
        return self.since(start)

    def begins(self, *markers: str) -> Reading[str]:
        """The first of these that the unread text begins with; "" if it is none. Nothing is taken."""
        while True:
            for marker in markers:
                if self._text.startswith(marker, self.at):
                    return marker
                rest = len(self._text) - self.at
                if not self.ended and rest < len(marker) and marker.startswith(self._text[self.at :]):
                    break  # it may still become this one
            else:
                return ""
            yield

    def accept(self, *markers: str) -> Reading[str]:
        """The same, and takes it."""
        found = yield from self.begins(*markers)
        return self.take(len(found))

    def accept_closing(self, *markers: str) -> Reading[str]:
        """The same; at the end of the stream also the beginning of one of them, as far as it came."""
        found = yield from self.accept(*markers)
        rest = self._text[self.at :]
        if not found and self.ended and rest and any(marker.startswith(rest) for marker in markers):
            return self.take(len(rest))
        return found
