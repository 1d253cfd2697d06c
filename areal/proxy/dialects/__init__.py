"""The table of public protocols: a dialect is one class and one line here."""

from __future__ import annotations

from areal.proxy.dialects.anthropic_messages import AnthropicMessages
from areal.proxy.dialects.base import Dialect
from areal.proxy.dialects.openai_chat import OpenAIChat
from areal.proxy.dialects.openai_responses import OpenAIResponses


def dialects() -> tuple[Dialect, ...]:
    """One of each, for one app."""
    return (OpenAIChat(), OpenAIResponses(), AnthropicMessages())
