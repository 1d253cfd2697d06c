"""Agents that the service runs itself, on the same path as everyone else's: a base URL, a key, HTTP.

    agent = load_agent("examples.math_agent.agent:MathAgent")
    reward = await agent.run(task, base_url="http://127.0.0.1:41873/v1", api_key="sk-sess-...")

An agent is any object with `async run(task, *, base_url, api_key)` that returns its reward: a number for the last
interaction, or {interaction id: number}, or None where it set rewards itself. A class is instantiated without arguments. An agent that
raises is data, not a crash: its session ends as reward_failed and is counted. Used by worker.py.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Mapping
from typing import Any, Protocol

from areal.base.errors import BadRequest, ConfigError

Reward = float | Mapping[str, float] | None


class Agent(Protocol):
    async def run(self, task: dict[str, Any], *, base_url: str, api_key: str) -> Reward: ...


def load_agent(path: str) -> Agent:
    """The agent at `module:attribute`. Raises ConfigError saying which half is wrong."""
    module_name, _, attribute = path.partition(":")
    if not attribute:
        raise ConfigError(f"rollout.agent.path is {path!r}; write it as module:attribute")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)  # paths of a config are relative to the working directory, module paths too
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"rollout.agent.path: cannot import {module_name} ({error}); is it on PYTHONPATH?") from error
    try:
        found = getattr(module, attribute)
    except AttributeError as error:
        raise ConfigError(f"rollout.agent.path: module {module_name} has no {attribute}") from error
    agent = found() if isinstance(found, type) else found
    if not hasattr(agent, "run"):
        raise ConfigError(f"rollout.agent.path: {path} has no `async run(task, *, base_url, api_key)`")
    return agent  # type: ignore[no-any-return]


def rewards_of(result: object) -> dict[str | None, float]:
    """What an agent returned, as {interaction id or None: reward}. Raises BadRequest for anything that is no reward."""
    if result is None:
        return {}
    items: Mapping[Any, Any] = result if isinstance(result, Mapping) else {None: result}
    for name, value in items.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise BadRequest(f"the agent returned {value!r} as reward of {name or 'the last answer'}; return a number")
    return {name: float(value) for name, value in items.items()}
