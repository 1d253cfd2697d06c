"""The scripted backend's renderer: ChatML over the script's own vocabulary (docs/scripted.md).

    renderer = scripted_renderer("script.jsonl")

A pure function of the file; the server reads the same one (inference/scripted), so both agree on every id.
"""

from __future__ import annotations

from pathlib import Path

from areal.chat.renderer import JinjaRenderer
from areal.chat.template import CHATML, ChatTemplate
from areal.config.rollout import ReasoningParser, ToolCallParser
from areal.inference.scripted.script import read_script


def scripted_renderer(
    path: str | Path,
    *,
    chat_template: str | Path | None = None,
    tool_call_parser: ToolCallParser = "qwen",
    reasoning_parser: ReasoningParser = "qwen3",
) -> JinjaRenderer:
    """chat_template: a file to use in place of ChatML. Raises ConfigError, as read_script does."""
    own = ChatTemplate(CHATML, origin="the scripted backend's ChatML")
    return JinjaRenderer(
        read_script(path).vocabulary,
        ChatTemplate.read(chat_template) if chat_template else own,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
    )
