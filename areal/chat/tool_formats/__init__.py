"""The table of tool call formats: one file and one line here, named in `rollout.agent.tool_call_parser`.

form = tool_format("qwen", template.source)      # what the chat template shows, else Hermes'
form = tool_format("mistral", template.source)   # this one
"""

from __future__ import annotations

from areal.chat.tool_formats.base import ToolFormat
from areal.chat.tool_formats.deepseek import DeepSeek
from areal.chat.tool_formats.glm import Glm
from areal.chat.tool_formats.hermes import Hermes
from areal.chat.tool_formats.kimi import Kimi
from areal.chat.tool_formats.llama3_json import Llama3Json
from areal.chat.tool_formats.mistral import Mistral
from areal.chat.tool_formats.plain_json import PlainJson
from areal.chat.tool_formats.qwen3_coder import Qwen3Coder
from areal.config.rollout import ToolCallParser

# In the order in which a template is asked: some families' templates also show the tags of a more general one.
TOOL_FORMATS: dict[ToolCallParser, ToolFormat | None] = {
    "qwen3_coder": Qwen3Coder(),
    "glm": Glm(),
    "kimi": Kimi(),
    "deepseek": DeepSeek(),
    "mistral": Mistral(),
    "llama3_json": Llama3Json(),
    "hermes": Hermes(),
    "json": PlainJson(),
    "none": None,
    "qwen": Hermes(),
}


def tool_format(name: ToolCallParser, template: str) -> ToolFormat | None:
    """The named format; of the default, `qwen`, the one whose markers the chat template's source shows."""
    if name != "qwen":
        return TOOL_FORMATS[name]
    for form in TOOL_FORMATS.values():
        if form is not None and any(mark in template for mark in form.marks):
            return form
    return TOOL_FORMATS["qwen"]


__all__ = ["TOOL_FORMATS", "ToolFormat", "tool_format"]
