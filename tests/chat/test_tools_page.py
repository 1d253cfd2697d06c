"""docs/tools.md names every format and style, and shows the tools prompt that templates without a tools section get."""

from __future__ import annotations

from pathlib import Path

from areal.chat.reasoning import REASONING_STYLES
from areal.chat.template_input import TOOL_LIST, TOOLS_PROMPT
from areal.chat.tool_formats import TOOL_FORMATS

TEXT = (Path(__file__).parents[2] / "docs" / "tools.md").read_text("utf-8")


def test_every_parser_has_its_line() -> None:
    formats, _, styles = TEXT.partition("`rollout.agent.reasoning_parser`")
    assert [name for name in TOOL_FORMATS if f"\n| `{name}` |" not in formats] == []
    assert [name for name in REASONING_STYLES if f"\n| `{name}` |" not in styles] == []


def test_the_markers_stand_there_as_they_are_read() -> None:
    shown = TEXT.replace("\\|", "|")
    for name, form in TOOL_FORMATS.items():
        assert form is None or all(
            mark in shown for mark in form.marks if "section" not in mark and "calls" not in mark
        ), name
    for style in REASONING_STYLES.values():
        assert style is None or f"{style.opening}…{style.closing}" in shown


def test_the_tools_prompt_is_shown_word_for_word() -> None:
    tool = '{"type": "function", "function": {"name": …, "description": …, "parameters": …}}'
    assert TOOLS_PROMPT.format(tool_list=TOOL_LIST.format(tools=tool)) in TEXT
