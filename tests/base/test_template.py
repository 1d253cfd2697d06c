"""Slots in prompts that users write."""

from __future__ import annotations

import pytest

from areal.base.errors import ConfigError
from areal.base.template import Template

KNOWN = ("task", "task.*", "answer")


def test_slots_are_filled_and_other_braces_are_text() -> None:
    template = Template('{task}|{task.gold.x}|{{answer}}|{"score": 1}|{}|{ answer }|{answer}', KNOWN)
    assert template.slots == {"task", "task.gold.x", "answer"}
    filled = template.fill({"task": "T", "task.gold.x": "G", "answer": "{task}{{answer}}"}.__getitem__)
    assert filled == 'T|G|{answer}|{"score": 1}|{}|{ answer }|{task}{{answer}}', "an answer opens no slot"


@pytest.mark.parametrize(("text", "says"), [("{anwser}", "did you mean {answer}"), ("{score}", "write {{score}}")])
def test_a_slot_that_stands_for_nothing_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"key\.x: ") as error:
        Template(text, KNOWN, key="key.x")
    assert says in str(error.value)
