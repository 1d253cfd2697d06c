"""What each agent framework needs on this machine to be started by a run: said before anything starts.

    missing("claude_code")          # None, or a sentence with the install line

Which they are is rollout.agent.framework; how each is started stands in rollout/frameworks, in a table with the same names. Used by
own_agents.py.
"""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass

from areal.config.rollout import Framework


@dataclass(frozen=True, slots=True)
class Needs:
    """program: on PATH; modules: importable. install: the command line that gets them."""

    program: str | None
    modules: tuple[str, ...]
    install: str


NEEDS: dict[Framework, Needs] = {
    "openclaw": Needs(
        "openclaw", (), "npm install -g openclaw with Node 24.16 or later (older ones get an empty placeholder)"
    ),
    "claude_code": Needs("claude", (), "npm install -g @anthropic-ai/claude-code"),
    "langchain": Needs(None, ("langchain", "langchain_openai"), "pip install langchain langchain-openai"),
}


def missing(framework: Framework) -> str | None:
    """A sentence, or None if all is there."""
    needs = NEEDS[framework]
    lacks = [name for name in needs.modules if importlib.util.find_spec(name) is None]
    if needs.program and shutil.which(needs.program) is None:
        lacks.append(f"{needs.program} on PATH")
    if not lacks:
        return None
    return f"rollout.agent.framework={framework} needs {' and '.join(lacks)}: {needs.install}"
