"""LangChain and LangGraph, in the worker's own loop: the user's function makes an agent of a chat model, the driver asks it the task.

    def build(model):                                       # rollout.agent.path: my_agent:build
        return create_agent(model, [my_tool])               # or any graph that takes and returns {"messages": [...]}

The chat model is LangChain's own ChatOpenAI with the session's base URL and key; nodes of a graph find the task in their config, under
`configurable`. A graph whose final state has a number under `reward` is
rewarded with it; an object with `run` is taken as it is (agent_choice.py). Without a path it is LangChain's agent without tools. Needs
langchain and langchain-openai. Used by frameworks/__init__.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from areal.rollout.agents import Reward
from areal.rollout.programs import ProgramSettings, prompt_of

STEPS_A_TURN = 2  # of a graph: the model, and its tools


class LangChain:
    """An Agent."""

    def __init__(self, settings: ProgramSettings, build: Callable[[Any], Any] | None = None) -> None:
        self._settings = settings
        self._build = build or _without_tools

    async def run(self, task: dict[str, Any], *, base_url: str, api_key: str) -> Reward:
        """What the graph's state says under `reward`; None where it says nothing, also where its turns were not enough."""
        from langchain_openai import ChatOpenAI
        from langgraph.errors import GraphRecursionError

        settings = self._settings
        model = ChatOpenAI(model=settings.model, base_url=base_url, api_key=api_key, timeout=settings.timeout_s)
        question = {"messages": [{"role": "user", "content": prompt_of(task)}]}
        limit = {"recursion_limit": STEPS_A_TURN * settings.max_turns, "configurable": {"task": task}}
        try:
            state = await self._build(model).ainvoke(question, limit)
        except GraphRecursionError:
            return None
        return state.get("reward") if isinstance(state, dict) else None


def _without_tools(model: Any) -> Any:
    from langchain.agents import create_agent

    return create_agent(model, [])
