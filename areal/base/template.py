"""Text with named slots, for prompts that users write: `{task}`, `{task.answer}`; every other brace is plain text.

    template = Template("Task: {task}\nReply {\"score\": 1} or {{task}}.", ("task",))     # ConfigError for a slot that is none
    template.slots                                  # frozenset({"task"})
    template.fill(lambda slot: values[slot])        # what is filled in is not looked at again: an answer cannot open a slot

A slot is a plain word in braces, with dots below it; `{{word}}` is that word in braces. So JSON may stand in a prompt as it is. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches

from areal.base.errors import ConfigError

_SLOT = re.compile(r"\{\{([A-Za-z_][\w.]*)\}\}|\{([A-Za-z_][\w.]*)\}")


class Template:
    """See the module. known: the names that a slot may have; one with dots below it is known by what stands before the first."""

    def __init__(self, text: str, known: Iterable[str], *, key: str = "the template") -> None:
        """key: where the text stands, for the error. Raises ConfigError."""
        self._text, names = text, tuple(known)
        self.slots = frozenset(found[2] for found in _SLOT.finditer(text) if found[2])
        for slot in sorted(self.slots):
            if slot not in names and not (slot.partition(".")[0] + ".*" in names and "." in slot):
                near = get_close_matches(slot, names, 1)
                raise ConfigError(
                    f"{key}: {{{slot}}} stands for nothing{f'; did you mean {{{near[0]}}}?' if near else ''} Known are "
                    f"{', '.join(f'{{{name}}}' for name in names)}; for the plain text write {{{{{slot}}}}}"
                )

    def fill(self, value: Callable[[str], str]) -> str:
        """The text with value(slot) in the place of each slot."""
        return _SLOT.sub(lambda found: value(found[2]) if found[2] else f"{{{found[1]}}}", self._text)
