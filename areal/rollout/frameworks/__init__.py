"""Agent frameworks that a run can start by itself, unmodified: one file each, one line here, and its needs in config/frameworks.py.

    FRAMEWORKS["claude_code"](settings, words, None).run(task, base_url=…, api_key=…)     # an Agent

words: the command line that takes the place of the framework's own, if there is one. build: what rollout.agent.path names, for
frameworks that are Python. Used by agent_choice.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from areal.config.rollout import Framework
from areal.rollout.frameworks.claude_code import ClaudeCode
from areal.rollout.frameworks.langchain import LangChain
from areal.rollout.frameworks.openclaw import OpenClaw
from areal.rollout.programs import Driver, ProgramAgent, ProgramSettings

Make = Callable[[ProgramSettings, Sequence[str] | None, Any], Any]


def _program(driver: Driver) -> Make:
    return lambda settings, words, build: ProgramAgent(settings, words or driver.command, driver)


def _langchain(settings: ProgramSettings, words: Sequence[str] | None, build: Any) -> Any:
    """With a command line it is somebody's program that uses LangChain."""
    return ProgramAgent(settings, words) if words else LangChain(settings, build)


FRAMEWORKS: dict[Framework, Make] = {
    "openclaw": _program(OpenClaw()),
    "claude_code": _program(ClaudeCode()),
    "langchain": _langchain,
}
